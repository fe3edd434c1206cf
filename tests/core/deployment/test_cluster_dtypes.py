"""Clusters that keep their KVCache in unlike dtypes: what may be mixed, what engines are told, what links carry."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.core.deployment import (
    Deployment,
    DeploymentError,
    PlannedDeployment,
    difference,
    load_deployment,
    load_planned,
)
from prfaas.core.deployment.peers import peers_of, sources_of
from prfaas.core.kv.dtypes import CacheDtypes, are_convertible
from prfaas.core.planner import make_plan, problem_of
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.world import World
from prfaas.serving.control.planning_inputs import kv_facts, kv_model_of, prefill_curves, view_of

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "dtype": "bfloat16",
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16,
}  # fmt: skip

FILE = """\
name: site
model: {served_name: m, path: model, max_model_len: 32768}
clusters:
  - name: east
    kind: prfaas
    hardware: h200
    profile: minimax-m2.5-h200
    EAST
    instances:
      - {name: e0, roles: [prefill], host: 10.0.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
  - name: home
    kind: pd
    hardware: h20
    profile: minimax-m2.5-h20
    HOME
    instances:
      - {name: h0, roles: [prefill], host: 10.1.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
      - {name: h1, roles: [decode], host: 10.1.0.2, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
  - name: west
    kind: pd
    hardware: h20
    profile: minimax-m2.5-h20
    instances:
      - {name: w0, roles: [prefill], host: 10.2.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
      - {name: w1, roles: [decode], host: 10.2.0.2, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
links:
  - {source: east, target: home, bandwidth: 10 Gbit/s, egress_per_gb: 0.01}
  - {source: home, target: west, bandwidth: 10 Gbit/s, egress_per_gb: 0.01}
routing: {threshold_tokens: 16000}
workload: {lengths: {distribution: uniform, low: 4000, high: 40000}, output_tokens: 100}
slo: {tpot_s: 0.05}
prices: {h200: 2, h20: 1}
"""


def written(folder: Path, east: str = "", home: str = "", model: str = "", **config: Any) -> Path:
    """The file with a dtype of a cluster or of the model; `config`: of the checkpoint."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**DENSE, **config}))
    text = FILE.replace("max_model_len", f"{model and f'kv_cache_dtype: {model}, '}max_model_len")
    for name, dtype in (("EAST", east), ("HOME", home)):
        text = text.replace(f"    {name}\n", f"    kv_cache_dtype: {dtype}\n" if dtype else "")
    path = folder / "site.yaml"
    path.write_text(text)
    return path


def running(folder: Path, *dtypes: str, **config: Any) -> Deployment:
    return load_deployment(written(folder, *dtypes, **config), state_dir=folder / "state")


def planned(folder: Path, *dtypes: str) -> PlannedDeployment:
    return load_planned(written(folder, *dtypes))


def test_a_cluster_has_the_model_s_dtype_or_its_own(tmp_path: Path) -> None:
    deployment = running(tmp_path, "fp8", "", "bfloat16")
    assert [deployment.cache_dtypes(each.name).kv_cache for each in deployment.clusters] == [
        "fp8", "bfloat16", "bfloat16",
    ]  # fmt: skip
    assert deployment.converts_kv


@pytest.mark.parametrize(
    ("east", "home", "model", "converts"),
    [
        ("", "", "", False),
        ("", "", "fp8", False),
        ("fp8", "fp8_e4m3", "fp8", False),
        ("bfloat16", "bfloat16", "bfloat16", False),
        ("fp8_e5m2", "", "", True),
        ("bfloat16", "", "", True),
        ("auto", "", "fp8", True),
    ],
)
def test_engines_convert_where_names_differ(
    tmp_path: Path, east: str, home: str, model: str, converts: bool
) -> None:
    assert running(tmp_path, east, home, model).converts_kv == converts


MIX = "; mix one of bfloat16 and float16 with one of fp8_e4m3 and fp8_e5m2"


@pytest.mark.parametrize("load", [load_deployment, load_planned])
@pytest.mark.parametrize(
    ("dtypes", "config", "said"),
    [
        (
            ("fp8_e5m2", "fp8", ""),
            {},
            'clusters[1].kv_cache_dtype: fp8_e4m3 is not converted to or from fp8_e5m2 of cluster "east"'
            + MIX,
        ),
        (
            ("float16", "", "bfloat16"),
            {},
            'clusters[0].kv_cache_dtype: float16 is not converted to or from bfloat16 of cluster "home"'
            + MIX,
        ),
        # What `auto` means is in the checkpoint.
        (
            ("float16", "", ""),
            {},
            'clusters[0].kv_cache_dtype: float16 is not converted to or from bfloat16 of cluster "home"'
            + MIX,
        ),
        (
            ("fp8_e5m2", "", ""),
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
            'clusters[0].kv_cache_dtype: fp8_e5m2 is not converted to or from fp8_e4m3 of cluster "home"'
            + MIX,
        ),
        (
            ("fp8", "", ""),
            LATENT,
            "clusters[0].kv_cache_dtype: the model keeps latents (MLA), which are not converted; leave it out",
        ),
    ],
)
def test_what_can_not_be_mixed(
    tmp_path: Path, load: Any, dtypes: tuple[str, ...], config: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, *dtypes, **config)
    with pytest.raises(DeploymentError) as refused:
        load(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{path}:")


def test_float32_and_the_layout_of_latents_are_not_converted(tmp_path: Path) -> None:
    path = written(tmp_path, "fp8")
    path.write_text(path.read_text().replace("path: model,", "path: model, dtype: float32,"))
    with pytest.raises(DeploymentError, match="fp8_e4m3 is not converted to or from float32 of cluster"):
        load_deployment(path)
    with pytest.raises(DeploymentError, match="fp8_ds_mla is not converted to or from bfloat16 of cluster"):
        load_deployment(written(tmp_path, "fp8_ds_mla"))


def test_names_alone_are_judged_until_the_model_is_there(tmp_path: Path) -> None:
    path = written(tmp_path, "float16")
    (tmp_path / "model" / "config.json").unlink()
    assert load_deployment(path).converts_kv
    path = written(tmp_path, "fp8_e5m2", "", "fp8")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(DeploymentError, match="fp8_e5m2 is not converted"):
        load_deployment(path)


def test_stand_ins_convert_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "fp8")
    path.write_text(path.read_text().replace("hardware: h200", "hardware: synthetic", 1))
    with pytest.raises(
        DeploymentError, match=r"clusters\[0\]\.hardware: stand-in engines convert no KVCache"
    ):
        load_deployment(path)


@pytest.mark.parametrize(("home", "exchange"), [("", False), ("fp8", True)])
def test_pools_exchange_pages_in_one_dtype_only(tmp_path: Path, home: str, exchange: bool) -> None:
    path = written(tmp_path, "fp8", home)
    text = path.read_text()
    for port, hardware in ((8300, "h200"), (8400, "h20")):
        at = f"    hardware: {hardware}\n"
        text = text.replace(at, f"{at}    pool: {{memory: 1 GiB, kv_port: {port}}}\n", 1)
    path.write_text(text)
    deployment = load_deployment(path)
    east, h0, h1 = deployment.pools
    there = ["home-pool-0", "home-pool-1"] if exchange else []
    assert [peer.member.name for peer in peers_of(deployment, east)] == there
    assert [peer.member.name for peer in sources_of(deployment, h0)] == [*["east-pool"][:exchange], h1.name]
    live = view_of(deployment, kv_model_of(deployment), prefill_curves(deployment), 0.0)
    world = World(scenario_of(load_planned(path)), np.random.default_rng(1), 64)
    assert [view.links["east", "home"].joins_pools for view in (live, world.view)] == [exchange] * 2


def test_another_dtype_starts_everything_again(tmp_path: Path) -> None:
    before, after = running(tmp_path), running(tmp_path, "fp8")
    (change,) = difference(before, after).changes
    assert change.sentence == 'clusters[east].kv_cache_dtype is now "fp8"; it was not given'
    assert change.needs == "start the gateway and all engines again"


@pytest.mark.parametrize(("east", "needs"), [("fp8", "start the gateway and all engines again"), ("", None)])
def test_a_cluster_of_another_dtype_is_not_added_live(tmp_path: Path, east: str, needs: str | None) -> None:
    after = running(tmp_path, east)
    before = replace(after, clusters=after.clusters[1:])
    (change,) = difference(before, after).changes
    assert (change.field, change.needs) == ("clusters[east]", needs)


WHOLE = 48 * 2 * 8 * 128 * 2
"""Bytes of a token in 16 bits."""


@pytest.mark.parametrize(
    ("dtypes", "held", "sent"),
    [
        (("", "", ""), (2, 2, 2), (2, 2)),
        (("", "", "fp8"), (1, 1, 1), (1, 1)),
        (("fp8", "", ""), (1, 2, 2), (1, 2)),
        (("", "fp8", ""), (2, 1, 2), (1, 1)),
        (("fp8", "fp8", ""), (1, 1, 2), (1, 1)),
        (("bfloat16", "", "fp8"), (2, 1, 1), (1, 1)),
    ],
)
def test_each_link_carries_the_narrower_and_each_cluster_holds_its_own(
    tmp_path: Path, dtypes: tuple[str, ...], held: tuple[int, ...], sent: tuple[int, ...]
) -> None:
    """In planning, in simulations and in the gateway alike; bytes per value."""
    deployment = planned(tmp_path, *dtypes)
    names = [link.name for link in deployment.links]
    kept = [(each.kv_model or deployment.kv_model).token_bytes for each in deployment.clusters]
    assert kept == [WHOLE * width // 2 for width in held]
    expected = [WHOLE * width // 2 for width in sent]
    assert [deployment.sent_over(name).token_bytes for name in names] == expected
    problem = problem_of(deployment)
    assert [problem.kv_bytes_over(name)(np.array([1000.0]))[0] for name in names] == [
        1000 * each for each in expected
    ]
    world = World(scenario_of(deployment), np.random.default_rng(1), 64)
    live = running(tmp_path, *dtypes)
    shown = view_of(live, kv_model_of(live), prefill_curves(live), 0.0)
    for view in (world.view, shown):
        over = [view.kv_between(link.source, link.target) for link in deployment.links]
        inside = [view.kv_between(each.name, each.name) for each in deployment.clusters]
        steps = [each.prefix_bytes_to_move(2048, 1024) // 1024 for each in (*over, *inside)]
        assert steps == [*expected, *kept]
    assert [link.kv.facts.bytes_to_move(1024, 0) // 1024 for link in world.links.values()] == expected


@pytest.mark.parametrize("with_west", [True, False])
def test_a_plan_with_one_end_in_fp8_is_that_on_twice_the_link(tmp_path: Path, with_west: bool) -> None:
    """By the general planner and by the paper's for two clusters; and half as many bytes are paid for."""
    points, thresholds = {}, {}
    for dtype, bandwidth in (("", 10e9), ("", 20e9), ("fp8", 10e9)):
        path = written(tmp_path, dtype)
        if not with_west:
            text = path.read_text()
            west, link = text.index("  - name: west"), text.index("  - {source: home")
            path.write_text(text[:west] + text[text.index("links:") : link] + text[text.index("routing:") :])
        deployment = load_planned(path, changes={"links[0].bandwidth": bandwidth})
        points[dtype, bandwidth] = make_plan(problem_of(deployment)).optimum
        roles = {each.name: 1 for each in deployment.pd_clusters}
        thresholds[dtype, bandwidth] = scenario_of(deployment, roles=roles).threshold_tokens
    narrow, wide, slow = points["fp8", 10e9], points["", 20e9], points["", 10e9]
    assert narrow.lambda_max == pytest.approx(wide.lambda_max, rel=1e-6)
    assert narrow.lambda_max > 1.01 * slow.lambda_max
    assert thresholds["fp8", 10e9] == pytest.approx(thresholds["", 20e9], rel=1e-6)
    assert thresholds["fp8", 10e9] != pytest.approx(thresholds["", 10e9], rel=1e-3)
    assert narrow.ttft_mean_s == pytest.approx(wide.ttft_mean_s, rel=1e-6)
    assert 2 * narrow.links[0].egress_bits_per_s == pytest.approx(wide.links[0].egress_bits_per_s, rel=1e-6)


def test_a_title_says_who_keeps_what(tmp_path: Path) -> None:
    assert planned(tmp_path, "fp8").model_title == "m (fp8 in east)"
    title = "m, KVCache in bfloat16 (fp8 in home, fp8 in west)"
    assert planned(tmp_path, "bfloat16", "", "fp8").model_title == title


def test_predicted_bytes_are_those_of_the_checkpoint_without_a_mixture(tmp_path: Path) -> None:
    deployment = running(tmp_path, "fp8", "fp8", "fp8")
    assert kv_facts(kv_model_of(deployment)).bytes_to_move(1025, 0) == 1024 * WHOLE // 2


@pytest.mark.parametrize(
    ("config", "kept"),
    [({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "auto"), ({"dtype": None}, "auto")],
)
def test_what_auto_is(tmp_path: Path, config: dict[str, Any], kept: str) -> None:
    """By a mixture with bfloat16, which only float16 is refused in."""
    own = {**config, "dtype": config.get("dtype")}
    if kept == "auto":
        assert running(tmp_path, "bfloat16", **own).converts_kv
    else:
        with pytest.raises(DeploymentError, match=f"bfloat16 is not converted to or from {kept} of cluster"):
            running(tmp_path, "bfloat16", **own)


def test_names() -> None:
    assert CacheDtypes("fp8").named == CacheDtypes("fp8_e4m3").named == "fp8_e4m3"
    assert CacheDtypes(model="bfloat16").named == CacheDtypes("bfloat16", "float32").named == "bfloat16"
    assert are_convertible("auto", "float16") and not are_convertible("auto", "float32")
