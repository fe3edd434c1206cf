"""Studies as a Markdown page with drawings beside it."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Study, StudySection, StudyTable

_WIDTH = 118


def page_of(context: StudyContext, sections: Mapping[str, tuple[Study, StudySection]], command: str) -> str:
    """The whole page; drawings are taken from `img/` beside it."""
    lines = ["# Studies on the simulator", "", _paragraph(_intro(context, command)), ""]
    if len(sections) > 1:
        lines += [f"- [{study.title}](#{_anchor(study.title)})" for study, _ in sections.values()]
        lines.append("")
    for study, section in sections.values():
        lines += [*_section(study, section), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _intro(context: StudyContext, command: str) -> str:
    text = (
        f"Written by `{command}`; don't edit. Deployment `{context.planned.name}`: Λ_max is "
        f"{context.lambda_max:.4g} requests/s by `prfaas plan`, with {context.optimum.n_prefill} of "
        f"{context.problem.pd[0].instances} PD instances as prefill and an egress of "
        f"{context.optimum.egress_bits_per_s / 1e9:.3g} Gbit/s; loads are shares of it. All runs of a "
        "comparison meet the same "
        "requests at the same times. TTFT is the paper's: until all KV is at the decode instance and a slot free "
        "there. Seeds count from "
        f"{context.seed}. What the simulator knows and how far to believe it: [simulator.md](simulator.md), "
        "[fidelity.md](fidelity.md); the policies: [scheduling.md](scheduling.md)."
    )
    if context.is_quick:
        text += " **`--quick`: a twentieth of the requests. These numbers only show that the studies run.**"
    return text


def _section(study: Study, section: StudySection) -> list[str]:
    lines = [f"## {study.title}", "", f"`prfaas study {study.name}`. {section.question}", ""]
    lines += [_paragraph(" ".join(section.findings)), "", _paragraph(f"Setup. {section.setup}"), ""]
    for figure in section.figures:
        lines += [f"![{figure.caption}](img/{figure.name}.svg)", "", _paragraph(f"*{figure.caption}*"), ""]
    for title, table in section.tables.items():
        lines += [f"{title}:", "", *_table(table), ""]
    lines += [each for note in section.notes for each in (_paragraph(note), "")]
    return lines


def _table(table: StudyTable) -> list[str]:
    rows = ["| " + " | ".join(table.columns) + " |"]
    rows.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
    return rows + ["| " + " | ".join(_marked(row)) + " |" for row in table.rows]


def _marked(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in row]


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
