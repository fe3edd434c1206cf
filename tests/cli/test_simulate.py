"""`prfaas simulate` as a user types it."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prfaas.cli import main as cli

EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER = EXAMPLES / "paper.yaml"
BURST = EXAMPLES / "traces" / "mooncake_burst.jsonl.gz"
FIELDS = {
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "throughput_rps",
    "goodput_rps",
    "egress_bits_per_s",
    "offloaded_fraction",
    "stable",
}


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prfaas", "simulate", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object, requests: int = 300
) -> Any:
    assert run(monkeypatch, *args, "--requests", requests, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_fields_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(monkeypatch, capsys, PAPER, "--load", 0.9, "--compare", "paper,tilted", "--seed", 3)
    assert found["deployment"] == "paper"
    assert found["load"] == pytest.approx(0.9)
    assert found["lambda_max_rps"] == pytest.approx(3.1995, abs=0.001)
    assert found["rate_rps"] == pytest.approx(0.9 * found["lambda_max_rps"])
    assert (found["seed"], found["requests"]) == (3, 300)
    assert found["arrivals"]["process"] == "poisson"
    assert list(found["policies"]) == ["paper", "tilted"]
    for summary in found["policies"].values():
        assert summary.keys() >= FIELDS
        assert 0 < summary["ttft_p50_s"] <= summary["ttft_p90_s"] <= summary["ttft_p99_s"]
        assert 0 <= summary["offloaded_fraction"] <= 1
        assert summary["stable"] is None  # 300 requests are too few to say


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in (5, 5, 6):
        assert run(monkeypatch, PAPER, "--requests", 300, "--seed", seed, "--json") == 0
        texts.append(capsys.readouterr().out.replace('"seed": 6', '"seed": 5'))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_policy_does_not_depend_on_whom_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = simulated(monkeypatch, capsys, PAPER, "--policy", "tilted", "--link-fluctuation", "0.3:30")
    both = simulated(
        monkeypatch, capsys, PAPER, "--compare", "local_only,tilted", "--link-fluctuation", "0.3:30"
    )
    assert both["policies"]["tilted"] == alone["policies"]["tilted"]


def test_light_load_is_service_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table 6 of the paper: 2.22 s on average, 3.51 s at P90, within what 4,000 random requests can say."""
    found = simulated(
        monkeypatch, capsys, PAPER, "--load", 0.02, "--policy", "static_threshold", requests=4000
    )
    assert found["policies"]["static_threshold"]["ttft_mean_s"] == pytest.approx(2.22, rel=0.04)
    assert found["policies"]["static_threshold"]["ttft_p90_s"] == pytest.approx(3.51, rel=0.05)


def test_a_rate_in_place_of_a_load_and_a_duration_in_place_of_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, PAPER, "--rate", 2, "--duration", 200, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rate_rps"] == 2
    assert found["load"] == pytest.approx(2 / found["lambda_max_rps"])
    assert (found["requests"], found["duration_s"]) == (None, 200)
    (summary,) = found["policies"].values()
    assert 150 < summary["simulated_s"] <= 200


def test_without_a_policy_the_one_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = simulated(monkeypatch, capsys, PAPER, requests=50)
    assert len(default["policies"]) == 1
    path = tmp_path / "local.yaml"
    path.write_text(PAPER.read_text() + "\nrouting: {policy: local_only}\n")
    found = simulated(monkeypatch, capsys, path, requests=50)
    assert list(found["policies"]) == ["local_only"]
    assert found["policies"]["local_only"]["egress_bits_per_s"] == 0


def test_several_seeds_have_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean of what each seed says alone, and half of Student's 95 % interval of three: 4.303 sd / √3."""
    alone = []
    for seed in (4, 5, 6):
        assert run(monkeypatch, PAPER, "--requests", 300, "--seed", seed, "--json") == 0
        alone.append(json.loads(capsys.readouterr().out)["policies"]["tilted"]["ttft_mean_s"])
    assert run(monkeypatch, PAPER, "--requests", 300, "--seed", 4, "--seeds", 3, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    mean, half = document["seeds"]["tilted"]["ttft_mean_s"]
    assert document["policies"]["tilted"]["ttft_mean_s"] == alone[0]
    assert mean == pytest.approx(np.mean(alone))
    assert half == pytest.approx(4.3027 * np.std(alone, ddof=1) / 3**0.5, rel=1e-4)
    assert run(monkeypatch, PAPER, "--requests", 300, "--seeds", 2) == 0
    assert "2 seeds, mean ± half of 95 %" in capsys.readouterr().out


def test_bursts_keep_the_mean_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(monkeypatch, capsys, PAPER, "--rate", 3, "--bursts", requests=50)
    phases = found["arrivals"]["phases"]
    seconds = sum(phase["mean_s"] for phase in phases)
    assert sum(phase["rate_rps"] * phase["mean_s"] for phase in phases) / seconds == pytest.approx(3)
    assert [phase["mean_s"] for phase in phases] == [60, 15]


def test_a_field_of_the_file_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(
        monkeypatch,
        capsys,
        PAPER,
        "--set",
        "links[east->home].bandwidth=2 Gbit/s",
        "--set",
        "clusters[0].instance_count=2",
        requests=50,
    )
    assert found["lambda_max_rps"] < 2.8
    assert found["policies"]["tilted"]["egress_bits_per_s"] <= 2e9


def test_a_trace_with_its_prefixes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(monkeypatch, capsys, PAPER, "--trace", BURST, "--load", 0.5, requests=1200)
    arrivals = found["arrivals"]
    assert (arrivals["process"], arrivals["trace_requests"]) == ("trace", 1000)
    assert arrivals["jitter_s"] == pytest.approx(3, abs=0.01)
    assert arrivals["speed_factor"] == pytest.approx(found["rate_rps"] / (1000 / 279), rel=0.02)
    (summary,) = found["policies"].values()
    assert summary["hit_ratio"] > 0.02
    without = simulated(
        monkeypatch, capsys, PAPER, "--trace", BURST, "--load", 0.5, "--no-caches", requests=1200
    )
    (summary,) = without["policies"].values()
    assert summary["hit_ratio"] == 0


def test_a_csv_trace_with_named_columns_and_a_row_per_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, rows = tmp_path / "own.csv", tmp_path / "rows.csv"
    lines = [f"{number},2026-03-02 09:00:{number:02d},{500 * number + 500},20" for number in range(40)]
    trace.write_text("id,sent at,prompt,answer\n" + "\n".join(lines))
    columns = "arrival=sent at,input=prompt,output=answer"
    args = (
        PAPER,
        "--trace",
        trace,
        "--columns",
        columns,
        "--compare",
        "tilted,local_only",
        "--records",
        rows,
    )
    found = simulated(monkeypatch, capsys, *args, requests=100)
    assert found["arrivals"]["trace_requests"] == 40
    assert found["arrivals"]["mean_input_tokens"] == pytest.approx(500 * 41 / 2)
    with rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["policy"] for row in written] == ["tilted"] * 100 + ["local_only"] * 100
    # The trace again and again, under both policies alike.
    prompts = [int(row["input_tokens"]) for row in written]
    assert prompts[:40] == prompts[40:80] == [500 * number + 500 for number in range(40)]
    assert prompts[:100] == prompts[100:]
    for policy, summary in found["policies"].items():
        times = [
            float(row["ttft_s"]) for row in written if row["policy"] == policy and row["counted"] == "true"
        ]
        assert len(times) == summary["requests"]
        assert sum(times) / len(times) == pytest.approx(summary["ttft_mean_s"])


def test_rows_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.symlink_to(tmp_path / "none" / "rows.csv")
    assert run(monkeypatch, PAPER, "--requests", 10, "--records", rows) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"{rows}: No such file or directory" in said.err


def test_tables_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, PAPER, "--requests", 300, "--compare", "paper,local_only") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("paper: 2.24 requests/s, 0.7 of the planner's Λ_max")
    for word in ("TTFT mean", "TTFT P90", "offloaded", "always", "home decode", "east->home link"):
        assert word in captured.out
    assert "paper: 300 requests in " in captured.err


@pytest.mark.slow("draws with matplotlib")
def test_a_report_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "report"
    found = simulated(monkeypatch, capsys, PAPER, "--report", folder)
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    page = (folder / "index.html").read_text()
    assert page.count("<svg") >= 6
    assert f"{found['policies']['tilted']['offloaded_fraction']:.1%}" in page
    assert "prfaas simulate" in page and "seed 0" in page


BAD = {
    "both rates": (["--load", "0.5", "--rate", "2"], "give --load or --rate, not both"),
    "no load": (["--load", "0"], "--load: must be a number above 0, not 0"),
    "no rate": (["--rate", "nan"], "--rate: must be a number above 0, not nan"),
    "both lengths": (["--requests", "5", "--duration", "5"], "give --requests or --duration, not both"),
    "no duration": (["--duration", "-1"], "--duration: must be seconds above 0, not -1"),
    "nothing arrives": (["--rate", "0.001", "--duration", "1"], "--duration: nothing arrives within 1 s"),
    "unknown policy": (
        ["--policy", "papre"],
        '--policy: there is no policy "papre"; there are paper, tilted',
    ),
    "unknown policies": (
        ["--compare", "paper,"],
        '--compare: there is no policy ""; there are paper, tilted',
    ),
    "a module nobody has": (
        ["--policy", "no.such:Policy"],
        '--policy: policy no.such:Policy: module "no.such" can',
    ),
    "a class nobody has": (
        ["--policy", "math:Policy"],
        '--policy: policy math:Policy: module "math" has no class',
    ),
    "no policy": (
        ["--policy", "fractions:Fraction"],
        "is no policy: it must be a class with a method decide",
    ),
    "no parameter's value": (["--param", "beta"], '--param "beta": write NAME=VALUE'),
    "unknown parameter": (
        ["--compare", "paper,tilted", "--param", "betta=1"],
        '--param: paper and tilted have no parameter "betta"; there are queue_mark: a number, above 0 (0.5); ',
    ),
    "parameter out of bounds": (
        ["--param", "beta=-1"],
        "--param: policy tilted takes for beta a number, at least 0, not -1; its parameters are beta: ",
    ),
    "parameter that is no number": (
        ["--param", "beta=much"],
        "takes for beta a number, at least 0, not much;",
    ),
    "policy twice": (["--compare", "paper,paper"], "--compare: names a policy twice"),
    "both policies": (
        ["--policy", "paper", "--compare", "paper,tilted"],
        "give --policy or --compare, not both",
    ),
    "set without a value": (["--set", "links[0].bandwidth"], "write FIELD=VALUE, for example"),
    "set without a number": (["--set", "slo.tokens_per_s=fast"], '"fast" is no number'),
    "set twice": (["--set", "slo.ttft_s=1", "--set", "slo.ttft_s=2"], "--set: slo.ttft_s is given twice"),
    "set a unit nobody knows": (["--set", "links[0].bandwidth=1 parsec"], "is no bandwidth"),
    "set what is not there": (["--set", "links[3].bandwidth=1e9"], "the list has only 1 entry"),
    "set an unknown field": (["--set", "workload.laod=0.5"], 'did you mean "load"?'),
    "fluctuation": (["--link-fluctuation", "0.3"], '--link-fluctuation "0.3": must be SD:CORRELATION_S'),
    "fluctuation of nothing": (["--link-fluctuation", "0:5"], "must be SD:CORRELATION_S"),
    "fluctuation for ever": (["--link-fluctuation", "0.3:inf"], "must be SD:CORRELATION_S"),
    "memory": (["--caches", "--cache-memory", "lots"], "--cache-memory: 'lots' is no size"),
    "memory of no caches": (["--cache-memory", "5 GiB"], "there are none: give --caches, too"),
    "trace and bursts": (
        ["--trace", str(BURST), "--bursts"],
        "--bursts and --diurnal make up arrivals; a --trace has its own",
    ),
    "bursts by day and night": (["--bursts", "--diurnal", "0.5/60"], "as day and night, not both"),
    "a line that fluctuates in steps": (
        ["--link-fluctuation", "0.3:30", "--bandwidth-steps", "east->home@5=1 Gbit/s"],
        "give --bandwidth-steps or --link-fluctuation, not both",
    ),
    "no trace": (["--trace", "none.jsonl"], "none.jsonl"),
    "columns of no trace": (
        ["--columns", "arrival=a,input=b,output=c"],
        "--format and --columns are of a --trace; there is none",
    ),
    "too few columns": (
        ["--trace", "a.csv", "--columns", "arrival=a"],
        "columns of a trace are named as",
    ),
    "rows of no format": (
        ["--records", "rows.xls"],
        "--records: rows.xls: its name must end in .csv, .csv.gz or .parquet",
    ),
    "rows nowhere": (["--records", "no/rows.csv"], "--records: there is no directory "),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD.keys())
def test_what_can_not_be_is_one_sentence_and_exit_code_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, PAPER, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("prfaas: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_parameters_by_option_and_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(PAPER.read_text() + "\nrouting: {policy: paper, params: {queue_mark: 4}}\n")
    of_file = simulated(monkeypatch, capsys, path)
    by_option = simulated(monkeypatch, capsys, PAPER, "--policy", "paper", "--param", "queue_mark=4")
    assert of_file["policies"] == by_option["policies"]
    assert of_file["params"] == by_option["params"] == {"paper": {"queue_mark": 4}}
    others = simulated(monkeypatch, capsys, PAPER, "--policy", "paper")
    assert others["params"] == {} and others["policies"] != of_file["policies"]
    args = ("--compare", "paper,tilted", "--param", "abundance_queue_s=1", "--param", "fairness=1")
    compared = simulated(monkeypatch, capsys, path, *args)
    assert compared["params"] == {
        "paper": {"queue_mark": 4, "abundance_queue_s": 1},
        "tilted": {"abundance_queue_s": 1, "fairness": 1},
    }


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        (
            "{policy: paper, params: {queue_mark: 0}}",
            "routing.params.queue_mark: policy paper takes for queue_mark",
        ),
        (
            "{policy: paper, params: {mark: 1}}",
            'routing.params.mark: policy paper has no parameter "mark"; its',
        ),
        ("{policy: 'no.such:Policy'}", 'routing.policy: policy no.such:Policy: module "no.such" can'),
    ],
)
def test_a_bad_policy_of_the_file_is_said_with_its_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    routing: str,
    problem: str,
) -> None:
    path = tmp_path / "deployment.yaml"
    text = PAPER.read_text()
    path.write_text(text + f"\nrouting: {routing}\n")
    assert run(monkeypatch, path, "--requests", 10) == 2
    said = capsys.readouterr().err
    assert f"deployment.yaml:{text.count(chr(10)) + 2}: {problem}" in said and said.count("\n") == 1


def test_a_report_where_no_folder_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run(monkeypatch, PAPER, "--requests", 10, "--report", file / "x") == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_deployment_that_can_serve_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = yaml.safe_load(PAPER.read_text())
    alone = next(cluster for cluster in file["clusters"] if cluster["kind"] == "pd")
    file |= {"clusters": [alone | {"instance_count": 1}], "prices": {"h20": 1.0}}
    del file["links"]
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(file))
    assert run(monkeypatch, path, "--rate", 1) == 2
    assert "can serve nothing" in capsys.readouterr().err


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "Example: prfaas simulate" in " ".join(capsys.readouterr().out.split())


OWN_POLICIES = '''
from dataclasses import replace
from prfaas.api import NoDecodeInstanceError, options

class Silent:
    def decide(self, request, view): return None

class Raising:
    def decide(self, request, view): return self.worst(request) / 0
    def worst(self, request): raise KeyError("no\\nlinks")

class Narrow:
    def decide(self, request): return None

class Wordy:
    def decide(self, request, view): return options(request, view)[0].decision("Two words")

class Late:
    """Fails once it is under way."""
    def decide(self, request, view):
        if view.now_s > 20: raise ValueError("late")
        return options(request, view)[0].decision("first")

class Elsewhere:
    def decide(self, request, view): raise NoDecodeInstanceError("nothing decodes")
'''


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ("Silent", "it is a NoneType, not a Decision"),
        ("Raising", "it raised KeyError: 'no\\nlinks' (own_policies.py, line 10)"),
        ("Narrow", "it raised TypeError: Narrow.decide() takes 2 positional arguments but 3 were given"),
        ("Wordy", "reason 'Two words' is no lower-case word"),
        ("Late", "it raised ValueError: late (own_policies.py, line 21)"),
        ("Elsewhere", "nothing decodes"),
    ],
)
def test_an_own_policy_that_fails_ends_the_run_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    policy: str,
    complaint: str,
) -> None:
    (tmp_path / "own_policies.py").write_text(OWN_POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    assert run(monkeypatch, PAPER, "--policy", f"own_policies:{policy}", "--requests", 300) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"prfaas: policy own_policies:{policy}: ") and complaint in said


def test_a_line_that_is_cut_and_an_instance_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lived(*options: str) -> Any:
        found = simulated(monkeypatch, capsys, PAPER, "--policy", "paper", *options, requests=2000)
        return found["policies"]["paper"], found["failures"]

    well, nothing = lived()
    cut, outages = lived("--outage", "east->home@300+120")
    gone, failures = lived("--fail", "home-0@300+120", "--fail", "east-0@300+120")
    assert nothing == []
    assert [(each["what"], each["at_s"], each["lasts_s"]) for each in outages] == [("east->home", 300, 120)]
    assert [each["what"] for each in failures] == ["home-0", "east-0"]
    assert cut["ttft_p99_s"] > 2 * well["ttft_p99_s"]
    assert gone["retries"] > 0 == well["retries"]
    assert cut["lost"] == gone["lost"] == 0


def test_a_line_that_becomes_narrow_and_traffic_of_day_and_night(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lived(*options: str) -> Any:
        return simulated(monkeypatch, capsys, PAPER, "--policy", "paper", *options, requests=2000)

    usual = lived()
    same = lived("--bandwidth-steps", "east->home@0=100 Gbit/s")
    narrow = lived("--bandwidth-steps", "east->home@300=2 Gbit/s", "--bandwidth-steps", "east->home@400=5e9")
    waves = lived("--diurnal", "0.9/600")
    assert same["policies"] == usual["policies"] and usual["bandwidth_steps"] == []
    assert narrow["bandwidth_steps"] == ["east->home@300=2 Gbit/s", "east->home@400=5e9"]
    shares = [each["policies"]["paper"]["offloaded_fraction"] for each in (usual, narrow)]
    assert shares[1] < 0.9 * shares[0]
    assert waves["arrivals"]["process"] == "diurnal" and waves["arrivals"]["period_s"] == 600
    assert waves["policies"]["paper"]["ttft_p99_s"] > 1.5 * usual["policies"]["paper"]["ttft_p99_s"]


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--bandwidth-steps", "east->home@5", 'write it as "east->home@600=2 Gbit/s"'),
        ("--bandwidth-steps", "east->home=2 Gbit/s", 'write it as "east->home@600=2 Gbit/s"'),
        ("--bandwidth-steps", "home->east@5=2 Gbit/s", 'there is no link "home->east"; there are'),
        ("--bandwidth-steps", "east->home@-5=2 Gbit/s", "is told from 0 s on"),
        ("--bandwidth-steps", "east->home@inf=2 Gbit/s", "is a number at a time"),
        ("--diurnal", "0.8", "write SWING/SECONDS, for example 0.8/86400"),
        ("--diurnal", "a/b", "write SWING/SECONDS, for example 0.8/86400"),
        ("--diurnal", "1.5/60", "--diurnal: the swing of a rate must be in [0, 1]"),
        ("--diurnal", "0.5/nan", "a period must be above 0"),
        ("--outage", "east->home", "write it as east->home@600+60"),
        ("--outage", "east->home@-1+5", "write it as east->home@600+60"),
        ("--outage", "home-0@1+5", "write it as east->home@600+60"),
        ("--outage", "home->east@1+5", '"home->east" cannot fail: it is no instance or link; there are'),
        ("--fail", "home-0@1+inf", "write it as home-0@600+60"),
        ("--fail", "home-0@1+0", "write it as home-0@600+60"),
        ("--fail", "east->home@1+5", "write it as home-0@600+60"),
        ("--fail", "home-9@1+5", '"home-9" cannot fail'),
    ],
)
def test_failures_that_can_not_be(
    option: str,
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, PAPER, option, text) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and message in said.err


@pytest.mark.slow("simulates 60,000 requests")
@pytest.mark.parametrize(
    "args", [("--compare", "paper,tilted"), ("--bursts", "--report", "out")], ids=["two policies", "bursts"]
)
def test_the_tutorial_shows_what_is_printed(
    args: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its tables: what stands above them says how long it took."""
    page = (EXAMPLES.parent / "docs" / "tutorial" / "3-first-simulation.md").read_text()
    shown = f"$ prfaas simulate examples/paper.yaml --load 0.9 {' '.join(args)}\n"
    assert shown in page
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, PAPER, "--load", 0.9, *args) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines())
    table = printed[printed.index("TTFT mean") :]
    assert table in page.partition(shown)[2].partition("\n```")[0]
