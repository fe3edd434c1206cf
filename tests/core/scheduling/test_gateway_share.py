"""Shares are summed, sent and read again; lengths are observed once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.gateway_share import (
    ClusterShare,
    GatewayShare,
    InstanceShare,
    new_lengths,
    total,
)

NAMES = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 1000)
INSTANCES = st.builds(InstanceShare, *[COUNTS] * 4, st.integers(0, 99).map(float), COUNTS, COUNTS)
CLUSTERS = st.builds(ClusterShare, COUNTS, st.integers(0, 99).map(float), st.integers(0, 99).map(float))
SHARES = st.builds(
    GatewayShare,
    instances=st.dictionaries(NAMES, INSTANCES),
    clusters=st.dictionaries(NAMES, CLUSTERS),
    links=st.dictionaries(NAMES, COUNTS),
    lengths=st.lists(COUNTS, max_size=5),
    lengths_total=COUNTS,
)


@given(st.lists(SHARES, max_size=4))
def test_a_total_is_the_sum_of_every_number(shares: list[GatewayShare]) -> None:
    summed = total(shares)
    for name in "abc":
        for field in InstanceShare.__struct_fields__:
            parts = [getattr(share.instances.get(name, InstanceShare()), field) for share in shares]
            assert getattr(summed.instances.get(name, InstanceShare()), field) == sum(parts)
        for field in ClusterShare.__struct_fields__:
            parts = [getattr(share.clusters.get(name, ClusterShare()), field) for share in shares]
            assert getattr(summed.clusters.get(name, ClusterShare()), field) == sum(parts)
        assert summed.links.get(name, 0) == sum(share.links.get(name, 0) for share in shares)


@given(SHARES)
def test_what_is_sent_is_what_is_read(share: GatewayShare) -> None:
    assert msgspec.json.decode(msgspec.json.encode(share), type=GatewayShare) == share


@pytest.mark.parametrize(
    "wrong",
    [
        {"instances": {"a": {"requests": -1}}},
        {"instances": {"a": {"prefill_s": 1e12}}},
        {"links": {"a": 1 << 60}},
        {"lengths": [1] * 513},
        {"lengths_total": "1"},
    ],
)
def test_numbers_out_of_bounds_are_refused(wrong: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(wrong), type=GatewayShare)


def test_lengths_are_taken_once() -> None:
    share = GatewayShare(lengths=[10, 20, 30], lengths_total=7)
    assert new_lengths(share, 7) == []
    assert new_lengths(share, 5) == [20, 30]
    # Older ones are not in it any more.
    assert new_lengths(share, 0) == [10, 20, 30]
    # Another process of the same name.
    assert new_lengths(share, 100) == [10, 20, 30]
