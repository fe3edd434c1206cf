from pathlib import Path

import pytest

from prfaas.core.deployment import load_planned
from prfaas.core.workload.requests import read_requests
from prfaas.lab.studies import StudyContext, context_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def context() -> StudyContext:
    trace = read_requests(EXAMPLES / "traces" / "mooncake_burst.jsonl.gz")
    return context_of(load_planned(EXAMPLES / "paper.yaml"), trace, seed=3, is_quick=True)
