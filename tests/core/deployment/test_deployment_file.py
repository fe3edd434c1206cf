"""Reading deployment files: what a good one says, and where a bad one is wrong."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import Deployment, DeploymentError, ModelSource, load_deployment
from prfaas.core.deployment.addresses import local_endpoint
from prfaas.core.deployment.peers import KvPeer, peers_of, sources_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"

GOOD = """\
name: two-sites
model:
  served_name: m
  path: models/m
  max_model_len: 32768
clusters:
  - name: east
    kind: prfaas
    hardware: h200
    instances:
      - name: east-0
        roles: [prefill]
        host: 10.0.0.1
        http_port: 8100
        kv_port: 8200
        tensor_parallel: 4
  - name: home
    kind: pd
    hardware: h20
    instances:
      - name: home-0
        roles: [prefill, decode]
        host: 10.1.0.1
        http_port: 8100
        kv_port: 8200
        tensor_parallel: 4
      - name: home-1
        roles: [decode]
        host: 10.1.0.2
        http_port: 8100
        kv_port: 8200
        tensor_parallel: 4
links:
  - source: east
    target: home
    bandwidth: 10 Gbit/s
    connections: 8
routing:
  threshold_tokens: 16000
"""


def load(tmp_path: Path, text: str) -> Deployment:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return load_deployment(path, state_dir=tmp_path / "state")


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def test_a_good_file(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD)
    assert deployment.model.path == tmp_path / "models" / "m"
    assert deployment.security.key_file == tmp_path / "state" / "two-sites" / "key"
    assert deployment.routing.policy == "tilted"
    link = deployment.link("east", "home")
    assert link is not None
    assert (link.name, link.bandwidth_bits_per_s, link.connections) == ("east->home", 10e9, 8)
    assert deployment.link("home", "east") is None
    east = deployment.instance("east-0")
    assert deployment.cluster_of(east).kind == "prfaas"
    assert list(east.kv_ports) == [8200, 8201, 8202, 8203]
    assert east.url == "https://10.0.0.1:8100"
    assert [cluster.name for cluster in deployment.prefill_clusters_to("home")] == ["east"]
    assert [cluster.name for cluster in deployment.pd_clusters] == ["home"]
    assert [instance.name for instance in deployment.with_role("decode")] == ["home-0", "home-1"]


def test_who_may_send_to_whom(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD)

    def peers(name: str) -> list[tuple[str, str, float | None]]:
        return [
            (peer.member.name, peer.path.link, peer.path.bandwidth_bits_per_s)
            for peer in peers_of(deployment, deployment.instance(name))
        ]

    assert peers("east-0") == [("home-0", "east->home", 10e9), ("home-1", "east->home", 10e9)]
    assert peers("home-0") == [("home-1", "home", None)]
    # Roles change: whoever decodes at the start may prefill later, but isn't connected before.
    assert peers("home-1") == [("home-0", "home", None)]
    on_demand = [peer.path.on_demand for peer in peers_of(deployment, deployment.instance("home-1"))]
    assert on_demand == [True]
    assert not any(peer.path.on_demand for peer in peers_of(deployment, deployment.instance("east-0")))
    for instance in deployment.instances:
        for peer in peers_of(deployment, instance):
            assert KvPeer(instance, peer.path) in sources_of(deployment, peer.member)
    assert [source.member.name for source in sources_of(deployment, deployment.instance("home-1"))] == [
        "east-0",
        "home-0",
    ]
    assert sources_of(deployment, deployment.instance("east-0")) == ()
    # Nothing decodes in the PrfaaS cluster, so its instances send each other nothing.
    east, home = deployment.clusters
    twins = (*east.instances, replace(east.instances[0], name="east-1"))
    larger = replace(deployment, clusters=(replace(east, instances=twins), home))
    names = {peer.member.name for peer in peers_of(larger, larger.instance("east-0"))}
    assert names == {"home-0", "home-1"}


def test_the_example_is_good_and_on_one_machine() -> None:
    deployment = load_deployment(EXAMPLE)
    assert {instance.host for instance in deployment.instances} == {"127.0.0.1"}
    assert deployment.model.source == ModelSource("trained", "words")
    assert deployment.model.path == deployment.state_dir / "models" / "words"


def test_the_state_directory_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "elsewhere"))
    assert load_deployment(EXAMPLE).logs_dir == tmp_path / "elsewhere" / "local" / "logs"


HOME_1 = "host: 10.1.0.2\n        http_port: 8100\n        kv_port: 8200"

BAD = {
    "unknown field": (
        replaced("    connections: 8", "    conections: 8"),
        '37: links[0].conections: is no known field; did you mean "connections"?',
    ),
    "unknown field without a near one": (
        replaced("routing:", "colour: red\nrouting:"),
        "38: colour: is no known field; known here are name, model, clusters, links, routing",
    ),
    "missing field": (
        replaced("    hardware: h20\n", ""),
        "17: clusters[1].hardware: is missing",
    ),
    "static threshold without one": (
        replaced("threshold_tokens: 16000", "policy: static_threshold"),
        "38: routing: needs threshold_tokens for policy static_threshold",
    ),
    "unknown policy": (
        replaced("threshold_tokens: 16000", "policy: papre"),
        '39: routing.policy: there is no policy "papre"; there are paper, tilted, local_only',
    ),
    "no policy's name": (
        replaced("threshold_tokens: 16000", "policy: my policy"),
        '39: routing.policy: "my policy" is no policy; write a name, for example "tilted", or package.module:Class',
    ),
    "no value of a parameter": (
        replaced("threshold_tokens: 16000", "params: {beta: [1]}"),
        "39: routing.params.beta: must be a number, a word, or true or false",
    ),
    "parameter without a value": (
        replaced("threshold_tokens: 16000", "params: {beta: }"),
        "39: routing.params.beta: must be a number, a word, or true or false",
    ),
    "a static threshold among the parameters": (
        replaced("threshold_tokens: 16000", "policy: static_threshold\n  params: {threshold_tokens: 9}"),
        "40: routing.params.threshold_tokens: is written as routing.threshold_tokens",
    ),
    "synthetic engines as fast as what?": (
        replaced("hardware: h200", "hardware: synthetic"),
        "9: clusters[0].hardware: synthetic engines need a profile",
    ),
    "real engines made faster": (
        replaced("hardware: h200", "hardware: h200\n    speedup: 10"),
        "10: clusters[0].speedup: is only for synthetic engines",
    ),
    "unknown profile": (
        replaced("hardware: h200", "hardware: h200\n    profile: warp-drive"),
        "10: clusters[0].profile: ",
    ),
    "a port for events": (
        replaced("kv_port: 8200", "kv_port: 8200\n        events_port: 8300"),
        "events_port",
    ),
    "preemptible decoding": (
        replaced("hardware: h20\n", "hardware: h20\n    preemptible: true\n"),
        'clusters[1].preemptible: is for a cluster of kind "prfaas"',
    ),
    "kills of what stays": (
        replaced("hardware: h200", "hardware: h200\n    kills_per_hour: 6"),
        "10: clusters[0].kills_per_hour: goes with preemptible: true",
    ),
    "no kills": (
        replaced("hardware: h200", "hardware: h200\n    preemptible: true\n    kills_per_hour: 0"),
        "11: clusters[0].kills_per_hour: must be greater than 0",
    ),
    "a cluster's own option that the file has a field for": (
        replaced("hardware: h200", "hardware: h200\n    extra_args: [--dtype, float16]"),
        "10: clusters[0].extra_args[0]: '--dtype' can't be given here; give model.dtype",
    ),
    "wrong kind of number": (
        replaced("tensor_parallel: 4", "tensor_parallel: four"),
        '16: clusters[0].instances[0].tensor_parallel: must be a whole number, not "four"',
    ),
    "stages where instances may decode": (
        replaced("roles: [decode]", "roles: [decode]\n        pipeline_parallel: 2"),
        '29: clusters[1].instances[1].pipeline_parallel: stages only send KVCache, and instances of a "pd" cluster may '
        'decode; give it to those of a cluster of kind "prfaas"',
    ),
    "stages with a pool": (
        replaced("hardware: h200", "hardware: h200\n    pool: {memory: 1 GiB, kv_port: 9000}").replace(
            "roles: [prefill]", "roles: [prefill]\n        pipeline_parallel: 2"
        ),
        "10: clusters[0].pool: serves east-0, whose stages share no pages; leave its pool or its stages out",
    ),
    "wrong kind of value": (
        replaced("roles: [prefill]", "roles: prefill"),
        '12: clusters[0].instances[0].roles: must be a list, not "prefill"',
    ),
    "section that is no mapping": (
        replaced("routing:\n  threshold_tokens: 16000", "routing: always"),
        '38: routing: must be a mapping ("field: value" lines), not "always"',
    ),
    "empty section": (
        replaced("routing:\n  threshold_tokens: 16000", "routing:"),
        '38: routing: must be a mapping ("field: value" lines), not empty',
    ),
    "wrong choice": (
        replaced("kind: prfaas", "kind: prefill"),
        '8: clusters[0].kind: must be one of "prfaas", "pd", not "prefill"',
    ),
    "wrong role": (
        replaced("roles: [decode]", "roles: [decoder]"),
        '28: clusters[1].instances[1].roles[0]: must be one of "prefill", "decode", not "decoder"',
    ),
    "no role": (
        replaced("roles: [decode]", "roles: []"),
        "28: clusters[1].instances[1].roles: must have at least one entry, not an empty list",
    ),
    "negative number": (
        replaced("threshold_tokens: 16000", "threshold_tokens: -1"),
        "39: routing.threshold_tokens: must be greater than 0, not -1",
    ),
    "port out of range": (
        replaced("http_port: 8100", "http_port: 81000"),
        "14: clusters[0].instances[0].http_port: must be at most 65535, not 81000",
    ),
    "bad bandwidth": (
        replaced("10 Gbit/s", "10 GB/s"),
        "36: links[0].bandwidth: '10 GB/s' is no bandwidth; write for example \"60 Mbit/s\"",
    ),
    "bad name": (
        replaced("name: home-1", "name: home/1"),
        "27: clusters[1].instances[1].name: must be letters, digits",
    ),
    "endless wait": (
        GOOD + "transfer:\n  lease_s: .inf\n",
        "41: transfer.lease_s: must be a finite number, not inf",
    ),
    "negative lead": (
        GOOD + "transfer:\n  decode_lead_s: -1\n",
        "41: transfer.decode_lead_s: must be at least 0, not -1",
    ),
    "repeated name": (
        replaced("name: home-1", "name: home-0"),
        '27: clusters[1].instances[1].name: "home-0" is already a name in line 21',
    ),
    "cluster named like an instance": (
        replaced("name: home-1", "name: east"),
        '27: clusters[1].instances[1].name: "east" is already a name in line 7',
    ),
    "repeated field": (
        replaced("    kind: pd\n", "    kind: pd\n    kind: prfaas\n"),
        "19: clusters[1].kind: is already given in line 18",
    ),
    "same port twice": (
        replaced(HOME_1, HOME_1.replace("10.1.0.2", "10.1.0.1").replace("8100", "8101")),
        '31: clusters[1].instances[1].kv_port: 8200 is already used by instance "home-0"; take another',
    ),
    "port inside another's ranks": (
        replaced(
            HOME_1, HOME_1.replace("10.1.0.2", "10.1.0.1").replace("8100", "8203").replace("8200", "9000")
        ),
        '30: clusters[1].instances[1].http_port: 8203 is already used by instance "home-0"; take another',
    ),
    "gateway's port": (
        replaced("host: 10.1.0.2", "host: localhost") + "gateway: {host: 0.0.0.0, port: 8100}\n",
        "30: clusters[1].instances[1].http_port: 8100 is already used by the gateway; take another",
    ),
    "operators' port": (
        replaced("host: 10.1.0.2", "host: localhost") + "gateway: {admin: {port: 8100}}\n",
        "30: clusters[1].instances[1].http_port: 8100 is already used by the gateway's operators (gateway.admin);",
    ),
    "operators at the clients' port": (
        GOOD + "gateway: {port: 8100, host: 0.0.0.0, admin: {port: 8100}}\n",
        "40: gateway.admin.port: 8100 is already used by the gateway; take another",
    ),
    "operators without a token": (
        GOOD + "gateway: {admin: {host: 0.0.0.0}}\n",
        '40: gateway.admin.host: "0.0.0.0" is not this machine alone, so operators must show a token; add '
        "gateway.admin.token_file",
    ),
    "a URL for a host name": (
        GOOD + "gateway: {hosts: ['http://gate:8000']}\n",
        "40: gateway.hosts[0]: 'http://gate:8000' is no host name; write it without \"http://\" and without a port",
    ),
    "an unknown detail": (
        GOOD + "gateway: {route_header: long}\n",
        '40: gateway.route_header: must be one of "short", "full", not "long"',
    ),
    "no patience": (
        GOOD + "control: {silence_s: 0}\n",
        "40: control.silence_s: must be greater than 0",
    ),
    "a period to expect traffic by": (
        GOOD + "control: {window_s: 300, forecast_period_s: 600}\n",
        '40: control.forecast_period_s: is no known field; did you mean "allocation_period_s"?',
    ),
    "ranks beyond the last port": (
        replaced("kv_port: 8200", "kv_port: 65533"),
        "15: clusters[0].instances[0].kv_port: 65533 leaves no room for 4 ranks; take one up to 65532",
    ),
    "pd cluster that can't decode": (
        GOOD.replace("roles: [prefill, decode]", "roles: [prefill]").replace(
            "roles: [decode]", "roles: [prefill]"
        ),
        '17: clusters[1]: is of kind "pd" but none of its instances has the role decode',
    ),
    "prfaas cluster that decodes": (
        replaced("roles: [prefill]", "roles: [prefill, decode]"),
        '12: clusters[0].instances[0].roles: a cluster of kind "prfaas" only prefills',
    ),
    "nothing decodes": (
        replaced("    kind: pd", "    kind: prfaas")
        .replace("prefill, decode", "prefill")
        .replace("[decode]", "[prefill]"),
        '6: clusters: nothing decodes; add a cluster of kind "pd"',
    ),
    "no prefill anywhere": (
        re.sub(r"  - name: east.*?(?=  - name: home\n)", "", GOOD, flags=re.S)
        .replace("roles: [prefill, decode]", "roles: [decode]")
        .replace(
            "links:\n  - source: east\n    target: home\n    bandwidth: 10 Gbit/s\n    connections: 8\n", ""
        ),
        "6: clusters: no instance has the role prefill",
    ),
    "unknown cluster in a link": (
        replaced("source: east", "source: west"),
        '34: links[0].source: there is no cluster "west"; the clusters are east, home',
    ),
    "link to itself": (replaced("source: east", "source: home"), '34: links[0]: leads from "home" to itself'),
    "link only to where nothing decodes": (
        replaced("source: east\n    target: home", "source: home\n    target: east"),
        '7: clusters[0]: no link leads from "east"; add one under links to a "pd" cluster',
    ),
    "link given twice": (
        replaced("routing:", "  - {source: east, target: home, bandwidth: 1 Gbit/s}\nrouting:"),
        '38: links[1]: repeats links[0] ("east" to "home")',
    ),
    "prfaas cluster without a link": (
        re.sub(r"links:.*?(?=routing:)", "", GOOD, flags=re.S),
        '7: clusters[0]: no link leads from "east"',
    ),
    "two models": (
        replaced("  path: models/m", "  path: models/m\n  tiny: qwen3"),
        "2: model: needs either path",
    ),
    "tiny model by path": (
        replaced("  path: models/m", "  tiny: ../m"),
        '4: model.tiny: must be one of "qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3", not "../m"',
    ),
    "no cache size on cpu": (
        replaced("hardware: h20\n", "hardware: cpu\n"),
        "19: clusters[1].hardware: engines on cpu need engine.kv_cache_gib",
    ),
    "threshold above every prompt": (
        replaced("threshold_tokens: 16000", "threshold_tokens: 40000"),
        "39: routing.threshold_tokens: 40000 is more than model.max_model_len (32768)",
    ),
    "staging below a block": (
        GOOD + "engine: {staging: 512 KiB}\n",
        "40: engine.staging: 524288 bytes hold no transfer block of 1048576",
    ),
    "engine option that is ours": (
        GOOD + "engine:\n  extra_args:\n    - --port=1\n",
        "42: engine.extra_args[0]: '--port=1' can't be given here; give the instance's http_port",
    ),
    "dtype among the engine's options": (
        GOOD + "engine:\n  extra_args: [--dtype, float32]\n",
        "41: engine.extra_args[0]: '--dtype' can't be given here; give model.dtype",
    ),
    "dtype of the KV cache among the engine's options": (
        GOOD + "engine:\n  extra_args: [--kv-cache-dtype=fp8]\n",
        "41: engine.extra_args[0]: '--kv-cache-dtype=fp8' can't be given here; give model.kv_cache_dtype",
    ),
    "start of the KV cache's dtype": (
        GOOD + "engine:\n  extra_args: [--kv_cache_d, fp8]\n",
        "41: engine.extra_args[0]: '--kv_cache_d' can't be given here; give model.kv_cache_dtype",
    ),
    "layers with a dtype of their own": (
        GOOD + "engine:\n  extra_args: [--kv-cache-dtype-skip-layers, '0']\n",
        "41: engine.extra_args[0]: '--kv-cache-dtype-skip-layers' can't be given here; all layers keep",
    ),
    "stages of a pipeline": (
        GOOD + "engine:\n  extra_args: [-pp, '2']\n",
        "41: engine.extra_args[0]: '-pp' can't be given here; give the instance's pipeline_parallel",
    ),
    "replicas behind one port": (
        GOOD + "engine:\n  extra_args: [--data-parallel-size=2]\n",
        "41: engine.extra_args[0]: '--data-parallel-size=2' can't be given here; start each replica as an instance",
    ),
    "one of several replicas": (
        GOOD + "engine:\n  extra_args: [--data-parallel-rank, '1']\n",
        "41: engine.extra_args[0]: '--data-parallel-rank' can't be given here; start each replica as an instance",
    ),
    "the same in short": (
        GOOD + "engine:\n  extra_args: [-dpn=1]\n",
        "41: engine.extra_args[0]: '-dpn=1' can't be given here; start each replica as an instance",
    ),
    "another connector": (
        GOOD + "engine:\n  extra_args: [--kv-offloading-size, '8']\n",
        "41: engine.extra_args[0]: '--kv-offloading-size' can't be given here; vLLM would put another connector in",
    ),
    "tokens that are divided among ranks": (
        GOOD + "engine:\n  extra_args: [-dcp=2]\n",
        "41: engine.extra_args[0]: '-dcp=2' can't be given here; KVCache that is divided by tokens is not moved",
    ),
    "dtype of a KV cache whose size is not known": (
        GOOD.replace("  path: models/m\n", "  path: models/m\n  kv_cache_dtype: nvfp4\n"),
        '5: model.kv_cache_dtype: must be one of "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", ',
    ),
    "dtype of a model that there is not": (
        GOOD.replace("  path: models/m\n", "  path: models/m\n  dtype: fp8\n"),
        '5: model.dtype: must be one of "auto", "bfloat16", "float16", "float32", not "fp8"',
    ),
    "start of an engine option that is ours": (
        GOOD + "engine:\n  extra_args: [--kv-transfer-con, '{}']\n",
        "41: engine.extra_args[0]: '--kv-transfer-con' can't be given here; it is made from clusters",
    ),
    "etcd without a port": (
        GOOD + "fleet: {etcd: [http://etcd]}\n",
        "40: fleet.etcd[0]: 'http://etcd' is no address of etcd; write \"https://HOST:2379\"",
    ),
    "a fleet without etcd": (GOOD + "fleet: {name: a}\n", "40: fleet.etcd: is missing"),
    "a fleet of nobody": (GOOD + "fleet: {etcd: []}\n", "fleet.etcd: must have at least one entry"),
    "a fleet that is empty": (GOOD + "fleet:\n", "40: fleet: must be a mapping"),
    "a gateway's name with a slash": (
        GOOD + "fleet: {etcd: [http://e:1], name: a/b}\n",
        "fleet.name: must be letters",
    ),
    "a lease that is too short": (
        GOOD + "fleet: {etcd: [http://e:1], lease_s: 1}\n",
        "fleet.lease_s: must be at least 2, not 1",
    ),
    "certificates for an etcd without TLS": (
        GOOD + "fleet:\n  etcd: [https://e:1, http://f:1]\n  ca_file: ca.crt\n",
        "42: fleet.ca_file: is for TLS; write https:// before every address in etcd",
    ),
    "not a mapping": ("- a\n", "must be a mapping of fields"),
    "empty": ("", "must be a mapping of fields"),
    "no YAML": ("name: [\n", "2: is no valid YAML"),
    "YAML that makes objects": (
        "name: !!python/name:os.system ''\n",
        "1: is no valid YAML (could not determine a constructor",
    ),
    "key that is no text": ("? [a]\n: b\n", "a field's name must be plain text"),
    "values that contain themselves": ("name: &a [*a]\n", "nests or repeats too much"),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD.keys())
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DeploymentError) as raised:
        load(tmp_path, text)
    said = str(raised.value)
    assert said.startswith(str(tmp_path / "deployment.yaml"))
    assert message in said
    assert "\n" not in said


def test_aliases_cannot_unfold_without_bound(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(DeploymentError, match="repeats too much"):
        load(tmp_path, "\n".join(levels))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="there is no such file"):
        load_deployment(tmp_path / "none.yaml")
    with pytest.raises(DeploymentError, match=r"can't be read \(Is a directory\)$"):
        load_deployment(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(DeploymentError, match=r"is no text in UTF-8|no valid YAML"):
        load_deployment(tmp_path / "binary.yaml")


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD)
    with pytest.raises(DeploymentError, match='has no instance "x"; it has east-0, home-0, home-1'):
        deployment.instance("x")
    with pytest.raises(DeploymentError, match='has no cluster "x"; it has east, home'):
        deployment.cluster("x")


def test_numbers_in_env_are_text(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD + "engine: {env: {A: 1, B: two}, kv_cache_gib: 2}\n")
    assert deployment.engine.env == {"A": "1", "B": "two"}


@given(st.data())
def test_a_changed_line_gives_no_other_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever a line is changed to, the file is read or the error is a sentence about it."""
    lines = GOOD.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
    value = data.draw(
        st.one_of(text, st.sampled_from(["[]", "{}", "~", "-1", "0.5", "true", "[[]]", "{a: b}"]))
    )
    indent, _, rest = lines[at].partition(lines[at].strip()[0])
    key = (lines[at].strip()[0] + rest).split(":")[0]
    lines[at] = f"{indent}{key}: {value}" if data.draw(st.booleans()) else data.draw(text)
    path = tmp_path_factory.getbasetemp() / "changed.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        load_deployment(path)
    except DeploymentError as error:
        assert str(error).startswith(str(path))


def test_a_way_back_is_for_prefixes(tmp_path: Path) -> None:
    back = "  - {source: home, target: east, bandwidth: 1 Gbit/s}\nrouting:"
    deployment = load(tmp_path, replaced("routing:", back))
    peers = peers_of(deployment, deployment.instance("home-0"))
    assert [(peer.member.name, peer.path.link, peer.path.on_demand) for peer in peers] == [
        ("east-0", "home->east", True),
        ("home-1", "home", False),
    ]
    assert [source.member.name for source in sources_of(deployment, deployment.instance("east-0"))] == [
        "home-0",
        "home-1",
    ]


def test_where_events_are_published(tmp_path: Path) -> None:
    here = load_deployment(EXAMPLE, state_dir=tmp_path)
    endpoints = [here.events_endpoint(instance) for instance in here.instances]
    addresses = {each.publish for each in endpoints} | {each.replay for each in endpoints}
    assert len(addresses) == 2 * len(here.instances)
    assert all(address.startswith(f"ipc://{here.events_folder}/inproc-") for address in addresses)


@pytest.mark.parametrize("length", [1, 40, 70, 90, 200])
def test_sockets_of_events_have_room_for_later_ranks(tmp_path: Path, length: int) -> None:
    state_dir = tmp_path / ("s" * length)
    here = load_deployment(EXAMPLE, state_dir=state_dir)
    assert (here.events_folder == here.home / "events") is (len(str(here.home / "events")) < 79)
    names = [local_endpoint(here.home, name) for name in ("a" * 63, "b" * 63, "home-0")]
    replays = {endpoint.replay.removeprefix("ipc://") for endpoint in names}
    assert len(replays) == 3
    for replay in replays:
        Path(replay).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{replay}_dp999")
        Path(f"{replay}_dp999").unlink()
    if here.events_folder != here.home / "events":
        here.events_folder.rmdir()


def test_what_the_scheduler_is_told(tmp_path: Path) -> None:
    deployment = load(
        tmp_path, GOOD.replace("routing:\n  threshold_tokens: 16000\n", "control:\n  allocation: false\n")
    )
    assert (deployment.routing.policy, deployment.routing.threshold_tokens) == ("tilted", None)
    assert (deployment.control.allocation, deployment.control.threshold_period_s) == (False, 30.0)


def test_a_policy_of_a_module_and_its_parameters(tmp_path: Path) -> None:
    routing = (
        "routing:\n  policy: no_such_package.module:Class\n  params: {share: 0.5, eager: true, order: sjf}\n"
    )
    loaded = load(tmp_path, GOOD.replace("routing:\n  threshold_tokens: 16000\n", routing)).routing
    assert loaded.policy == "no_such_package.module:Class", "not imported: engines start without it"
    assert loaded.params == {"share": 0.5, "eager": True, "order": "sjf"}
    assert loaded.params_of(loaded.policy) == loaded.params and loaded.params_of("tilted") == {}


def test_where_operators_connect(tmp_path: Path) -> None:
    gateway = load(tmp_path, GOOD).gateway
    assert gateway.route_header == "short" and gateway.hosts == ()
    assert (gateway.admin.url, gateway.admin.token_file) == ("http://127.0.0.1:8001", None)
    # The next port that nothing of the file uses: KV ports 8200 to 8203 and HTTP port 8100.
    for port, admin_port in ((8199, 8204), (8201, 8204), (8099, 8101), (65535, 65534)):
        assert load(tmp_path, f"{GOOD}gateway: {{port: {port}}}\n").gateway.admin.port == admin_port
    named = "gateway: {admin: {host: 0.0.0.0, port: 9000, token_file: token}, hosts: [Prfaas.LLM.svc]}\n"
    gateway = load(tmp_path, GOOD + named).gateway
    assert gateway.admin.url == "http://127.0.0.1:9000" and gateway.hosts == ("prfaas.llm.svc",)
    assert gateway.admin.token_file == tmp_path / "state" / "two-sites" / "token"
    # No secret: it is written by hand, as the file is.
    beside = load(tmp_path, GOOD + "gateway: {clients: clients.yaml}\n")
    assert beside.gateway.clients == beside.path.parent / "clients.yaml"


def test_which_etcd_gateways_share(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).fleet is None
    fleet = load(tmp_path, GOOD + "fleet: {etcd: [http://127.0.0.1:2379/, 'http://[::1]:2379']}\n").fleet
    assert fleet is not None and fleet.etcd == ("http://127.0.0.1:2379", "http://[::1]:2379")
    assert (fleet.name, fleet.lease_s, fleet.period_s, fleet.is_plain, fleet.is_local) == (
        None,
        3,
        0.1,
        True,
        True,
    )
    named = "fleet: {etcd: [https://etcd-0.x:2379], name: edge-1, ca_file: certificates/etcd.crt}\n"
    fleet = load(tmp_path, GOOD + named).fleet
    assert fleet is not None and (fleet.name, fleet.is_plain, fleet.is_local) == ("edge-1", False, False)
    home = tmp_path / "state" / "two-sites"
    assert (fleet.ca_file, fleet.certificate_file) == (home / "certificates" / "etcd.crt", None)


def test_logs_of_engines(tmp_path: Path) -> None:
    engine = load(tmp_path, GOOD).engine
    assert (engine.log_bytes, engine.log_files) == (64 << 20, 3)
    engine = load(tmp_path, GOOD + "engine: {log_size: 1 MiB, log_files: 9}\n").engine
    assert (engine.log_bytes, engine.log_files) == (1 << 20, 9)


def test_how_long_engines_are_waited_for(tmp_path: Path) -> None:
    default = load(tmp_path, GOOD)
    assert (default.control.silence_s, default.control.stall_s) == (2.5, 60.0)
    assert (default.gateway.first_byte_s, default.gateway.idle_s) == (1800.0, 600.0)
    text = "control: {silence_s: 4, stall_s: 90}\ngateway: {first_byte_s: 60, idle_s: 20}\n"
    patient = load(tmp_path, GOOD + text)
    assert (patient.control.silence_s, patient.control.stall_s) == (4.0, 90.0)
    assert (patient.gateway.first_byte_s, patient.gateway.idle_s) == (60.0, 20.0)
