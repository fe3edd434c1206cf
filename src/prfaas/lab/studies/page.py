"""Studies as a Markdown page with drawings beside it.

All studies, and how they are carried out together.
"""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from prfaas.lab.studies.ablation import ABLATION
from prfaas.lab.studies.bandwidth import BANDWIDTH
from prfaas.lab.studies.burst import BURST
from prfaas.lab.studies.equal_cost import EQUAL_COST
from prfaas.lab.studies.hit_rate import HIT_RATE
from prfaas.lab.studies.runs import Outcome, Run, carry_out
from prfaas.lab.studies.scale import SCALE
from prfaas.lab.studies.setup import Setting
from prfaas.lab.studies.shift import SHIFT
from prfaas.lab.studies.study import Outcomes, Section, Study, Table

STUDIES = {study.name: study for study in (EQUAL_COST, ABLATION, BANDWIDTH, BURST, SHIFT, HIT_RATE, SCALE)}


def conduct(
    studies: Sequence[Study],
    setting: Setting,
    *,
    jobs: int = 1,
    on_begin: Callable[[Sequence[Run]], None] | None = None,
    on_done: Callable[[Run, Outcome], None] | None = None,
) -> dict[str, Outcomes]:
    """The outcomes of every study by its name; all runs share the processes. The same for any number of `jobs`."""
    runs = {study.name: study.runs(setting) for study in studies}
    everything = [run for each in runs.values() for run in each]
    if on_begin is not None:
        on_begin(everything)
    found = iter(carry_out(everything, jobs=jobs, on_done=on_done))
    return {name: {run.key: next(found) for run in each} for name, each in runs.items()}


_WIDTH = 118


def page_of(setting: Setting, sections: Mapping[str, tuple[Study, Section]], command: str) -> str:
    """The whole page; drawings are taken from `img/` beside it."""
    lines = ["# Studies on the simulator", "", _paragraph(_intro(setting, command)), ""]
    if len(sections) > 1:
        lines += [f"- [{study.title}](#{_anchor(study.title)})" for study, _ in sections.values()]
        lines.append("")
    for study, section in sections.values():
        lines += [*_section(study, section), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _intro(setting: Setting, command: str) -> str:
    text = (
        f"Written by `{command}`; don't edit. Deployment `{setting.planned.name}`: Λ_max is "
        f"{setting.lambda_max:.4g} requests/s by `prfaas plan`, with {setting.optimum.n_prefill} of "
        f"{setting.problem.pd[0].instances} PD instances as prefill and an egress of "
        f"{setting.optimum.egress_bits_per_s / 1e9:.3g} Gbit/s; loads are shares of it. All runs of a "
        "comparison meet the same "
        "requests at the same times. TTFT is the paper's: until all KV is at the decode instance and a slot free "
        "there. Seeds count from "
        f"{setting.seed}. What the simulator knows and how far to believe it: [simulator.md](simulator.md), "
        "[fidelity.md](fidelity.md); the policies: [scheduling.md](scheduling.md)."
    )
    if setting.is_quick:
        text += " **`--quick`: a twentieth of the requests. These numbers only show that the studies run.**"
    return text


def _section(study: Study, section: Section) -> list[str]:
    lines = [f"## {study.title}", "", f"`prfaas study {study.name}`. {section.question}", ""]
    lines += [_paragraph(" ".join(section.findings)), "", _paragraph(f"Setup. {section.setup}"), ""]
    for figure in section.figures:
        lines += [f"![{figure.caption}](img/{figure.name}.svg)", "", _paragraph(f"*{figure.caption}*"), ""]
    for title, table in section.tables.items():
        lines += [f"{title}:", "", *_table(table), ""]
    lines += [each for note in section.notes for each in (_paragraph(note), "")]
    return lines


def _table(table: Table) -> list[str]:
    rows = ["| " + " | ".join(table.columns) + " |"]
    rows.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
    return rows + ["| " + " | ".join(_marked(row)) + " |" for row in table.rows]


def _marked(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in row]


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
