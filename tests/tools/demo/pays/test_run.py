"""A short burst through real gateways and stand-ins, and through the simulator; and what is said of it."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tests.ports import free_ports

from prfaas.tools.demo.display import DEMO_COLUMNS
from prfaas.tools.demo.pays import BurstOutcome, run_burst
from prfaas.tools.demo.pays.chart import burst_closing, burst_notes, burst_table, when_not
from prfaas.tools.demo.pays.outcome import SideOutcome
from prfaas.tools.demo.pays.run import WITH_PRFAAS, WITHOUT

EXAMPLES = Path(__file__).parents[4] / "examples"
REQUESTS = 40


class Counted:
    """Counts what a person would see."""

    def __init__(self) -> None:
        self.total = self.answered = 0

    @contextlib.contextmanager
    def bursting(self, requests: int) -> Iterator[Callable[[], None]]:
        self.total = requests

        def step() -> None:
            self.answered += 1

        yield step


def moved(name: str, directory: Path) -> Path:
    """An example at ports of its own."""
    document = yaml.safe_load((EXAMPLES / name).read_text())
    document["model"]["path"] = str(EXAMPLES / document["model"]["path"])
    for cluster in document["clusters"]:
        cluster["profile"] = str(EXAMPLES / cluster["profile"])
        for instance in cluster["instances"]:
            instance["http_port"], instance["kv_port"] = free_ports(2)
    path = directory / name
    path.write_text(yaml.safe_dump(document))
    return path


pytestmark = pytest.mark.slow("the burst comes in real time, to two times twelve stand-ins")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[BurstOutcome, Counted]:
    directory = tmp_path_factory.mktemp("pays")
    before = os.environ.get("PRFAAS_HOME")
    os.environ["PRFAAS_HOME"] = str(directory / "home")
    try:
        stages = Counted()
        files = moved(WITH_PRFAAS, directory), moved(WITHOUT, directory)
        return run_burst(stages.bursting, REQUESTS, files), stages
    finally:
        os.environ.pop("PRFAAS_HOME")
        if before is not None:
            os.environ["PRFAAS_HOME"] = before


def test_both_sides_answer_all_of_it(found: tuple[BurstOutcome, Counted]) -> None:
    outcome, stages = found
    assert (stages.total, stages.answered) == (2 * REQUESTS, 2 * REQUESTS)
    for side in (outcome.paying, outcome.without):
        assert side.live_run.result.lost == 0
        for each_s, ttfts in ((side.live_s, side.live), (side.simulated_s, side.simulated)):
            assert len(each_s) == REQUESTS
            assert all(each is not None and each > 0 for each in each_s)
            assert 0 < ttfts.mean < ttfts.p90


def test_live_and_simulated_are_the_same_requests(found: tuple[BurstOutcome, Counted]) -> None:
    outcome, _ = found
    for side in (outcome.paying, outcome.without):
        tokens = [record.input_tokens for record in side.live_run.result.records]
        assert tokens == side.simulation.input_tokens.tolist()
        # No more than sanity: a busy machine is slower than any simulation.
        assert 0.3 < side.live.mean / side.simulated.mean < 30


def test_long_prompts_cross_the_link_on_one_side_only(found: tuple[BurstOutcome, Counted]) -> None:
    outcome, _ = found
    assert outcome.paying.offloaded > 0 and (outcome.paying.link_used or 0) > 0
    assert outcome.without.offloaded == 0 and outcome.without.link_used is None
    offloaded = [r.input_tokens for r in outcome.paying.live_run.result.records if r.route == "offload"]
    local = [r.input_tokens for r in outcome.paying.live_run.result.records if r.route != "offload"]
    assert sum(offloaded) / len(offloaded) > sum(local) / len(local)


def test_shown_to_people_and_programs(found: tuple[BurstOutcome, Counted]) -> None:
    outcome, _ = found
    console = Console(width=DEMO_COLUMNS, file=io.StringIO(), record=True)
    console.print(burst_table(outcome))
    text = console.export_text()
    for part in ("with PrfaaS", "4 H200 + 8 H20", "12 H20", "live", "simulated", "P90", "█"):
        assert part in text
    assert max(map(len, text.splitlines())) <= DEMO_COLUMNS
    document = json.loads(json.dumps(outcome.to_json()))
    assert len(document["with_prfaas"]["live"]["ttft_s"]) == REQUESTS
    assert document["is_ahead"] == outcome.is_ahead
    assert any("12%" in note for note in burst_notes(outcome))


def later(side: SideOutcome) -> SideOutcome:
    """The same with each first token a minute later."""
    records = tuple(
        replace(each, first_token_s=(each.first_token_s or 0.0) + 60.0)
        for each in side.live_run.result.records
    )
    run = side.live_run
    return replace(side, live_run=replace(run, result=replace(run.result, records=records)))


def test_who_is_behind_is_said(found: tuple[BurstOutcome, Counted]) -> None:
    """A busy machine may have either side ahead, or each in one of mean and P90."""
    outcome, _ = found
    ahead = replace(outcome, without=later(outcome.paying))
    behind = replace(outcome, paying=later(outcome.without))
    assert ahead.is_ahead and not behind.is_ahead
    assert burst_closing(behind).startswith("PrfaaS was NOT ahead in this run.")
    assert "NOT" not in burst_closing(ahead)


def test_when_it_would_not_pay_comes_from_the_planner(found: tuple[BurstOutcome, Counted]) -> None:
    limits = found[0].limits
    assert limits.equal_cost_ratio is not None and limits.equal_cost_ratio > 1.1
    assert limits.dense_ratio is not None and limits.dense_ratio < 1
    assert limits.short_ratio is not None and limits.short_ratio < 1
    assert limits.break_even_per_gb == pytest.approx(0.00356, rel=0.02)
    sentence = when_not(limits)
    assert "1.19 x" in sentence and "MiniMax-M2.5" in sentence and "2,048 tokens" in sentence
    assert when_not(replace(limits, equal_cost_ratio=None)) == ""
