"""Who goes first among gateways: always somebody, and whoever has had less."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.gateway_share import ClusterShare, GatewayShare, InstanceShare
from prfaas.core.scheduling.prefill_turns import QUANTUM_S, ServedWork, goes_first


def waits(served_s: float, *, waiting: int = 1, bound: int = 0) -> GatewayShare:
    return GatewayShare(
        instances={"far-0": InstanceShare(waiting=bound)},
        clusters={"far": ClusterShare(waiting=waiting, served_s=served_s)},
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_of_those_that_wait_somebody_goes_first(served: list[float]) -> None:
    shares = [waits(each) for each in served]
    first = [
        goes_first(each, "far", "far-0", shares[:index] + shares[index + 1 :])
        for index, each in enumerate(served)
    ]
    assert any(first)
    # And nobody goes before one that has had clearly less.
    assert all(not may or each <= min(served) + QUANTUM_S for may, each in zip(first, served, strict=True))


def test_only_those_that_wait_for_this_instance_are_let_before() -> None:
    assert not goes_first(9.0, "far", "far-0", [waits(1.0)])
    assert not goes_first(9.0, "far", "far-0", [waits(1.0, waiting=0, bound=1)])
    assert goes_first(9.0, "far", "far-1", [waits(1.0, waiting=0, bound=1)])
    assert goes_first(9.0, "home", "home-p0", [waits(1.0)])
    assert goes_first(9.0, "far", "far-0", [waits(1.0, waiting=0)])
    assert goes_first(9.0, "far", "far-0", [])


def test_half_of_what_was_served_is_forgotten_every_ten_seconds() -> None:
    served = ServedWork()
    assert served.at(100.0) == 0.0
    served.add(8.0, 100.0)
    assert (served.at(110.0), served.at(120.0)) == (4.0, 2.0)
    served.add(1.0, 120.0)
    assert served.at(120.0) == 3.0
