"""Deployment files for planning: what a good one says, and where a bad one is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prfaas.core.deployment import DeploymentError, PlannedDeployment, load_deployment, load_planned
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LogNormalLengths,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile, save_profile
from prfaas.core.planner import problem_of
from prfaas.lab.simulator.scenario import scenario_of

EXAMPLES = Path(__file__).parents[3] / "examples"

GOOD = """\
name: two-sites
model:
  published: internal-1t
clusters:
  - name: east
    kind: prfaas
    hardware: h200
    instance_count: 4
    gpus_per_instance: 8
    profile: internal-1t-h200
  - name: home
    kind: pd
    hardware: h20
    instance_count: 8
    profile: internal-1t-h20
links:
  - {source: east, target: home, bandwidth: 100 Gbit/s}
workload:
  lengths: {distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}
  output_tokens: 1024
slo:
  tokens_per_s: 40
prices:
  h200: 2
  h20: 1.0
"""

LIVE = """\
name: live
model: {served_name: m, path: m, max_model_len: 32768}
clusters:
  - name: east
    kind: prfaas
    hardware: h200
    profile: internal-1t-h200
    instances:
      - {name: e0, roles: [prefill], host: 10.0.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
  - name: home
    kind: pd
    hardware: h20
    profile: internal-1t-h20
    instances:
      - {name: h0, roles: [prefill], host: 10.1.0.1, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
      - {name: h1, roles: [decode], host: 10.1.0.2, http_port: 8100, kv_port: 8200, tensor_parallel: 8}
links: [{source: east, target: home, bandwidth: 10 Gbit/s}]
routing: {threshold_tokens: 16000}
workload: {lengths: {distribution: fixed, tokens: 4000}, output_tokens: 100}
slo: {tpot_s: 0.025}
"""


def planned(tmp_path: Path, text: str, **changes: float) -> PlannedDeployment:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return load_planned(path, changes=changes)


def replaced(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_a_good_file(tmp_path: Path) -> None:
    deployment = planned(
        tmp_path, replaced("    instance_count: 4", "    prefix_hit_ratio: 0.3\n    instance_count: 4")
    )
    east, home = deployment.clusters
    assert (deployment.prfaas_clusters, deployment.pd_clusters) == ((east,), (home,))
    assert (east.instance_count, east.gpus_per_instance, east.gpus) == (4, 8, 32)
    assert (east.prefix_hit_ratio, home.prefix_hit_ratio) == (0.3, None)
    assert home.gpus == 64  # gpus_per_instance is the profile's
    assert east.profile.name == "internal-1t-h200"
    assert deployment.cluster("home") is home
    assert deployment.workload.lengths == LogNormalLengths(9.9, 1, 128, 131072)
    assert (deployment.workload.output_tokens, deployment.workload.prefix_hit_ratio) == (1024, 0)
    assert (deployment.slo.tpot_s, deployment.slo.tokens_per_s) == (1 / 40, 40)
    assert deployment.prices == {"h200": 2, "h20": 1}
    assert deployment.links[0].bandwidth_bits_per_s == 100e9
    assert deployment.kv_model.kv_bytes(1024) == pytest.approx(190.8 * 2**20, rel=1e-3)


@pytest.mark.parametrize("source", ["published", "config", "path"])
def test_an_fp8_cache_is_counted_wherever_the_model_comes_from(tmp_path: Path, source: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_model("internal-1t").config))
    text = replaced("published: internal-1t", f"{source}: {'internal-1t' if source == 'published' else '.'}")
    whole = planned(tmp_path, text)
    half = planned(tmp_path, text.replace("model:\n", "model:\n  kv_cache_dtype: fp8\n"))
    double = planned(tmp_path, text.replace("model:\n", "model:\n  dtype: float32\n"))
    assert 2 * half.kv_model.token_bytes == whole.kv_model.token_bytes == double.kv_model.token_bytes / 2
    assert half.kv_model.fixed_bytes == whole.kv_model.fixed_bytes < double.kv_model.fixed_bytes


@pytest.mark.parametrize("name", ["paper", "dense", "multi"])
def test_the_examples_are_good(name: str) -> None:
    assert load_planned(EXAMPLES / f"{name}.yaml").name == name


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ("{distribution: uniform, low: 128, high: 4096}", UniformLengths(128, 4096)),
        ("{distribution: fixed, tokens: 4096}", FixedLengths(4096)),
        ("{distribution: empirical, lengths: [1000, 2000]}", EmpiricalLengths((1000, 2000), None)),
        (
            "{distribution: empirical, lengths: [1000, 2000], weights: [1, 0]}",
            EmpiricalLengths((1000, 2000), (1, 0)),
        ),
    ],
)
def test_distributions(tmp_path: Path, lengths: str, expected: object) -> None:
    text = replaced("{distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}", lengths)
    assert planned(tmp_path, text).workload.lengths == expected


def test_a_trace_lies_beside_the_file_and_may_say_how_long_answers_are(tmp_path: Path) -> None:
    text = replaced(
        "{distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}\n  output_tokens: 1024",
        "{distribution: trace, path: t.jsonl, format: mooncake}",
    )
    workload = planned(tmp_path, text).workload
    assert workload.lengths == TraceLengths(tmp_path / "t.jsonl", "mooncake")
    assert workload.output_tokens is None


def test_the_columns_of_a_trace_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("at,prompt,answer\n0,4000,10\n60,8000,30\n")
    lengths = "{distribution: trace, path: t.csv, columns: {arrival: at, input: prompt, output: answer}}"
    old = "{distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}\n  output_tokens: 1024"
    problem = problem_of(planned(tmp_path, replaced(old, lengths)))
    assert (problem.workload.lengths.mean(), problem.workload.output_tokens) == (6000, 20)
    wrong = planned(tmp_path, replaced(old, lengths.replace("arrival: at", "when: at")))
    with pytest.raises(DeploymentError, match=r"workload\.lengths\.path: columns of a trace are named as"):
        problem_of(wrong)


def test_a_file_to_run_can_be_planned_too(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}'
    )
    deployment = planned(tmp_path, LIVE)
    assert [cluster.instance_count for cluster in deployment.clusters] == [1, 2]
    # 2 KV heads on 8 ranks: each is there 4 times.
    assert deployment.kv_model.token_bytes == 4 * 2 * 2 * 2 * 32 * 2 and deployment.kv_copies == 1
    assert load_deployment(tmp_path / "plan.yaml").slo.tpot_s == 0.025


@pytest.mark.parametrize("config", ["m/config.json", "m", "m/qwen3.json"])
def test_a_users_own_config(tmp_path: Path, config: str) -> None:
    file = tmp_path / (config if config != "m" else "m/config.json")
    file.parent.mkdir()
    file.write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 32}'
    )
    text = replaced("published: internal-1t", f"config: {config}")
    token_bytes = 3 * 2 * 2 * 32 * 2
    # 8 GPUs of an instance are 8 ranks, unless the file says otherwise.
    assert planned(tmp_path, text).kv_model.token_bytes == 4 * token_bytes
    text = text.replace("    instance_count", "    tensor_parallel: 2\n    instance_count")
    deployment = planned(tmp_path, text)
    assert deployment.kv_model.token_bytes == token_bytes and deployment.kv_copies == 1


TWO_HEADS = '{"model_type": "qwen3", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 32}'


def unlike(
    tmp_path: Path, far: int, home: int, config: str = TWO_HEADS, **replacements: str
) -> PlannedDeployment:
    """A model, mostly of 3 layers and two KV heads of 32, on so many ranks of either side."""
    (tmp_path / "config.json").write_text(config)
    text = replaced("published: internal-1t", "config: config.json")
    for ranks, count in ((far, "4\n"), (home, "8\n")):
        text = text.replace(
            f"    instance_count: {count}", f"    instance_count: {count}    tensor_parallel: {ranks}\n"
        )
    for old, new in replacements.items():
        text = text.replace(old, new)
    return planned(tmp_path, text)


@pytest.mark.parametrize(
    ("far", "home", "held_copies"),
    [(8, 8, 4), (8, 4, 4), (1, 8, 4), (8, 1, 4), (2, 1, 1), (2, 2, 1)],
)
def test_full_attention_crosses_once_whatever_ranks_hold(
    tmp_path: Path, far: int, home: int, held_copies: int
) -> None:
    deployment = unlike(tmp_path, far, home)
    token_bytes = 3 * 2 * 2 * 32 * 2
    assert deployment.sent_model.token_bytes == token_bytes
    assert deployment.kv_model.token_bytes == held_copies * token_bytes
    assert (deployment.wire_model is not None) == (held_copies != 1)
    assert deployment.kv_copies == 1
    problem = problem_of(deployment)
    assert problem.kv_bytes(np.array([1000.0]))[0] == 1000 * token_bytes
    assert problem.streamed_token_bytes == token_bytes
    scenario = scenario_of(deployment)
    assert scenario.sent_model == deployment.sent_model and scenario.kv_model == deployment.kv_model


def test_ranks_that_no_heads_can_be_divided_among_are_wrong_on_either_side(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"clusters\[1\]\.tensor_parallel: .*give the tensor_parallel"):
        unlike(tmp_path, 8, 3)


def test_the_pace_of_mapping_counts_between_unlike_ranks_alone(tmp_path: Path) -> None:
    mapped = {"bandwidth: 100 Gbit/s}": "bandwidth: 100 Gbit/s, mapping_bandwidth: 20 Gbit/s}"}
    for home, limit in ((4, 20e9), (8, math.inf)):
        deployment = unlike(tmp_path, 8, home, **mapped)
        assert problem_of(deployment).links[0].transfer_limit_bits_per_s == limit
        assert scenario_of(deployment).links[0].transfer_limit_bits_per_s == limit
    assert problem_of(unlike(tmp_path, 8, 4)).links[0].transfer_limit_bits_per_s == math.inf


def test_windows_cross_to_each_rank_that_keeps_them(tmp_path: Path) -> None:
    """Each link by its own target; the plan notes how many times as much that is."""
    more = "  - {source: east, target: home, bandwidth: 100 Gbit/s}\n"
    other = (
        GOOD.split("  - name: home")[1].split("links:")[0].replace("8\n", "8\n    tensor_parallel: 1\n", 1)
    )
    windows = '"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2'
    deployment = unlike(
        tmp_path,
        8,
        4,
        config='{"model_type": "gpt_oss", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, '
        f"{windows}}}",
        **{"links:\n": f"  - name: away{other}links:\n", more: f"{more}{more.replace('home', 'away')}"},
    )
    token_bytes = 2 * 2 * 32 * 2
    sent = [deployment.sent_over(link.name) for link in deployment.links]
    assert [each.token_bytes for each in sent] == [token_bytes] * 2
    assert [each.window_bytes for each in sent] == [2 * 128 * token_bytes, 128 * token_bytes]
    problem = problem_of(deployment)
    for link, each in zip(deployment.links, sent, strict=True):
        assert problem.kv_bytes_over(link.name)(np.array([1000.0])) == [each.kv_bytes(1000)]
    assert deployment.kv_copies == sent[0].compared_bytes() / sent[1].compared_bytes() > 1


RUN = {
    "a published model": (GOOD, "3: model.published: is enough to plan with, not to run; give path"),
    "counted instances": (
        replaced("published: internal-1t", "path: m"),
        "8: clusters[0].instance_count: is enough to plan with, not to run; list the cluster's instances",
    ),
    "no served name": (LIVE.replace("served_name: m, ", ""), "2: model.served_name: is missing"),
    "no length": (LIVE.replace(", max_model_len: 32768", ""), "2: model.max_model_len: is missing"),
    "empty length": (LIVE.replace("32768", ""), "2: model.max_model_len: must not be empty"),
}


@pytest.mark.parametrize("text, message", RUN.values(), ids=RUN.keys())
def test_what_can_only_be_planned_is_not_run(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(DeploymentError) as raised:
        load_deployment(path)
    assert message in str(raised.value)


BAD = {
    "negative bandwidth": (
        replaced("100 Gbit/s", "-5"),
        '17: links[0].bandwidth: -5 is no bandwidth; write for example "60 Mbit/s"',
    ),
    "bandwidth without a unit": (
        replaced("100 Gbit/s", "25"),
        '17: links[0].bandwidth: 25 would be 25 bit/s; write the unit, for example "25 Gbit/s"',
    ),
    "ranks that there are no GPUs for": (
        replaced("    gpus_per_instance: 8", "    tensor_parallel: 16"),
        "9: clusters[0].tensor_parallel: 16 ranks need as many GPUs, but an instance has 8",
    ),
    "ranks of instances that say it themselves": (
        LIVE.replace("path: m", "published: internal-1t").replace(
            "    instances:\n      - {name: e0", "    tensor_parallel: 8\n    instances:\n      - {name: e0"
        ),
        "8: clusters[0].tensor_parallel: goes with instance_count; give it to each instance here",
    ),
    "a statistic that there is not": (
        replaced("tokens_per_s: 40", "tokens_per_s: 40\n  ttft_statistic: p99"),
        '23: slo.ttft_statistic: must be one of "mean", "p90", not "p99"',
    ),
    "unknown field": (
        replaced("instance_count: 8", "instances_count: 8"),
        '14: clusters[1].instances_count: is no known field; did you mean "instance_count"?',
    ),
    "unknown field of the lengths": (
        replaced("mu: 9.9", "mean: 9.9"),
        "19: workload.lengths.mean: is no known field; known here are mu, sigma, low, high, distribution",
    ),
    "link to a missing cluster": (
        replaced("target: home", "target: hom"),
        '17: links[0].target: there is no cluster "hom"; the clusters are east, home',
    ),
    "unknown model": (replaced("published: internal-1t", "published: gpt-9"), "3: model.published: "),
    "unknown profile": (
        replaced("profile: internal-1t-h20\n", "profile: internal-1t-h21\n"),
        '15: clusters[1].profile: there is no profile "internal-1t-h21"; did you mean',
    ),
    "missing profile file": (
        replaced("profile: internal-1t-h20\n", "profile: none.yaml\n"),
        "none.yaml: there is no such profile file",
    ),
    "no profile": (replaced("    profile: internal-1t-h20\n", ""), "11: clusters[1]: has no profile, so"),
    "profile of another size": (
        replaced("gpus_per_instance: 8", "gpus_per_instance: 4"),
        "9: clusters[0].gpus_per_instance: instances have 4 GPUs, but profile",
    ),
    "profile of another model": (
        replaced("published: internal-1t", "published: kimi-k2"),
        '10: clusters[0].profile: "internal-1t-h200" is how fast internal-1t is, but model.published is kimi-k2',
    ),
    "neither instances nor a count": (
        replaced("    instance_count: 4\n", ""),
        "5: clusters[0]: needs either instances (servers to start) or instance_count (to plan with); neither",
    ),
    "no instances": (
        replaced("instance_count: 4", "instance_count: 0"),
        "8: clusters[0].instance_count: must be greater than 0, not 0",
    ),
    "two models": (
        replaced("published: internal-1t", "published: internal-1t\n  config: m"),
        "2: model: needs either path (a checkpoint directory), trained",
    ),
    "cache that the model does not have": (
        replaced("published: internal-1t", "published: internal-1t\n  kv_cache_dtype: fp8_ds_mla"),
        "4: model.kv_cache_dtype: fp8_ds_mla is a layout of sparse MLA (deepseek_v32, glm_moe_dsa, deepseek_v4, "
        "deepseek_v41), not of model_type",
    ),
    "made model": (
        replaced("published: internal-1t", "tiny: qwen3"),
        "3: model.tiny: a made model has no published speed",
    ),
    "config that is not there": (
        replaced("published: internal-1t", "config: nowhere"),
        "nowhere/config.json: there is no such file",
    ),
    "no workload": (
        GOOD[: GOOD.index("workload:")] + GOOD[GOOD.index("slo:") :],
        "1: workload: is missing; say how long prompts and answers are",
    ),
    "empty workload": (
        GOOD[: GOOD.index("workload:")] + "workload:\n",
        "18: workload: must be a mapping",
    ),
    "no output length": (
        replaced("  output_tokens: 1024\n", ""),
        "18: workload.output_tokens: is missing; give the mean length of answers",
    ),
    "unknown distribution": (
        replaced("distribution: lognormal", "distribution: normal"),
        '19: workload.lengths.distribution: must be one of "lognormal", "uniform", "fixed", "empirical", "trace"',
    ),
    "distribution that lacks a number": (
        replaced(", sigma: 1", ""),
        "19: workload.lengths.sigma: is missing",
    ),
    "number of another distribution": (
        replaced("sigma: 1", "sigma: 1, tokens: 5"),
        "19: workload.lengths.tokens: is no known field; known here are mu, sigma, low, high, distribution",
    ),
    "range upside down": (
        replaced("low: 128, high: 131072", "low: 4096, high: 128"),
        "19: workload.lengths.high: 128 must be greater than low (4096)",
    ),
    "no spread": (
        replaced("sigma: 1", "sigma: 0"),
        "19: workload.lengths.sigma: must be greater than 0, not 0",
    ),
    "weights that don't fit": (
        replaced(
            "{distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}",
            "{distribution: empirical, lengths: [1, 2], weights: [1]}",
        ),
        "19: workload.lengths.weights: has 1 entries for 2 lengths; give one for each",
    ),
    "weights of nothing": (
        replaced(
            "{distribution: lognormal, mu: 9.9, sigma: 1, low: 128, high: 131072}",
            "{distribution: empirical, lengths: [1, 2], weights: [0, 0]}",
        ),
        "19: workload.lengths.weights: are all 0; at least one must be above 0",
    ),
    "all prefixes hit": (
        replaced("output_tokens: 1024", "output_tokens: 1024\n  prefix_hit_ratio: 1"),
        "21: workload.prefix_hit_ratio: must be less than 1, not 1",
    ),
    "overload": (
        replaced("output_tokens: 1024", "output_tokens: 1024\n  load: 1.2"),
        "21: workload.load: must be less than 1, not 1.2",
    ),
    "no slo": (
        replaced("slo:\n  tokens_per_s: 40\n", ""),
        "1: slo: needs tokens_per_s (or tpot_s): without it there is no limit",
    ),
    "speed given twice": (
        replaced("tokens_per_s: 40", "tokens_per_s: 40\n  tpot_s: 0.03"),
        "22: slo.tokens_per_s: is the inverse of slo.tpot_s; keep one of them",
    ),
    "price of bytes by another name": (
        replaced("h200: 2", "egress: 2"),
        "the clusters have h200, h20; bytes are priced by egress_per_gb",
    ),
    "price of what isn't there": (
        replaced("h200: 2", "h100: 2"),
        "24: prices.h100: no cluster has this hardware; the clusters have h200, h20",
    ),
    "price that is missing": (
        replaced("  h200: 2\n", ""),
        '7: clusters[0].hardware: there is no price for "h200"; add it to prices',
    ),
    "negative price": (replaced("h200: 2", "h200: -2"), "24: prices.h200: must be greater than 0, not -2"),
    "egress that is paid for": (
        replaced("  h20: 1.0", "  h20: 1.0\n  egress_per_gb: -0.1"),
        "26: prices.egress_per_gb: must be at least 0, not -0.1",
    ),
    "price of egress alone": (
        replaced("  h200: 2\n  h20: 1.0", "  egress_per_gb: 0.02"),
        '7: clusters[0].hardware: there is no price for "h200"; add it to prices',
    ),
    "price of egress over a link alone": (
        replaced("bandwidth: 100 Gbit/s", "bandwidth: 100 Gbit/s, egress_per_gb: 1").replace(
            "prices:\n  h200: 2\n  h20: 1.0\n", ""
        ),
        '7: clusters[0].hardware: there is no price for "h200"; add it to prices',
    ),
    "nothing decodes": (
        replaced("kind: pd", "kind: prfaas"),
        '4: clusters: nothing decodes; add a cluster of kind "pd"',
    ),
    "no link": (
        replaced("links:\n  - {source: east, target: home, bandwidth: 100 Gbit/s}\n", ""),
        '5: clusters[0]: no link leads from "east"',
    ),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD.keys())
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DeploymentError) as raised:
        planned(tmp_path, text)
    said = str(raised.value)
    assert said.startswith(str(tmp_path / "plan.yaml"))
    assert message in said
    assert "\n" not in said


def test_a_config_without_layer_types_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64,'
        ' "layer_types": ["full_attention"]}'
    )
    with pytest.raises(
        DeploymentError, match=r"3: model\.config: .*config\.json: layer_types must be a list of 4"
    ):
        planned(tmp_path, replaced("published: internal-1t", "config: config.json"))


@pytest.mark.parametrize(
    "field, number, read",
    [
        ("links[0].bandwidth", 5e9, lambda d: d.links[0].bandwidth_bits_per_s),
        ("links[east->home].bandwidth", 5e9, lambda d: d.links[0].bandwidth_bits_per_s),
        ("clusters[home].instance_count", 3.0, lambda d: d.clusters[1].instance_count),
        ("slo.ttft_s", 4.0, lambda d: d.slo.ttft_s),
        ("workload.lengths.mu", 9.0, lambda d: d.workload.lengths.mu),
        ("workload.prefix_hit_ratio", 0.5, lambda d: d.workload.prefix_hit_ratio),
        ("slo.tokens_per_s", 20, lambda d: d.slo.tokens_per_s),
        ("prices.h200", 3.5, lambda d: d.prices["h200"]),
    ],
)
def test_numbers_can_be_changed(tmp_path: Path, field: str, number: float, read) -> None:  # type: ignore[no-untyped-def]
    deployment = planned(tmp_path, GOOD, **{field: number})
    assert read(deployment) == number
    assert read(planned(tmp_path, GOOD)) != number


def test_an_entry_s_name_may_have_dots(tmp_path: Path) -> None:
    text = GOOD.replace("east", "east.eu")
    assert (
        planned(tmp_path, text, **{"clusters[east.eu].instance_count": 3.0}).clusters[0].instance_count == 3
    )
    assert planned(tmp_path, text, **{"links[east.eu->home].bandwidth": 5e9}).links[0].name == "east.eu->home"


@pytest.mark.parametrize(
    "field, number, message",
    [
        ("links[3].bandwidth", 1, "links[3].bandwidth: can't be changed: the list has only 1 entry"),
        ("links[a->b].bandwidth", 1, 'nothing there is named "a->b"; there are east->home'),
        ("clusters.bandwidth", 1, "clusters.bandwidth: can't be changed: clusters is a list"),
        ("nothing.here", 1, 'nothing.here: can\'t be changed: the file has no "nothing"'),
        ("workload", 1, "it is no number but a whole section"),
        ("links[0].bandwidth; x", 1, "is no field's name"),
        ("workload[0].x", 1, '"workload" is no list in the file'),
        ("link[0].bandwidth", 1, '"link" is no list in the file; did you mean "links"?'),
        ("slo.speed", 1, "slo.speed: is no known field"),
        ("links[0].bandwidth", -1, "17: links[0].bandwidth: -1 is no bandwidth"),
        (
            "links[0].bandwidth",
            25,
            '17: links[0].bandwidth: 25 would be 25 bit/s; write the unit, for example "25 Gbit/s"',
        ),
        (
            "clusters[east].instance_count",
            1.5,
            "8: clusters[0].instance_count: must be a whole number, not 1.5",
        ),
    ],
)
def test_changes_that_make_no_sense(tmp_path: Path, field: str, number: float, message: str) -> None:
    with pytest.raises(DeploymentError) as raised:
        planned(tmp_path, GOOD, **{field: number})
    assert message in str(raised.value)


def test_egress_has_a_price_for_all_links_and_for_each() -> None:
    path = EXAMPLES / "multi.yaml"
    assert {link.egress_per_gb for link in load_planned(path).links} == {0.0}
    both = {"prices.egress_per_gb": 0.02, "links[north->osaka].egress_per_gb": 0.0}
    deployment = load_planned(path, changes=both)
    assert [link.egress_per_gb for link in deployment.links] == [0.02, 0.02, 0.02, 0.0]
    assert deployment.prices == {"h200": 2, "h20": 1}


def test_a_file_to_run_has_them_too_and_says_what_an_instance_costs(tmp_path: Path) -> None:
    path = tmp_path / "live.yaml"
    path.write_text(LIVE + "prices: {h200: 2, h20: 1, egress_per_gb: 0.02}\n")
    deployment = load_deployment(path)
    assert {link.egress_per_gb for link in deployment.links} == {0.02}
    assert [cluster.instance_price_per_hour for cluster in deployment.clusters] == [16.0, 8.0]
    path.write_text(LIVE + "prices: {h200: 2, egress_per_gb: 0.02}\n")
    with pytest.raises(DeploymentError, match='there is no price for "h20"; add it to prices'):
        load_deployment(path)


def test_a_pd_cluster_that_was_never_timed_decoding(tmp_path: Path) -> None:
    profile = load_profile("internal-1t-h20")
    save_profile(replace(profile, name="prefill-only", decode=None), tmp_path / "prefill-only.yaml")
    with pytest.raises(DeploymentError) as error:
        planned(tmp_path, replaced("profile: internal-1t-h20\n", "profile: prefill-only.yaml\n"))
    assert str(error.value).endswith(
        '15: clusters[1].profile: "prefill-only" has no decode times, which a cluster of kind "pd" needs'
    )


@pytest.mark.parametrize(
    ("said", "kills_per_hour"),
    [
        ("", 0.0),
        ("preemptible: false", 0.0),
        ("preemptible: true", 1.0),
        ("preemptible: true\n    kills_per_hour: 6", 6.0),
    ],
)
def test_how_often_instances_are_taken_away(tmp_path: Path, said: str, kills_per_hour: float) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(GOOD.replace("hardware: h200", f"hardware: h200\n    {said}"))
    planned = load_planned(path)
    assert [cluster.kills_per_hour for cluster in planned.clusters] == [kills_per_hour, 0.0]
    scenario = scenario_of(planned, policy="tilted")
    assert [cluster.kills_per_hour for cluster in scenario.clusters] == [kills_per_hour, 0.0]
