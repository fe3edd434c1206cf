"""All studies, and how they are carried out together."""

from collections.abc import Callable, Sequence

from prfaas.studies.ablation import ABLATION
from prfaas.studies.bandwidth import BANDWIDTH
from prfaas.studies.burst import BURST
from prfaas.studies.crew import carry_out
from prfaas.studies.equal_cost import EQUAL_COST
from prfaas.studies.hit_rate import HIT_RATE
from prfaas.studies.run import Outcome, Run
from prfaas.studies.scale import SCALE
from prfaas.studies.setting import Setting
from prfaas.studies.shift import SHIFT
from prfaas.studies.study import Outcomes, Study

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
