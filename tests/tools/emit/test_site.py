"""Sites, and the ports that they open."""

import pytest

from prfaas.core.deployment import GATEWAY, DeploymentError, is_loopback, load_deployment
from prfaas.core.shipped import example_path
from prfaas.tools.emit.openings import CLIENTS, OPERATORS, openings_of
from prfaas.tools.emit.site import gateway_site, site_named, sites_of

TWO = load_deployment(example_path("two-datacenters"))


def test_sites_are_the_clusters() -> None:
    for name in ("local", "synthetic", "two-datacenters"):
        deployment = load_deployment(example_path(name))
        sites = sites_of(deployment)
        assert [site.name for site in sites] == [cluster.name for cluster in deployment.clusters]
        assert [each for site in sites for each in site.instances] == list(deployment.instances)
        assert [each for site in sites for each in site.pools] == list(deployment.pools)
        assert [site.name for site in sites if site.has_gateway] == [gateway_site(deployment)]
        for site in sites:
            assert sorted(each.name for machine in site.machines for each in machine.instances) == sorted(
                each.name for each in site.instances
            )


def test_the_gateway_is_where_the_file_says_or_where_decoding_begins() -> None:
    assert gateway_site(TWO) == "home"
    several = load_deployment(example_path("synthetic"))
    assert several.gateway.cluster is None
    assert gateway_site(several) == several.pd_clusters[0].name


def test_machines_have_their_pool() -> None:
    local = load_deployment(example_path("local"))
    (machine,) = site_named(local, "home").machines
    assert [each.name for each in machine.instances] == ["home-prefill-0", "home-decode-0"]
    assert machine.pool is not None and machine.pool.name == "home-pool"


def test_an_unknown_site_is_named_with_those_there_are() -> None:
    with pytest.raises(DeploymentError, match='has no site "west"; it has east, home'):
        site_named(TWO, "west")


def test_every_port_has_one_opening() -> None:
    for name in ("local", "synthetic", "two-datacenters"):
        deployment = load_deployment(example_path(name))
        ports = [(opening.owner, port) for opening in openings_of(deployment) for port in opening.ports]
        assert len(ports) == len(set(ports))
        wanted, admin = {(GATEWAY, deployment.gateway.port)}, deployment.gateway.admin
        if not is_loopback(admin.host):
            wanted.add((GATEWAY, admin.port))
        for instance in deployment.instances:
            wanted |= {(instance.name, port) for port in (instance.http_port, *instance.kv_ports)}
        wanted |= {(pool.name, pool.kv_port) for pool in deployment.pools}
        assert set(ports) == wanted


def test_those_that_send_may_connect() -> None:
    openings = {(each.owner, each.purpose): set(each.sources) for each in openings_of(TWO)}
    assert openings["home-1", "kv"] == {GATEWAY, "east-0", "east-1", "home-0", "home-2"}
    # Nothing is sent between engines of a cluster that only prefills.
    assert openings["east-0", "kv"] == {GATEWAY, "home-0", "home-1", "home-2"}
    assert openings[GATEWAY, "http"] == {CLIENTS}
    assert openings[GATEWAY, "admin"] == {OPERATORS}
