"""Pools under whole traces: the goals of the project, and a day of chats and documents."""

import numpy as np
import pytest
from studies._traffic import ChatsAndDocuments
from studies.pool import PoolReplay

from prfaas.core.shipped import example_path
from prfaas.core.units import GIB
from prfaas.core.workload.requests import read_requests
from prfaas.core.workload.traffic import ReplayedTraffic
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.studies import StudyContext


def hits(context: StudyContext, trace: str, machines: int, options: PoolOptions) -> float:
    """Tokens hit by the paper's model, in percent."""
    traffic = ReplayedTraffic(read_requests(example_path(f"traces/mooncake_{trace}.jsonl.gz")))
    run = PoolReplay(
        ("one",),
        traffic,
        100_000,
        0,
        machines,
        options,
        context.planned.kv_model,
        context.planned.pd_clusters[0].profile,
    )
    return 100 * run.outcome().number("hit_ratio")


ANOTHER = pytest.mark.extended("one replay of the page is in `make test`")


@pytest.mark.slow("replays a recorded trace")
@pytest.mark.parametrize(
    ("trace", "goal", "endless"), [("conversation", 34, 36), pytest.param("synthetic", 58, 62, marks=ANOTHER)]
)
def test_four_machines_hit_almost_what_endless_memory_does(
    context: StudyContext, trace: str, goal: float, endless: float
) -> None:
    assert hits(context, trace, 4, PoolOptions(272 * GIB)) >= goal
    assert round(hits(context, trace, 1, PoolOptions(1 << 60))) == endless


@ANOTHER
@pytest.mark.slow("replays a recorded trace")
def test_states_at_junctions_are_worth_it(context: StudyContext) -> None:
    ends = PoolOptions(1 << 60, checkpoint_tokens=0, junctions=False)
    junctions = PoolOptions(1 << 60, checkpoint_tokens=0)
    assert round(hits(context, "synthetic", 1, ends), 1) == 50.9
    assert round(hits(context, "synthetic", 1, junctions), 1) == 58.2


def test_a_day_has_chats_at_noon_and_documents_at_midnight() -> None:
    (day,) = ChatsAndDocuments(0.02, 0.01).chunks(np.random.default_rng(3))

    assert (np.diff(day.arrival_s) >= 0).all() and day.arrival_s[-1] < 86_400
    requests = list(day.requests())
    system = requests[next(i for i, each in enumerate(requests) if each.block_ids[0] % 2 == 0)].block_ids[:4]
    is_chat = np.array([each.block_ids[:4] == system for each in requests])
    # A document shares no block with anything.
    documents = [each.block_ids for each, chat in zip(requests, is_chat, strict=True) if not chat]
    read = {block for ids in documents for block in ids}
    assert len(read) == sum(map(len, documents))
    assert read.isdisjoint(
        block for each, chat in zip(requests, is_chat, strict=True) if chat for block in each.block_ids
    )
    noon = (day.arrival_s > 36_000) & (day.arrival_s < 50_400)
    assert is_chat[noon].mean() > 0.97 > is_chat[~noon].mean()
    assert abs(is_chat.sum() - 0.02 * 6 * 86_400) < 1_500
    assert abs((~is_chat).sum() - 0.01 * 86_400) < 120
