"""Reading the gateway's route header."""

import pytest

from prfaas.tools.demo.client import RouteReport


def test_an_offloaded_request() -> None:
    report = RouteReport.parse(
        "offload; prefill=east-prefill-0; decode=home-decode-0; uncached=5999; cached=6144; bytes=6553600; "
        "hidden=0.83; transfer_s=1.25; prefill_s=1.5; reason=over-threshold"
    )
    assert report == RouteReport(
        route="offload",
        prefill="east-prefill-0",
        decode="home-decode-0",
        cached_tokens=6144,
        kv_bytes=6553600,
        hidden_fraction=0.83,
        transfer_s=1.25,
        prefill_s=1.5,
        other={"uncached": "5999", "reason": "over-threshold"},
    )


def test_a_bare_route() -> None:
    assert RouteReport.parse("local") == RouteReport("local")


def test_a_fallback_is_not_lost() -> None:
    assert RouteReport.parse("local; fallback=timeout").fallback == "timeout"


@pytest.mark.parametrize("header", ["", "none", "teleport; bytes=1", "offload; bytes=many"])
def test_nonsense_is_refused(header: str) -> None:
    with pytest.raises(ValueError):
        RouteReport.parse(header)
