from pathlib import Path

import pytest

from prfaas.deployment import load_planned
from prfaas.studies import Setting, setting_of
from prfaas.workload import read_requests

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def setting() -> Setting:
    trace = read_requests(EXAMPLES / "traces" / "mooncake_burst.jsonl.gz")
    return setting_of(load_planned(EXAMPLES / "paper.yaml"), trace, seed=3, is_quick=True)
