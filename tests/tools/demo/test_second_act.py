"""The demo's second act: what it compares, and what it shows."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prfaas.core.deployment import load_deployment
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel
from prfaas.core.route_header import RouteHeader
from prfaas.serving.engines.tiny import tiny_config
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.compare import Equality, Pages
from prfaas.tools.demo.display import second_closing, second_table
from prfaas.tools.demo.outcome import ActAnswers, SecondAct, outcome_of
from prfaas.tools.demo.prompts import DemoPrompt
from prfaas.tools.demo.reference import ReferenceAnswer

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"
ANSWER = tuple(range(8))
PAGES = Pages(256, 256)
TOKENS, HELD = 16_000, 15_872


@pytest.fixture(scope="module")
def kv_model() -> KvModel:
    return model_from_config(tiny_config("qwen3-next"), name="qwen3-next")


def answer(kv_model: KvModel, cached: int, ttft_s: float) -> DemoAnswer:
    moved = PAGES.bytes_to_move(kv_model, TOKENS - 1, cached)
    route = RouteHeader("offload", "east-prefill-0", "home-decode-0", cached_tokens=cached, kv_bytes=moved)
    return DemoAnswer(ANSWER, "x" * 8, TOKENS, route, ttft_s, 60.0, pool_tokens=2 * HELD)


def reference(margin_nats: float = 1.0) -> ReferenceAnswer:
    return ReferenceAnswer(ANSWER, tuple({t: 12.5, 99: 12.5 - margin_nats} for t in ANSWER))


def act_of(
    kv_model: KvModel,
    seconds: list[DemoAnswer],
    margin_nats: float = 1.0,
    plain: ReferenceAnswer | None = None,
) -> SecondAct:
    count = len(seconds)
    prompts = [DemoPrompt("the longest", "")] * count
    references = [plain or reference(margin_nats)] * count
    first = ActAnswers([answer(kv_model, 0, 4.0)] * count, [reference()] * count)
    outcome = outcome_of(load_deployment(EXAMPLE), kv_model, prompts, first, ActAnswers(seconds, references))
    assert outcome.pages == PAGES and outcome.second is not None
    return outcome.second


def test_only_states_and_the_tail_cross_again(kv_model: KvModel) -> None:
    act = act_of(kv_model, [answer(kv_model, HELD, 0.5)])
    before, now = act.crossed_bytes
    assert now < before / 20
    assert act.all_equal and act.rows[0].is_explained
    document = json.loads(json.dumps(act.to_json()))
    assert (document["first_crossed_bytes"], document["crossed_bytes"]) == (before, now)
    (request,) = document["requests"]
    assert (request["first_ttft_s"], request["ttft_s"]) == (4.0, 0.5)
    assert (request["pool_tokens"], request["equal_to_first"]) == (2 * HELD, True)


def test_what_stays_at_home_does_not_cross(kv_model: KvModel) -> None:
    home = answer(kv_model, HELD, 0.5)
    home = replace(home, route=replace(home.route, route="local"))
    assert act_of(kv_model, [home]).crossed_bytes[1] == 0


def test_bytes_beyond_what_the_pool_lacked_are_not_explained(kv_model: KvModel) -> None:
    lost = answer(kv_model, HELD, 0.5)
    lost = replace(lost, route=replace(lost.route, cached_tokens=0))
    act = act_of(kv_model, [lost])
    assert not act.rows[0].is_explained
    assert not act.to_json()["all_bytes_explained"]


@pytest.mark.parametrize(("margin_nats", "equality"), [(0.0625, Equality.TIE), (1.0, Equality.NO)])
def test_other_tokens_are_a_tie_or_wrong(kv_model: KvModel, margin_nats: float, equality: Equality) -> None:
    same = answer(kv_model, HELD, 0.5)
    other = replace(same, token_ids=(*ANSWER[:3], 99, *ANSWER[4:]))
    act = act_of(kv_model, [other] + [same] * 5, margin_nats)
    assert act.rows[0].comparison.equality is equality
    assert act.all_equal is (equality is Equality.TIE)
    assert not act_of(kv_model, [other, other, *[same] * 4], margin_nats).all_equal


def test_another_split_is_compared_with_an_engine_that_splits_alike(kv_model: KvModel) -> None:
    split = replace(answer(kv_model, HELD, 0.5), token_ids=(*ANSWER[:5], 98, *ANSWER[6:]))
    plain = ReferenceAnswer(split.token_ids, ({},) * len(ANSWER))
    act = act_of(kv_model, [split], plain=plain)
    assert act.all_equal
    assert (act.rows[0].first_difference, act.rows[0].comparison.equality) == (5, Equality.EXACT)


def test_shown_to_people(kv_model: KvModel) -> None:
    act = act_of(kv_model, [answer(kv_model, HELD, 0.5)])
    console = Console(width=99, file=io.StringIO(), record=True)
    console.print(second_table(act))
    text = console.export_text()
    for part in ("31,744", "15,872", "4 s", "exact", "offload"):
        assert part in text
    told = second_closing(act)
    assert "1 of 1 answers are those of the first act token by token" in told
    assert "after 500 ms in place of 4 s" in told
