"""What of a deployment is encrypted, by default and as the file says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.deployment import CONTROL, GATEWAY, TOOLS, Deployment, DeploymentError, load_deployment
from prfaas.core.deployment.peers import peers_of, plain_peers_of, sources_of


def instance(name: str, host: str, port: int, role: str) -> dict[str, Any]:
    return {"name": name, "roles": [role], "host": host, "http_port": port, "kv_port": port + 100}


def document(**changes: Any) -> dict[str, Any]:
    """A prfaas cluster, two pd clusters, and links to both of these."""
    return {
        "name": "sites",
        "model": {"served_name": "m", "path": "m", "max_model_len": 1000},
        "clusters": [
            {
                "name": "far",
                "kind": "prfaas",
                "hardware": "h200",
                "instances": [instance("far-0", "10.0.0.1", 8100, "prefill")],
            },
            {
                "name": "home",
                "kind": "pd",
                "hardware": "h20",
                "instances": [
                    instance("home-0", "10.1.0.1", 8100, "prefill"),
                    instance("home-1", "10.1.0.2", 8100, "decode"),
                ],
            },
            {
                "name": "branch",
                "kind": "pd",
                "hardware": "h20",
                "instances": [instance("branch-0", "127.0.0.1", 8100, "decode")],
            },
        ],
        "links": [
            {"source": "far", "target": "home", "bandwidth": "1 Gbit/s"},
            {"source": "far", "target": "branch", "bandwidth": "1 Gbit/s", "encryption": False},
        ],
        **changes,
    }


def load(folder: Path, **changes: Any) -> Deployment:
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(document(**changes)))
    return load_deployment(path, state_dir=folder / "state")


def tls_of(deployment: Deployment) -> set[str]:
    return {each.name for each in deployment.instances if each.tls}


def encrypted_ways(deployment: Deployment) -> set[tuple[str, str]]:
    return {
        (each.name, peer.member.name)
        for each in deployment.instances
        for peer in peers_of(deployment, each)
        if peer.path.encrypted
    }


def test_links_are_encrypted_unless_they_say_otherwise(tmp_path: Path) -> None:
    assert encrypted_ways(load(tmp_path)) == {("far-0", "home-0"), ("far-0", "home-1")}


def test_inside_a_cluster_encryption_is_a_setting(tmp_path: Path) -> None:
    inside = {("home-0", "home-1"), ("home-1", "home-0")}
    assert encrypted_ways(load(tmp_path, security={"encrypt_inside": True})) == inside | {
        ("far-0", "home-0"),
        ("far-0", "home-1"),
    }


def test_the_gateway_speaks_tls_with_other_clusters(tmp_path: Path) -> None:
    with_two_pd_clusters = load(tmp_path)
    assert with_two_pd_clusters.gateway.cluster is None
    # branch-0 is reached by a loopback address.
    assert tls_of(with_two_pd_clusters) == {"far-0", "home-0", "home-1"}
    at_home = load(tmp_path, gateway={"cluster": "home"})
    assert tls_of(at_home) == {"far-0"}
    assert at_home.instance("far-0").url == "https://10.0.0.1:8100"
    assert at_home.instance("home-0").url == "http://10.1.0.1:8100"


def test_the_only_cluster_that_decodes_is_the_gateways(tmp_path: Path) -> None:
    clusters, links = document()["clusters"][:2], document()["links"][:1]
    deployment = load(tmp_path, clusters=clusters, links=links)
    assert deployment.gateway.cluster == "home"
    assert tls_of(deployment) == {"far-0"}


@pytest.mark.parametrize(
    "word, names", [("always", {"far-0", "home-0", "home-1", "branch-0"}), ("never", set())]
)
def test_the_file_says_with_whom_tls_is_spoken(tmp_path: Path, word: str, names: set[str]) -> None:
    assert tls_of(load(tmp_path, security={"engine_tls": word})) == names


def test_where_certificates_lie(tmp_path: Path) -> None:
    security = load(tmp_path).security
    assert security.certificates == tmp_path / "state" / "sites" / "certificates"
    assert security.ca_file == security.certificates / "ca.crt"
    assert security.identity_file("far-0") == security.certificates / "far-0.pem"
    elsewhere = load(tmp_path, security={"certificates": "/etc/prfaas"}).security
    assert elsewhere.identity_file("far-0") == Path("/etc/prfaas/far-0.pem")


def test_who_needs_a_certificate(tmp_path: Path) -> None:
    def needing(**changes: Any) -> set[str]:
        deployment = load(tmp_path, **changes)
        names = [*(each.name for each in deployment.instances), GATEWAY, TOOLS]
        return {name for name in names if deployment.needs_certificate(name)}

    never, inside = {"engine_tls": "never"}, {"engine_tls": "never", "encrypt_inside": True}
    plain = [{**link, "encryption": False} for link in document()["links"]]
    assert needing() == {"far-0", "home-0", "home-1", GATEWAY, TOOLS}
    assert needing(security=never) == {"far-0", "home-0", "home-1"}
    assert needing(links=plain, security=never) == set()
    assert needing(links=plain, security=inside) == {"home-0", "home-1", "branch-0"}


def test_who_may_connect_without_encryption(tmp_path: Path) -> None:
    deployment = load(tmp_path, gateway={"cluster": "home"})

    def plain(name: str) -> set[str]:
        return set(plain_peers_of(deployment, deployment.instance(name)))

    asking = {GATEWAY, CONTROL, TOOLS}
    assert plain("far-0") == set()
    assert plain("home-1") == {"home-0", *asking}
    assert plain("branch-0") == {"far-0", *asking}
    inside = load(tmp_path, security={"encrypt_inside": True})
    for made in (deployment, inside):
        for each in made.instances:
            for source in sources_of(made, each):
                (peer,) = [peer for peer in peers_of(made, source.member) if peer.member == each]
                assert (source.member.name in plain_peers_of(made, each)) == (not peer.path.encrypted)


def at_host(host: str) -> list[dict[str, Any]]:
    clusters: list[dict[str, Any]] = document()["clusters"]
    clusters[0]["instances"][0]["host"] = host
    return clusters


def renamed(name: str) -> list[dict[str, Any]]:
    clusters: list[dict[str, Any]] = document()["clusters"]
    clusters[0]["instances"][0]["name"] = name
    return clusters


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gateway": {"cluster": "nowhere"}}, 'gateway.cluster: there is no cluster "nowhere"; the clusters are far'),
        ({"clusters": renamed("gateway")}, '"gateway" is a name of prfaas itself'),
        ({"clusters": renamed("Control")}, '"Control" is a name of prfaas itself'),
        ({"clusters": renamed("Home-1")}, '"home-1" and "Home-1" are one name in certificates'),
        ({"clusters": renamed("a..b")}, '"a..b" can\'t stand in a certificate'),
        ({"clusters": renamed("10.0.0.7")}, '"10.0.0.7" can\'t stand in a certificate'),
        ({"clusters": at_host("Home-1")}, '"Home-1" is also the name of "home-1", and certificates bear both'),
        ({"clusters": at_host("gateway")}, 'host: "gateway" is also the name of a part of prfaas'),
        ({"security": {"engine_tls": "sometimes"}}, 'must be one of "elsewhere", "always", "never"'),
        ({"security": {"encrypt_inside": "yes"}}, "security.encrypt_inside: must be true or false"),
        ({"security": {"tenant_weights": {"gold": 2}}}, "tenant_weights: needs security.tenant_header"),
        ({"security": {"tenant_header": "x-t"}, "gateway": {"clients": "c.yaml"}}, "clients: leave out security"),
        ({"security": {"tenant_weights": {"gold": 0}}}, "security.tenant_weights.gold: must be"),
        ({"engine": {"extra_args": ["--ssl-keyfile=x"]}}, "give security.engine_tls and security.certificates"),
    ],
)  # fmt: skip
def test_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError) as error:
        load(tmp_path, **changes)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def with_pool(**changes: Any) -> list[dict[str, Any]]:
    clusters: list[dict[str, Any]] = document()["clusters"]
    clusters[0] |= {"pool": {"memory": "1 GiB", "kv_port": 8300}} | changes
    return clusters


@pytest.mark.parametrize(
    "clusters, message",
    [
        (with_pool(instances=[instance("Far-Pool", "10.0.0.1", 8100, "prefill")]), '"far-pool" and "Far-Pool" are one'),
        (with_pool(instances=[instance("far-0", "Far-Pool", 8100, "prefill")]), '"Far-Pool" is also the name of "far'),
        (with_pool(name="a..b"), '"a..b-pool" can\'t stand in a certificate'),
    ],
)  # fmt: skip
def test_pools_have_certificates_of_their_own(
    tmp_path: Path, clusters: list[dict[str, Any]], message: str
) -> None:
    links = [{**link, "source": clusters[0]["name"]} for link in document()["links"]]
    with pytest.raises(DeploymentError) as error:
        load(tmp_path, clusters=clusters, links=links)
    assert message in str(error.value)
    load(tmp_path, clusters=with_pool())


def test_tenants_have_weights(tmp_path: Path) -> None:
    security = {"tenant_header": "x-tenant", "tenant_weights": {"gold": 4}}
    assert load(tmp_path, security=security).security.tenant_weights == {"gold": 4}


def test_a_machine_may_be_called_as_its_instance(tmp_path: Path) -> None:
    assert load(tmp_path, clusters=at_host("far-0")).instance("far-0").host == "far-0"


def test_names_are_free_where_nothing_is_encrypted(tmp_path: Path) -> None:
    plain = [{**link, "encryption": False} for link in document()["links"]]
    load(tmp_path, clusters=renamed("gateway"), links=plain, security={"engine_tls": "never"})
