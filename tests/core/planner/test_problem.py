"""From deployment files to problems: what only the planner can find wrong."""

import json
from pathlib import Path

import pytest
import yaml

from prfaas.core.deployment import DeploymentError, load_planned
from prfaas.core.planner import PlanProblem, problem_of
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import TruncatedLogNormal

EXAMPLES = Path(__file__).parents[3] / "examples"


def problem(tmp_path: Path, **changes: object) -> PlanProblem:
    """examples/paper.yaml with other values, by path: workload__lengths__low=1."""
    document = yaml.safe_load((EXAMPLES / "paper.yaml").read_text())
    for field, value in changes.items():
        parts = field.split("__")
        at = document
        for part in parts[:-1]:
            at = at[int(part) if part.isdecimal() else part]
        at[parts[-1]] = value
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return problem_of(load_planned(path))


def test_the_papers_case(tmp_path: Path) -> None:
    found = problem(tmp_path)
    (east,), (home,), (link,) = found.prfaas, found.pd, found.links
    assert (east.instances, east.gpus, home.instances, home.gpus) == (4, 32, 8, 64)
    assert (home.decode_batch, home.decode_step_s) == (20, pytest.approx(0.025))
    assert (link.name, link.bandwidth_bits_per_s) == ("east->home", 100e9)
    assert found.workload.lengths == TruncatedLogNormal(9.9, 1.0, 128, 131072)
    assert found.prices == {"h200": 2.0, "h20": 1.0}


def test_hit_ratios(tmp_path: Path) -> None:
    found = problem(
        tmp_path,
        workload__prefix_hit_ratio=0.5,
        clusters__0__prefix_hit_ratio=0.25,
        workload__lengths={
            "distribution": "uniform",
            "low": 512,
            "high": 8192,
        },
    )
    assert found.hit_ratio(found.prfaas[0]) == 0.25 and found.hit_ratio(found.pd[0]) == 0.5


def test_clusters_with_equal_profiles_share_a_curve() -> None:
    """By it the planner knows them as equal."""
    found = problem_of(load_planned(EXAMPLES / "multi.yaml"))
    assert len({cluster.prefill_s for cluster in found.prfaas}) == 1
    assert len({cluster.prefill_s for cluster in found.pd}) == 1


def test_slo_that_a_single_request_does_not_keep(tmp_path: Path) -> None:
    profile = {
        "name": "slow",
        "model": "internal-1t",
        "hardware": "h20",
        "gpus_per_instance": 8,
        "source": "made up",
        "prefill": {"points": [[128, 0.5], [131072, 40.0]], "interpolation": "linear"},
        "decode": {"points": [[1, 0.05], [8, 0.06]], "interpolation": "linear"},
    }
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    with pytest.raises(DeploymentError, match="slo: asks for a token every 25 ms, which profile"):
        problem(tmp_path, clusters__1__profile="slow.yaml")


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    rows = [{"arrival_s": i, "input_tokens": 1000 * (i + 1), "output_tokens": 10 * i} for i in range(5)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = problem(tmp_path, workload={"lengths": {"distribution": "trace", "path": "t.jsonl"}})
    assert isinstance(found.workload.lengths, Empirical)
    assert found.workload.lengths.mean() == 3000 and found.workload.output_tokens == 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload__lengths__high": 262144}, ["clusters[0].profile", "internal-1t-h200", "262144"]),
        ({"workload__lengths__low": 16}, ["clusters[0].profile", "prefill times for 128 to 131072", "16"]),
        (
            {"workload__prefix_hit_ratio": 0.5},
            ["clusters[0].profile", "uncached lengths go from 64 to 65536"],
        ),
        ({"slo__tokens_per_s": 4000}, ["clusters[1].profile", "over the limit of 0.25 ms"]),
        (
            {"workload__lengths": {"distribution": "trace", "path": "none.jsonl"}},
            ["workload.lengths.path", "there is no such trace"],
        ),
        (
            {
                "workload__lengths": {
                    "distribution": "lognormal",
                    "mu": 0.0,
                    "sigma": 0.01,
                    "low": 1e4,
                    "high": 2e4,
                }
            },
            ["workload", "has no lengths between"],
        ),
    ],
)
def test_what_the_planner_refuses(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DeploymentError) as error:
        problem(tmp_path, **changes)
    text = str(error.value)
    assert str(tmp_path / "plan.yaml") in text and "\n" not in text
    for word in words:
        assert word in text
