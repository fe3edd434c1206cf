from pathlib import Path

import pytest

from prfaas.core.deployment import load_planned
from prfaas.core.workload import read_requests
from prfaas.lab.studies import Setting, setting_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def setting() -> Setting:
    trace = read_requests(EXAMPLES / "traces" / "mooncake_burst.jsonl.gz")
    return setting_of(load_planned(EXAMPLES / "paper.yaml"), trace, seed=3, is_quick=True)
