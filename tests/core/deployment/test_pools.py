"""The pools of a deployment file: one per machine and cluster, where they are, and what can't be."""

from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, DeploymentError, PoolSettings, load_deployment, load_planned

GOOD = """\
name: site
model: {served_name: m, path: models/m, max_model_len: 32768}
clusters:
  - name: east
    kind: prfaas
    hardware: h200
    pool: {memory: 272 GiB, ssd: 4 TiB, path: /nvme/prefixes, kv_port: 8300}
    instances:
      - {name: east-0, roles: [prefill], host: 10.0.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 2}
      - {name: east-1, roles: [prefill], host: 10.0.0.1, http_port: 8101, kv_port: 8202, tensor_parallel: 2}
      - {name: east-2, roles: [prefill], host: 10.0.0.2, http_port: 8100, kv_port: 8200, tensor_parallel: 2}
  - name: home
    kind: pd
    hardware: h20
    pool: {memory: 1 GiB, kv_port: 8400}
    instances:
      - {name: home-0, roles: [prefill, decode], host: localhost, http_port: 8500, kv_port: 8600}
      - {name: home-1, roles: [decode], host: 127.0.0.1, http_port: 8501, kv_port: 8602}
  - name: spare
    kind: pd
    hardware: h20
    instances:
      - {name: spare-0, roles: [decode], host: 10.0.0.9, http_port: 8500, kv_port: 8600}
links:
  - {source: east, target: home, bandwidth: 10 Gbit/s}
"""


def load(tmp_path: Path, text: str) -> Deployment:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return load_deployment(path, state_dir=tmp_path / "state")


def test_every_machine_of_a_cluster_has_a_pool(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD)
    first, second, home = deployment.pools
    assert (first.name, first.host, first.instances) == ("east-pool-0", "10.0.0.1", ("east-0", "east-1"))
    assert (second.name, second.host, second.instances) == ("east-pool-1", "10.0.0.2", ("east-2",))
    # One machine under two names.
    assert (home.name, home.host, home.instances) == ("home-pool", "localhost", ("home-0", "home-1"))
    assert (first.kv_port, home.kv_port) == (8300, 8400)
    assert load(tmp_path, GOOD.replace("memory: 1 GiB", "memory: 1 GiB, ssd: 0")).pools[2].ssd_bytes == 0
    assert (first.memory_bytes, first.ssd_bytes, home.ssd_bytes) == (272 << 30, 4 << 40, 0)
    assert first.path == Path("/nvme/prefixes/site/east-pool-0")
    assert home.path == tmp_path / "state" / "site" / "pools" / "home-pool"
    assert deployment.pool_socket(home) == tmp_path / "state" / "site" / "pools" / "home-pool.sock"
    # As with their engines: prompts of another cluster than the gateway's cross encrypted.
    deployment = load(tmp_path, GOOD + "gateway: {cluster: home}\n")
    assert [pool.tls for pool in deployment.pools] == [True, True, False]


def test_who_uses_which_pool(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD)
    used = {each.name: deployment.pool_of(each) for each in deployment.instances}
    assert {name: None if pool is None else pool.name for name, pool in used.items()} == {
        "east-0": "east-pool-0",
        "east-1": "east-pool-0",
        "east-2": "east-pool-1",
        "home-0": "home-pool",
        "home-1": "home-pool",
        "spare-0": None,
    }
    assert deployment.pool_named("home-pool") == used["home-1"]
    with pytest.raises(
        DeploymentError, match='has no pool "home-0"; it has east-pool-0, east-pool-1, home-pool'
    ):
        deployment.pool_named("home-0")


def test_settings_of_all_pools(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).pool == PoolSettings()
    told = load(
        tmp_path,
        GOOD + "pool: {checkpoint_tokens: 8192, eviction: cost, staging: 64 MiB, tenant_share: 0.25}\n"
        "security: {tenant_header: x-tenant}\n",
    )
    assert told.pool == PoolSettings(8192, 0.25, "cost", 64 << 20, 2.0)


HOME = "pool: {memory: 1 GiB, kv_port: 8400}"
BAD = {
    "no memory": ("memory: 1 GiB, ", "", "15: clusters[1].pool.memory: is missing"),
    "too little memory": ("memory: 1 GiB", "memory: 10", "pool.memory: must be at least 1048576, not 10"),
    "no disk in words": (
        "1 GiB, kv",
        "1 GiB, ssd: none, kv",
        "pool.ssd: 'none' is no size; write for example",
    ),
    "empty": (HOME, "pool:", '15: clusters[1].pool: must be a mapping ("field: value" lines), not empty'),
    "path without a disk": (
        "kv_port: 8400",
        "kv_port: 8400, path: x",
        "[1].pool.path: is where the SSD's share",
    ),
    "no port": (", kv_port: 8400", "", "15: clusters[1].pool.kv_port: is missing; give the port where other"),
    "an engine's port": (
        "8400",
        "8602",
        'pool.kv_port: 8602 is already used by instance "home-1"; take another',
    ),
    "an engine's rank": ("8300", "8203", '[0].pool.kv_port: 8203 is already used by instance "east-1"'),
    "the gateway's port": (
        "8400",
        "8000",
        "[1].pool.kv_port: 8000 is already used by the gateway; take another",
    ),
    "stand-ins": (
        "hardware: h20\n    pool",
        "hardware: synthetic\n    pool",
        '[1].pool: is not for hardware "syn',
    ),
    "unequal ranks": (
        "8202, tensor_parallel: 2",
        "8202, tensor_parallel: 4",
        "[0].pool: serves east-0 and east-1, whose tensor_parallel differs",
    ),
    "taken name": (
        "name: home-1",
        "name: home-pool",
        '[1].pool: its name would be "home-pool", which is taken',
    ),
    "long name": (
        "name: spare\n",
        f"name: {'s' * 60}\n    {HOME}\n",
        "leaves no room for the name of its pool",
    ),
    "unknown eviction": ("links:", "pool: {eviction: mru}\nlinks:", "pool.eviction: must be one of"),
    "tenants that nobody tells apart": (
        "links:",
        "pool: {tenant_share: 0.5}\nlinks:",
        "pool.tenant_share: needs security.tenant_header",
    ),
    "too little staging": (
        "links:",
        "engine: {transfer_block: 2 MiB}\npool: {staging: 1 MiB}\nlinks:",
        "pool.staging",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_sentence(case: str, tmp_path: Path) -> None:
    old, new, expected = BAD[case]
    assert old in GOOD
    with pytest.raises(DeploymentError) as error:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_without_any_pool_are_a_mistake(tmp_path: Path) -> None:
    lines = [line for line in GOOD.splitlines() if "    pool:" not in line]
    assert load(tmp_path, "\n".join(lines)).pools == ()
    with pytest.raises(DeploymentError, match="24: pool: is about pools, but no cluster has one"):
        load(tmp_path, "\n".join([*lines, "pool: {eviction: cost}"]))


def test_the_operators_port_is_none_of_a_pool(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("8400", "8001")).gateway.admin.port == 8002


def test_a_pool_without_a_port_is_good_to_plan_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        """\
name: plan
model: {published: internal-1t}
clusters:
  - name: home
    kind: pd
    hardware: h20
    instance_count: 4
    profile: internal-1t-h20
    pool: {memory: 272 GiB, ssd: 4 TiB}
workload:
  lengths: {distribution: fixed, tokens: 10000}
  output_tokens: 100
slo: {tokens_per_s: 40}
"""
    )
    (cluster,) = load_planned(path).clusters
    assert cluster.pool is not None
    assert (cluster.pool.memory_bytes, cluster.pool.ssd_bytes) == (272 << 30, 4 << 40)
