"""What `prfaas up --site` starts on a machine."""

from dataclasses import replace

import pytest

from prfaas.cli.common import CliError
from prfaas.cli.site_share import share_of
from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.shipped import example_path
from prfaas.serving.engines.preparation import is_here

TWO = load_deployment(example_path("two-datacenters"))
LOCAL = load_deployment(example_path("local"))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that this machine has."""
    addresses = {"0.0.0.0"}
    monkeypatch.setattr("prfaas.cli.site_share.is_here", addresses.__contains__)
    return addresses


def test_without_a_site_everything() -> None:
    share = share_of(TWO, None, True)
    assert share.instances == TWO.instances and share.has_gateway
    assert share_of(LOCAL, None, True).pools == LOCAL.pools
    with pytest.raises(CliError, match="--no-gateway is about one site"):
        share_of(TWO, None, False)


def test_a_site_that_is_all_here() -> None:
    home = share_of(LOCAL, "home", True)
    assert home.instance_names == ("home-prefill-0", "home-decode-0")
    assert home.pool_names == ("home-pool",)
    assert home.has_gateway
    east = share_of(LOCAL, "prfaas-east", True)
    assert (east.instance_names, east.has_gateway) == (("east-prefill-0",), False)
    assert not share_of(LOCAL, "home", False).has_gateway


def test_only_what_has_an_address_of_this_machine(on: set[str]) -> None:
    on.add("198.51.100.11")
    share = share_of(TWO, "home", True)
    assert (share.instance_names, share.has_gateway) == (("home-1",), True)
    assert not share_of(TWO, "home", False).has_gateway
    with pytest.raises(
        CliError, match=r'nothing of site "east" runs on this machine; its hosts are 192\.0\.2\.10'
    ):
        share_of(TWO, "east", True)
    on.remove("198.51.100.11")
    # A machine for the gateway alone.
    assert share_of(TWO, "home", True).instances == ()


def test_a_gateway_at_an_address_is_started_there(on: set[str]) -> None:
    on |= {"198.51.100.10", "198.51.100.11"}
    elsewhere = replace(TWO, gateway=replace(TWO.gateway, host="198.51.100.12"))
    assert not share_of(elsewhere, "home", True).has_gateway
    on.add("198.51.100.12")
    assert share_of(elsewhere, "home", True).has_gateway


def test_an_unknown_site() -> None:
    with pytest.raises(DeploymentError, match='has no site "west"'):
        share_of(TWO, "west", True)


def test_addresses_of_this_machine() -> None:
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        assert is_here(host)
    # Addresses for documentation, which no machine has.
    for host in ("192.0.2.1", "203.0.113.7"):
        assert not is_here(host)
