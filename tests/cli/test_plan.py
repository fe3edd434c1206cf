"""`prfaas plan` as a user types it: the paper's case study, the other examples, sweeps, plots and bad files."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli import main as cli
from prfaas.core.latency.files import load_profile, save_profile
from prfaas.core.latency.profile import Evidence
from prfaas.core.workload.requests import read_requests

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER = EXAMPLES / "paper.yaml"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    assert run(monkeypatch, "plan", *args, "--json") == 0
    return json.loads(capsys.readouterr().out)


def changed(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = PAPER.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    return path


def test_the_case_study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 6 of the paper, within what the issue asks for."""
    plan = planned(monkeypatch, capsys, PAPER)
    optimum = plan["optimum"]
    assert plan["lambda_max_at_mean_length"] == pytest.approx(3.24, rel=0.02)
    assert optimum["lambda_max"] == pytest.approx(3.24, rel=0.02)
    assert (optimum["n_prefill"], optimum["n_decode"]) == (3, 5)
    assert optimum["threshold_tokens"] == pytest.approx(19_400, rel=0.03)
    assert optimum["offloaded_fraction"] == pytest.approx(0.496, abs=0.01)
    assert optimum["theta_prfaas"] == pytest.approx(1.61, rel=0.03)
    assert optimum["theta_pd_p"] == pytest.approx(1.64, rel=0.02)
    assert optimum["theta_pd_d"] == pytest.approx(3.91, rel=0.02)
    assert 12e9 <= optimum["egress_bits_per_s"] <= 13.5e9
    assert optimum["mean_long_tokens"] == pytest.approx(44 * 1024, rel=0.01)
    assert optimum["mean_short_tokens"] == pytest.approx(10_224, rel=0.01)
    assert optimum["ttft_mean_s"] == pytest.approx(2.22, rel=0.03)
    assert optimum["ttft_p90_s"] == pytest.approx(3.51, rel=0.03)
    homogeneous = plan["homogeneous"]
    assert plan["homogeneous_at_mean_length"] == pytest.approx(2.11, rel=0.02)
    assert homogeneous["lambda_max"] == pytest.approx(2.024, rel=1e-3)
    assert (homogeneous["n_prefill"], homogeneous["n_decode"]) == (9, 3)
    assert plan["ratio_to_homogeneous"] == pytest.approx(1.54, rel=0.03)
    naive_ratio = plan["naive"]["lambda_max"] / homogeneous["lambda_max"]
    assert naive_ratio == pytest.approx(1.16, rel=0.04)
    assert plan["equal_cost_ratio"] == pytest.approx(1.15, abs=0.04)
    left = {(each["kind"], each["name"]): each["rate_after_roles"] for each in plan["survival"]}
    assert left["link", "east->home"] == left["cluster", "east"] == pytest.approx(plan["fleet"]["lambda_max"])


def test_a_dense_model_is_bound_by_the_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(monkeypatch, capsys, EXAMPLES / "dense.yaml")
    assert plan["network_bound"]
    assert plan["verdict"].startswith("Network-bound")
    assert plan["equal_cost_ratio"] < 1


def test_several_clusters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(monkeypatch, capsys, EXAMPLES / "multi.yaml")
    links = {link["name"]: link for link in plan["optimum"]["links"]}
    assert len(links) == 4
    assert all(
        link["egress_bits_per_s"] <= link["bandwidth_bits_per_s"] * (1 + 1e-6) for link in links.values()
    )
    assert sum(route["fraction"] for route in plan["optimum"]["routes"]) == pytest.approx(1)
    assert {roles["cluster"] for roles in plan["optimum"]["roles"]} == {"tokyo", "osaka"}


def test_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", PAPER) == 0
    out = capsys.readouterr().out
    assert out.startswith("Balanced: 3.2 requests/s")
    for text in (
        "optimum",
        "homogeneous",
        "naive",
        "19,579",
        "east->home",
        "binds",
        "TTFT mean / P90",
        "estimate",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow("draws with matplotlib")
def test_plots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = planned(monkeypatch, capsys, PAPER, "--plot", tmp_path / "plots")
    names = [Path(path).name for path in document["plots"]]
    assert names == [f"paper-{plot}.svg" for plot in ("kv-throughput", "split", "threshold")]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(names)


def test_plots_where_no_folder_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "plan", PAPER, "--plot", tmp_path / "file" / "plots") == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.slow("plans at many points")
def test_a_sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = "links[east->home].bandwidth=1 Gbit/s:100 Gbit/s:3"
    document = planned(monkeypatch, capsys, PAPER, "--sweep", sweep, "--plot", tmp_path)
    points = document["points"]
    assert [point["value"] for point in points] == pytest.approx([1e9, 1e10, 1e11])
    rates = [point["optimum"]["lambda_max"] for point in points]
    thresholds = [point["optimum"]["threshold_tokens"] for point in points]
    assert rates == sorted(rates)
    assert thresholds == sorted(thresholds, reverse=True)
    assert points[-1]["optimum"]["lambda_max"] == pytest.approx(3.2, rel=1e-3)
    assert (tmp_path / "paper-sweep-links-east-home-bandwidth.svg").is_file()
    assert run(monkeypatch, "plan", PAPER, "--sweep", sweep) == 0
    assert "10 Gbit/s" in capsys.readouterr().out


def test_a_sweep_of_instances_takes_whole_numbers_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = planned(monkeypatch, capsys, PAPER, "--sweep", "clusters[east].instance_count=1:4:9")
    assert [point["value"] for point in document["points"]] == [1, 2, 3, 4]


@pytest.mark.slow("plans at many points")
def test_a_sweep_over_a_price_has_a_break_even(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = "prices.egress_per_gb=0:0.01:6"
    document = planned(monkeypatch, capsys, PAPER, "--sweep", sweep, "--plot", tmp_path)
    ratios = [point["equal_cost_ratio"] for point in document["points"]]
    assert ratios[0] > 1 > ratios[-1]
    assert document["break_even"] == pytest.approx(document["points"][0]["egress_break_even_per_gb"], rel=0.1)
    assert (tmp_path / "paper-sweep-prices-egress-per-gb.svg").is_file()
    assert run(monkeypatch, "plan", PAPER, "--sweep", sweep) == 0
    assert "Break-even: a price of a GB over any link of 0.00" in capsys.readouterr().out


@pytest.mark.slow("plans at many points")
def test_a_target_for_the_ttft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = changed(tmp_path, ("ttft_s: 12", "ttft_s: 4.5"))
    plan = planned(monkeypatch, capsys, path)
    assert plan["keeps_target"] and plan["ttft_estimate"]["p90_s"] <= 4.5
    assert plan["binding"][-1] == "TTFT target"
    assert (
        plan["optimum"]["lambda_max"] < plan["lambda_max_without_target"] == pytest.approx(3.1995, rel=1e-4)
    )
    assert run(monkeypatch, "plan", path) == 0
    out = capsys.readouterr().out
    assert out.startswith("Latency-bound: ")
    for text in ("fleet you have", "req/s, P90 in 4.5 s", "missed"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", ["paper", "dense", "multi"])
def test_the_table_binds_what_the_verdict_names(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", EXAMPLES / f"{name}.yaml") == 0
    lines = capsys.readouterr().out.splitlines()
    bound = [line.split("  ")[0] for line in lines if line.endswith(" binds")]
    verdict = " ".join(lines[: lines.index("")])
    listed = verdict.split("limited by ")[1].split(";")[0].split(". ")[0]
    assert bound and all(stage in listed for stage in bound[:3])
    assert len(bound) <= 3 or f"{len(bound) - 3} more" in listed


@pytest.mark.parametrize(
    "sweep, message",
    [
        ("bandwidth", "write FIELD=FROM:TO:COUNT"),
        ("links[0].bandwidth=1:2", "write FIELD=FROM:TO:COUNT"),
        ("links[0].bandwidth=1 GB/s:2 Gbit/s:5", "'1 GB/s' is no bandwidth"),
        ("workload.load=a:0.9:5", '"a" is no number'),
        ("links[0].bandwith=1 Gbit/s:9 Gbit/s:5", "is a bandwidth, but links[0].bandwith is none"),
        ("workload.load=0.1:0.9:1", "the count must be a whole number from 2 to 1000"),
        ("workload.load=0.1:0.9:1e9", "the count must be a whole number from 2 to 1000"),
        ("workload.load=0.9:0.1:5", "the first value must be below the second"),
        ("workload.load=0.1:inf:5", '"inf" is no number'),
        ("workload.load=0.5:2:4", "workload.load: must be less than 1, not 2"),
        ("links[7].bandwidth=1e9:2e9:3", "the list has only 1 entry"),
        ("slo.speed=1:2:3", "slo.speed: is no known field"),
        ("links[0].bandwidth=1:100:5", "links[0].bandwidth: 1 would be 1 bit/s; write the unit"),
        (
            "routing.threshold_tokens=1e3:1e4:3",
            'the file has no "routing"',
        ),
        ("links[0].connections=1:8:3", "a plan does not depend on links[0].connections"),
        ("bandwidth=1 Gbit/s:2 Gbit/s:3", "bandwidth: is no known field"),
    ],
)
def test_bad_sweeps(
    sweep: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("planned before it was said")

    monkeypatch.setattr("prfaas.core.planner.make_plan", too_late)
    assert run(monkeypatch, "plan", PAPER, "--sweep", sweep) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("prfaas: ")
    assert captured.err.count("\n") == 1


BAD = {
    "negative bandwidth": (
        [("bandwidth: 100 Gbit/s", "bandwidth: -100")],
        'links[0].bandwidth: -100 is no bandwidth; write for example "60 Mbit/s"',
    ),
    "unknown field": (
        [("output_tokens: 1024", "output_token: 1024")],
        'workload.output_token: is no known field; did you mean "output_tokens"?',
    ),
    "profile that doesn't cover the lengths": (
        [("high: 131072", "high: 200000")],
        'clusters[0].profile: profile "internal-1t-h200" has prefill times for 128 to 131072 tokens, not for 200000',
    ),
    "link to a missing cluster": (
        [("target: home", "target: away")],
        'links[0].target: there is no cluster "away"; the clusters are east, home',
    ),
    "unknown model": (
        [("published: internal-1t", "published: gpt-9")],
        'there is no published model "gpt-9"',
    ),
    "unknown profile": (
        [("profile: internal-1t-h20\n", "profile: h21\n")],
        'clusters[1].profile: there is no profile "h21"',
    ),
    "config.json that is missing": (
        [("published: internal-1t", "config: no/config.json")],
        "model.config: ",
    ),
    "speed that no batch keeps": (
        [("tokens_per_s: 40", "tokens_per_s: 400")],
        "and a step of 20 takes 25 ms, over the limit of 2.5 ms",
    ),
    "no SLO": ([("  tokens_per_s: 40\n", "")], "slo: needs tokens_per_s (or tpot_s)"),
    "lengths upside down": (
        [("low: 128", "low: 200000")],
        "workload.lengths.high: 131072 must be greater than low",
    ),
    "nothing decodes": ([("kind: pd\n", "kind: prfaas\n")], 'nothing decodes; add a cluster of kind "pd"'),
    "no instances": ([("instance_count: 8", "instance_count: 0")], "must be greater than 0, not 0"),
    "price that is missing": ([("  h200: 2.0\n", "")], 'there is no price for "h200"; add it to prices'),
    "trace that is missing": (
        [
            (
                "{distribution: lognormal, mu: 9.90, sigma: 1.00, low: 128, high: 131072}",
                "{distribution: trace, path: none.jsonl}",
            )
        ],
        "none.jsonl",
    ),
    "no YAML": ([("clusters:", "clusters: [")], "is no valid YAML"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD.keys())
def test_a_bad_deployment_is_one_sentence_and_exit_code_2(
    changes: list[tuple[str, str]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = changed(tmp_path, *changes)
    assert run(monkeypatch, "plan", path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"prfaas: {path}:")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_config_without_layer_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = changed(tmp_path, ("published: internal-1t", "config: config.json"))
    assert run(monkeypatch, "plan", path) == 2
    assert "hybrid_layer_pattern must be a list with one entry per layer" in capsys.readouterr().err


def test_malformed_lines_of_a_trace_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 500, "output_length": 5, "hash_ids": [1]}\nno\n'
    )
    lengths = "{distribution: lognormal, mu: 9.90, sigma: 1.00, low: 128, high: 131072}"
    path = changed(tmp_path, (lengths, "{distribution: trace, path: t.jsonl, format: mooncake}"))
    assert run(monkeypatch, "plan", path) == 2
    assert "t.jsonl:2: " in capsys.readouterr().err


TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize(
    "name",
    [
        "azure_2023_code.csv",
        "azure_2023_conv.csv",
        "mooncake_conversation.jsonl",
        "servegen_reason_52.tar.gz",
    ],
)
def test_every_command_plans_for_a_trace_of_any_format(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = TRACES / name
    trace = read_requests(path)
    assert run(monkeypatch, "plan", PAPER, "--trace", path, "--json") == 0
    captured = capsys.readouterr()
    assert f"Planned for the {len(trace):,} requests of the trace" in captured.err
    assert json.loads(captured.out)["optimum"]["lambda_max"] > 3.24
    assert run(monkeypatch, "bandwidth", "internal-1t", "--gpus", 32, "--trace", path, "--json") == 0
    mean = json.loads(capsys.readouterr().out)["mean_tokens"]
    assert mean == pytest.approx(trace.uncached.mean())
    args = ("simulate", PAPER, "--trace", path, "--requests", 60, "--json")
    assert run(monkeypatch, *args) == 0
    arrivals = json.loads(capsys.readouterr().out)["arrivals"]
    assert arrivals["mean_input_tokens"] == pytest.approx(trace.lengths.mean())


def test_prompts_beyond_a_profile_are_planned_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their times go on; so a plan has less to give, the more of them there are."""
    rates = []
    for longest in (131_072, 400_000):
        rows = [f"{n},{tokens},100" for n, tokens in enumerate((64, 1000, 30_000, longest))]
        (tmp_path / "t.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
        lengths = "{distribution: lognormal, mu: 9.90, sigma: 1.00, low: 128, high: 131072}"
        path = changed(tmp_path, (lengths, "{distribution: trace, path: t.csv}"))
        assert run(monkeypatch, "plan", path, "--json") == 0
        captured = capsys.readouterr()
        rates.append(json.loads(captured.out)["optimum"]["lambda_max"])
    assert "25.00% of the prompts are shorter and 25.00% longer than the 128 to 131,072" in captured.err
    assert rates[1] < rates[0] / 2


@pytest.mark.slow("plans for each of the error bars")
def test_a_verdict_on_estimates_says_what_their_error_bars_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An H20 that is estimated beside an H200 that is not; of other hardware nothing is said."""
    assert run(monkeypatch, "plan", PAPER) == 0
    assert capsys.readouterr().err == ""
    profile = load_profile("internal-1t-h20")
    for band, cases in (((0.9, 1.1), "3 of 3"), ((0.3, 1.1), "1 of 3")):
        save_profile(replace(profile, evidence=Evidence("estimated", band=band)), tmp_path / "h20.yaml")
        path = changed(tmp_path, ("profile: internal-1t-h20\n", "profile: h20.yaml\n"))
        assert run(monkeypatch, "plan", path) == 0
        told = " ".join(capsys.readouterr().err.split())
        assert "h20 by estimate, h200 by measurement" in told
        assert f"worth it in {cases} cases" in told
        assert ("what decides most is how fast h20 is" in told) is (cases != "3 of 3")


@pytest.mark.parametrize("command", ["up", "serve", "key", "engine"])
def test_a_file_for_planning_is_not_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [command, PAPER] + (["x"] if command == "engine" else [])
    assert run(monkeypatch, *args) == 2
    assert "model.published: is enough to plan with, not to run" in capsys.readouterr().err


@pytest.mark.slow("plans at many points")
def test_the_case_study_takes_seconds_at_most_after_imports() -> None:
    code = (
        "import sys, time; sys.argv = ['prfaas', 'plan', sys.argv[1], '--json']\n"
        "import prfaas.cli.main, prfaas.core.deployment, prfaas.core.planner, scipy.optimize, scipy.special\n"
        "start = time.process_time()\n"
        "try: prfaas.cli.main.main()\n"
        "except SystemExit: pass\n"
        "print(time.process_time() - start, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PAPER)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(done.stdout)["optimum"]["n_prefill"] == 3
    # CPU time; a fifth of a second is usual.
    assert float(done.stderr.splitlines()[-1]) < 5.0


@pytest.mark.parametrize("command", ["plan", "reproduce"])
def test_help_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert f"Example: prfaas {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["paper", "dense", "multi"])
def test_the_guide_shows_what_is_printed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdict and throughput row in docs/guides/plan.md are the command's: numbers there don't go stale unseen."""
    assert run(monkeypatch, "plan", EXAMPLES / f"{name}.yaml") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    guide = (EXAMPLES.parent / "docs" / "guides" / "plan.md").read_text()
    (throughput,) = (line for line in lines if line.startswith("throughput (req/s)"))
    verdict = "\n".join(lines[: lines.index("")])
    if name == "multi":
        # Which of its links would be needed most without a limit depends on the vertex at which the solver ends.
        verdict = verdict.partition("; ")[2].partition("\n")[2]
    assert verdict and verdict in guide
    assert throughput in guide


def test_the_guide_shows_what_an_fp8_cache_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "model:\n  published: minimax-m2.5\n"
    guide = (EXAMPLES.parent / "docs" / "guides" / "plan.md").read_text()
    assert f"```yaml\n{said}  kv_cache_dtype: fp8\n```" in guide
    text = (EXAMPLES / "dense.yaml").read_text()
    assert said in text
    (tmp_path / "dense.yaml").write_text(text.replace(said, f"{said}  kv_cache_dtype: fp8\n"))
    assert run(monkeypatch, "plan", tmp_path / "dense.yaml") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(lines[: lines.index("")]) in guide
    assert "dense: minimax-m2.5, KVCache in fp8" in lines
    (threshold,) = (line.split()[2] for line in lines if line.startswith("threshold (tokens)"))
    assert f"The threshold falls from 37,018 to {threshold} tokens" in guide
