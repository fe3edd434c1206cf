"""Whether a prefill instance decodes on: only where the link is the limit and the instance has time."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.planner.relay import WORTH_STEPS
from prfaas.core.scheduling import (
    ClusterView,
    Decision,
    InstanceView,
    LinkView,
    RelayPlan,
    Route,
    relay_plan,
)

NOW_S = 100.0
DECISION = Decision(Route.OFFLOAD, "east", "home", 8000, 8000, 0, 10_000_000, "long", 1000.0, 9.0)


def plan(
    *,
    kv_bytes: int = 10_000_000,
    mbit_per_s: float = 8.0,
    link_queue_s: float = 0.0,
    busy_s: float = 0.0,
    waiting_s: float = 0.0,
    step_s: float = 0.05,
    most_tokens: int = 16,
    linked: bool = True,
) -> RelayPlan:
    """A prefill of 8 s, and 80 Mbit of KV: 10 s of the link by itself, so 2 s after the prefill."""
    instance = InstanceView("east", "far", True, False, busy_until_s=NOW_S + busy_s)
    other = InstanceView("west", "far", True, False)
    cluster = ClusterView(
        "far", "prfaas", [instance, other], lambda tokens: tokens / 1000, waiting_s=waiting_s
    )
    link = LinkView("far", "near", mbit_per_s * 1e6, drained_s=NOW_S + link_queue_s)
    return relay_plan(
        replace(DECISION, kv_bytes=kv_bytes),
        instance,
        cluster,
        link if linked else None,
        most_tokens=most_tokens,
        step_s=step_s,
        now_s=NOW_S,
    )


def test_the_numbers_are_those_of_the_transfer_and_the_queue() -> None:
    found = plan(busy_s=1.0, waiting_s=1.5)
    assert found == RelayPlan(16, "link-bound", 2.0, 0.05, 1.75)


def test_what_waits_for_the_link_counts() -> None:
    assert plan(mbit_per_s=80.0).reason == "short-gap"
    assert plan(mbit_per_s=80.0, link_queue_s=9.0).exposed_s == 2.0


def test_a_busy_instance_has_its_steps_for_prefills() -> None:
    assert plan(busy_s=2.5) == RelayPlan(0, "busy-prefill", 2.0, 0.05, 2.5)
    assert plan(waiting_s=4.2).reason == "busy-prefill"


def test_inside_of_a_cluster_nothing_is_relayed() -> None:
    assert plan(linked=False) == RelayPlan(0, "short-gap", 0.0, 0.05, 0.0)


def test_a_link_that_carries_nothing_is_a_limit() -> None:
    assert plan(mbit_per_s=0.0).tokens == 16


AMOUNTS = st.fixed_dictionaries(
    {
        "kv_bytes": st.integers(0, 10**9),
        "mbit_per_s": st.floats(0.1, 10_000),
        "link_queue_s": st.floats(-5, 50),
        "busy_s": st.floats(-5, 50),
        "waiting_s": st.floats(0, 50),
        "step_s": st.floats(0.001, 1),
        "most_tokens": st.integers(1, 100),
    }
)


@given(AMOUNTS)
def test_it_relays_where_it_pays_and_nowhere_else(amounts: dict[str, float]) -> None:
    found = plan(**amounts)  # type: ignore[arg-type]
    pays = found.exposed_s >= WORTH_STEPS * found.step_s and found.queue_s <= found.exposed_s
    assert found.tokens == (amounts["most_tokens"] if pays else 0)
    assert (found.reason == "link-bound") == pays
    assert found.exposed_s >= 0 and found.queue_s >= 0


@given(AMOUNTS, st.sampled_from(["kv_bytes", "mbit_per_s", "link_queue_s", "busy_s", "waiting_s", "step_s"]))
def test_more_to_wait_for_never_ends_it_and_more_work_never_begins_it(
    amounts: dict[str, float], name: str
) -> None:
    less, more = plan(**amounts), plan(**amounts | {name: 2 * abs(amounts[name]) + 1})  # type: ignore[arg-type]
    if name in ("kv_bytes", "link_queue_s"):
        assert more.tokens >= less.tokens
    else:
        assert more.tokens <= less.tokens
