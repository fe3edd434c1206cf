"""What is a host, and what only looks like one."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment.addresses import checked_host


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "gpu-1.example", "gpu_1", "yes", "1e3", "3com", "east-0.svc.", "a" * 63),
        *("192.0.2.10", "0.0.0.0", "::1", "2001:db8::1", "fe80::1%eth0", "::ffff:192.0.2.1"),
    ],
)
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert checked_host(host) == host


@pytest.mark.parametrize(
    "host",
    ["198.51.100.999", "10.0.0", "10.0.0.0.1", "1", "192.0.2.010", "192.0.2.10.", "gpu.7"],
)
def test_what_looks_like_an_ipv4_address_must_be_one(host: str) -> None:
    with pytest.raises(ValueError, match="is no IPv4 address; write four numbers from 0 to 255"):
        checked_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "a b", "http://a", "a:80", "[::1]", "2001:db8::g", "a/b", "-a", "a-", "a..b", ".a", "a.."),
        *("münchen", "a\n", "a" * 64, "a." * 127 + "a", "x" * 10_000, "192.0.2.1/24"),
    ],
)
def test_what_is_no_host_is_said(host: str) -> None:
    with pytest.raises(ValueError, match="write a name or an address") as raised:
        checked_host(host)
    assert len(str(raised.value)) < 160


@given(st.ip_addresses())
def test_every_address_is_a_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert checked_host(str(address)) == str(address)
