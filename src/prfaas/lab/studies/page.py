"""Studies as a Markdown page with drawings beside it."""

import re
import textwrap
from collections.abc import Mapping

from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Study, StudySection, StudyTable

_WIDTH = 118


def page_of(context: StudyContext, sections: Mapping[str, tuple[Study, StudySection]], command: str) -> str:
    """The whole page; drawings are taken from `img/` beside it."""
    lines = ["# Studies on the simulator", ""]
    lines += [each for text in _intro(context, command) for each in (_paragraph(text), "")]
    if len(sections) > 1:
        lines += [f"- [{study.title}](#{_anchor(study.title)})" for study, _ in sections.values()]
        lines.append("")
    for study, section in sections.values():
        lines += [*_section(study, section), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _intro(context: StudyContext, command: str) -> list[str]:
    seeds = len(context.seeds())
    about = (
        f"Written by `{command}`; don't edit. Deployment `{context.planned.name}`: Λ_max is "
        f"{context.lambda_max:.4g} requests/s by `prfaas plan`, with {context.optimum.n_prefill} of "
        f"{context.problem.pd[0].instances} PD instances as prefill and an egress of "
        f"{context.optimum.egress_bits_per_s / 1e9:.3g} Gbit/s; loads are shares of it. TTFT is the paper's: until all "
        "KV is at the decode instance and a slot free there. What the simulator knows and how far to believe it: "
        "[simulator.md](simulator.md), [fidelity.md](fidelity.md); the policies: [scheduling.md](scheduling.md)."
    )
    numbers = (
        f"Numbers are means over {seeds} seeds, which count from {context.seed}; ± is half of a 95 % interval by "
        "Student's t. All runs of a comparison meet the same requests at the same times. Differences are of such "
        "pairs, seed by seed. An interval covers chance alone, not what the simulator leaves out; of twenty "
        "one misses the mean by chance."
    )
    words = (
        f'"grows (1 of {seeds})": for one seed queues grow as long as requests come, so TTFT would depend on when one '
        'stops; "grows": for all. "too short": the run can\'t tell whether they grow. Classes of prompts are by their '
        "whole length, up to the plan's threshold, and longer."
    )
    if context.is_quick:
        words += " **`--quick`: a twentieth of the requests. These numbers only show that the studies run.**"
    return [about, numbers, words]


def _section(study: Study, section: StudySection) -> list[str]:
    lines = [f"## {study.title}", "", f"`prfaas study {study.name}`. {section.question}", ""]
    lines += [_paragraph(finding, "- ", "  ") for finding in section.findings]
    lines += ["", _paragraph(f"Setup. {section.setup}"), ""]
    for figure in section.figures:
        lines += [f"![{figure.caption}](img/{figure.name}.svg)", "", _paragraph(f"*{figure.caption}*"), ""]
    for title, table in section.tables.items():
        lines += [f"{title}:", "", *_table(table), ""]
    lines += [each for note in section.notes for each in (_paragraph(note), "")]
    return lines


def _table(table: StudyTable) -> list[str]:
    rows = ["| " + " | ".join(table.columns) + " |"]
    rows.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
    return rows + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]


def _paragraph(text: str, first: str = "", then: str = "") -> str:
    """Lines of the page's width, which begin with `first` and `then`."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
