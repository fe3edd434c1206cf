"""`engine.local_transfer: nixl`: what must fit together, and between whom NIXL is used."""

from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, DeploymentError, load_deployment
from prfaas.core.deployment.peers import plain_peers_of
from prfaas.tools.emit.openings import openings_of
from prfaas.tools.security_facts import check_encryption

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"
POOL = "    pool: {memory: 256 MiB, ssd: 1 GiB, kv_port: 18301}\n"
NIXL = {
    POOL: "",
    "engine:\n": "engine:\n  local_transfer: nixl\n",
    "kv_port: 18201": "kv_port: 18201, nixl_port: 18501",
    "kv_port: 18202": "kv_port: 18202, nixl_port: 18502",
}


def loaded(tmp_path: Path, **more: tuple[str, str]) -> Deployment:
    text = EXAMPLE.read_text()
    for old, new in (*NIXL.items(), *more.values()):
        assert old in text, old
        text = text.replace(old, new, 1)
    (tmp_path / "file.yaml").write_text(text)
    return load_deployment(tmp_path / "file.yaml", state_dir=tmp_path)


def test_nixl_is_between_engines_of_one_pd_cluster(tmp_path: Path) -> None:
    deployment = loaded(tmp_path)
    assert deployment.engine.local_transfer == "nixl"
    with_nixl = {each.name for each in deployment.instances if deployment.uses_nixl(each)}
    assert with_nixl == {"home-prefill-0", "home-decode-0"}
    far, near, decode = deployment.instances
    assert deployment.pulls(near, decode)
    assert not deployment.pulls(far, decode) and not deployment.pulls(near, far)


def test_our_own_transport_is_the_default() -> None:
    deployment = load_deployment(EXAMPLE)
    assert deployment.engine.local_transfer == "prfaas"
    assert not any(deployment.uses_nixl(each) for each in deployment.instances)
    _, near, decode = deployment.instances
    assert not deployment.pulls(near, decode)


def test_what_it_listens_on_is_open_inside_of_the_cluster(tmp_path: Path) -> None:
    opened = {
        (each.owner, each.ports, each.sources)
        for each in openings_of(loaded(tmp_path))
        if each.purpose == "nixl"
    }
    assert opened == {
        # UCX chooses its ports itself.
        ("home-prefill-0", (), ("home-decode-0",)),
        ("home-decode-0", (), ("home-prefill-0",)),
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((", nixl_port: 18501", ""), "needs nixl_port, since engine.local_transfer is nixl"),
        (("  local_transfer: nixl\n", ""), "is only for instances of pd clusters with engine.local_transfer"),
        (("kv_port: 18200", "kv_port: 18200, nixl_port: 18500"), "is only for instances of pd clusters"),
        (("nixl_port: 18501", "nixl_port: 18202"), "is already used by"),
        (("nixl_port: 18501", "nixl_port: 18502"), "is already used by"),
        (("local_transfer: nixl", "local_transfer: rdma"), "prfaas"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(DeploymentError, match=says):
        loaded(tmp_path, change=change)


def test_pools_and_encryption_inside_of_clusters_go_with_it(tmp_path: Path) -> None:
    pool = ("kind: pd\n", "kind: pd\n" + POOL)
    encrypted = ("engine:\n", "security: {encrypt_inside: true}\nengine:\n")
    deployment = loaded(tmp_path, pool=pool, encrypted=encrypted)
    assert [pool.cluster for pool in deployment.pools] == ["prfaas-east", "home"]
    _, near, decode = deployment.instances
    assert deployment.pulls(near, decode)
    # What NIXL does not move is encrypted, and doctor says which is which.
    assert near.name not in plain_peers_of(deployment, decode)
    (found,) = check_encryption(deployment)
    assert found.level == "ok" and "inside of home is as safe as its backend" in found.text
    assert not check_encryption(loaded(tmp_path, pool=pool))
