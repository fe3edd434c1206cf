"""The route header: written and read back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.route_header import RouteHeader, split_route

OFFLOADED = (
    "offload; prefill=east-prefill-0; decode=home-decode-0; uncached=5999; cached=6144; bytes=6553600; "
    "hidden=0.8300; transfer_s=1.2500; prefill_s=1.5000; threshold=4000; predicted_ttft_s=2.5000; "
    "cache_transfer=home-prefill-0:4096; fallback=timeout; reason=over-threshold"
)
_NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)
# Numbers that their four digits say exactly.
_SECONDS = st.integers(0, 10**8).map(lambda number: number / 10**4)


def test_an_offloaded_request() -> None:
    header = RouteHeader(
        route="offload",
        prefill="east-prefill-0",
        decode="home-decode-0",
        uncached_tokens=5999,
        cached_tokens=6144,
        kv_bytes=6553600,
        hidden_fraction=0.83,
        transfer_s=1.25,
        prefill_s=1.5,
        threshold_tokens=4000.0,
        predicted_ttft_s=2.5,
        prefix_source="home-prefill-0",
        prefix_bytes=4096,
        fallback="timeout",
        reason="over-threshold",
    )
    assert RouteHeader.parse(OFFLOADED) == header
    assert header.encode() == OFFLOADED


def test_a_cluster_that_never_offloads() -> None:
    header = RouteHeader("local", threshold_tokens=math.inf, predicted_ttft_s=math.inf)
    assert header.encode() == "local; prefill=; decode=; cached=0; bytes=0; threshold=inf"
    assert RouteHeader.parse(header.encode()).threshold_tokens == math.inf


@given(
    st.builds(
        RouteHeader,
        route=st.sampled_from(["local", "offload"]),
        prefill=_NAMES,
        decode=_NAMES,
        uncached_tokens=st.none() | st.integers(0, 10**6),
        cached_tokens=st.integers(0, 10**6),
        kv_bytes=st.integers(0, 10**12),
        hidden_fraction=st.none() | st.integers(0, 10**4).map(lambda number: number / 10**4),
        transfer_s=st.none() | _SECONDS,
        prefill_s=st.none() | _SECONDS,
        threshold_tokens=st.none() | st.integers(0, 10**6).map(float) | st.just(math.inf),
        predicted_ttft_s=st.none() | _SECONDS,
        fallback=st.none() | _NAMES,
        reason=st.none() | _NAMES,
    )
)
def test_what_is_written_is_read(header: RouteHeader) -> None:
    assert RouteHeader.parse(header.encode()) == header


def test_a_bare_route() -> None:
    assert RouteHeader.parse("local") == RouteHeader("local")


def test_a_fallback_is_not_lost() -> None:
    assert RouteHeader.parse("local; fallback=timeout").fallback == "timeout"


@pytest.mark.parametrize("header", ["", "none", "teleport; bytes=1", "offload; bytes=many"])
def test_nonsense_is_refused(header: str) -> None:
    with pytest.raises(ValueError):
        RouteHeader.parse(header)


def test_a_server_without_the_header() -> None:
    assert split_route("") == ("", {})
    assert split_route("offload; prefill=a; bytes=1") == ("offload", {"prefill": "a", "bytes": "1"})
    assert split_route("local; prefill=a; reason=short") == ("local", {"prefill": "a", "reason": "short"})
