"""What the console's first screen tells of requests: refusals of a minute, and what offloading was worth lately."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.console.served import REFUSED_S, WORTH_S, Served


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_refusals_are_told_for_a_minute() -> None:
    clock = Clock()
    served = Served(clock)
    served.add(200, failed=False)
    served.add(429, failed=False)
    served.add(503, failed=True)
    served.add(502, failed=True)
    # A client that left, and one that asked for what can't be.
    served.add(None, failed=False)
    served.add(400, failed=False)
    now = served.told()["now"]
    assert (now["ended"], now["refused"], now["failed"]) == (6, 2, 1)
    clock.now_s += REFUSED_S
    assert served.told()["now"]["ended"] == 0
    assert served.told()["lately"]["refused"] == 2
    clock.now_s += WORTH_S
    assert served.told()["lately"]["ended"] == 0


def test_only_what_was_predicted_and_came_is_compared() -> None:
    served = Served(Clock())
    served.add(200, failed=False, offloaded=True, first_token_s=0.5, at_home_s=2.0, egress_cost=0.25)
    served.add(200, failed=False, offloaded=True, first_token_s=0.7)
    served.add(200, failed=False, offloaded=True, at_home_s=3.0)
    served.add(200, failed=False, first_token_s=9.0, at_home_s=9.0)
    lately = served.told()["lately"]
    assert (lately["offloaded"], lately["compared"]) == (3, 1)
    assert (lately["first_token_s"], lately["at_home_s"], lately["egress_cost"]) == (0.5, 2.0, 0.25)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.sampled_from([200, 429, 500, 503])), max_size=60))
def test_the_sums_are_those_of_the_requests(requests: list[tuple[float, int]]) -> None:
    """Invariant: of the last minutes no more than a bucket is missing, nothing older is counted, memory is bounded."""
    clock = Clock()
    served: Any = Served(clock)
    ended: list[tuple[float, int]] = []
    for pause_s, status in requests:
        clock.now_s += pause_s
        served.add(status, failed=status >= 500)
        ended.append((clock.now_s, status))
    for name, span_s in (("now", REFUSED_S), ("lately", WORTH_S)):
        found = served.told()[name]
        surely = sum(at_s > clock.now_s - span_s + 10.0 for at_s, _ in ended)
        perhaps = sum(at_s > clock.now_s - span_s for at_s, _ in ended)
        assert surely <= found["ended"] <= perhaps
    assert len(served._buckets) <= WORTH_S / 10.0


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_no_failure(status: int) -> None:
    served = Served(Clock())
    served.add(status, failed=True)
    assert served.told()["now"]["refused"] == 1
    assert served.told()["now"]["failed"] == 0
