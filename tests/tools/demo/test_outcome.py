"""What a run's rows say together, in JSON and for people."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prfaas.core.deployment import Deployment, ModelSource, load_deployment
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel
from prfaas.core.route_header import RouteHeader
from prfaas.serving.engines.tiny import tiny_config
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.compare import Pages
from prfaas.tools.demo.display import answers_table, closing, footnotes, outcome_table
from prfaas.tools.demo.line import DemoLine, PrefillSpeed
from prfaas.tools.demo.outcome import ActAnswers, DemoOutcome, outcome_of
from prfaas.tools.demo.prompts import demo_prompts
from prfaas.tools.demo.reference import (
    REFERENCE_NAME,
    ReferenceAnswer,
    reference_command,
    reference_deployment,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"
ANSWER = tuple(range(64))
PAGES = Pages(256, 256)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load_deployment(EXAMPLE, state_dir=tmp_path)


def _model(name: str) -> KvModel:
    return model_from_config(tiny_config(name), name=name)


def _outcome(
    deployment: Deployment, *, ties: int = 0, noes: int = 0, model: str = "qwen3-next"
) -> DemoOutcome:
    """Six requests of which the first ones differ from the reference at token 3."""
    kv_model = _model(model)
    answers, references = [], []
    for index, (prompt, cached) in enumerate(zip(demo_prompts(), (0, 0, 0, 0, 1280, 0), strict=True)):
        tokens = len(prompt.text)
        ours = ANSWER if index >= ties + noes else (*ANSWER[:3], 99, *ANSWER[4:])
        margin_nats = 0.0625 if index < ties else 1.0
        route = RouteHeader(
            route="offload" if tokens > 2000 else "local",
            prefill="east-prefill-0" if tokens > 2000 else "home-prefill-0",
            decode="home-decode-0",
            cached_tokens=cached,
            kv_bytes=PAGES.bytes_to_move(kv_model, tokens - 1, cached),
            hidden_fraction=0.8,
            prefill_s=2.5,
            transfer_s=2.7,
        )
        answers.append(DemoAnswer(ours, "x" * 64, tokens, route, 2.8, 60.0))
        logits = tuple({t: 12.5, 99: 12.5 - margin_nats} for t in ANSWER)
        references.append(ReferenceAnswer(ANSWER, logits, ttft_s=1.25))
    line = DemoLine.of(kv_model, PrefillSpeed(1200, 0.75))
    return outcome_of(deployment, kv_model, demo_prompts(), ActAnswers(answers, references), line=line)


@pytest.mark.parametrize(
    ("ties", "noes", "equal"), [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, False), (1, 1, False)]
)
def test_what_counts_as_equal(deployment: Deployment, ties: int, noes: int, equal: bool) -> None:
    assert _outcome(deployment, ties=ties, noes=noes).all_equal is equal


def test_json_has_the_keys_of_the_issue(deployment: Deployment) -> None:
    document = json.loads(json.dumps(_outcome(deployment, ties=1).to_json()))
    assert document["all_equal"] is True
    assert document["all_bytes_explained"] is True
    assert len(document["requests"]) == 6
    keys = {
        "prompt_tokens",
        "cached_tokens",
        "route",
        "ttft_s",
        "kv_bytes",
        "hidden_fraction",
        "equal_to_local",
    }
    for request in document["requests"]:
        assert keys <= request.keys()
    assert [request["equal_to_local"] for request in document["requests"]] == ["tie"] + ["exact"] * 5
    assert [request["route"] for request in document["requests"]] == ["local"] * 2 + ["offload", "local"] + [
        "offload"
    ] * 2


def test_bytes_are_those_of_all_but_the_last_prompt_token(deployment: Deployment) -> None:
    outcome = _outcome(deployment)
    assert outcome.pages == PAGES
    assert outcome.rows[4].exact_bytes == (3_429 - 1280) * 1024 + 6 * 68_608


def test_bytes_that_nothing_explains_are_shown_as_such(deployment: Deployment) -> None:
    outcome = _outcome(deployment)
    row = outcome.rows[5]
    route = replace(row.answer.route, kv_bytes=row.answer.route.kv_bytes + 1)
    odd = outcome_of(
        deployment,
        outcome.kv_model,
        demo_prompts(),
        ActAnswers(
            (*(r.answer for r in outcome.rows[:5]), replace(row.answer, route=route)),
            [ReferenceAnswer(ANSWER, ({},) * 64)] * 6,
        ),
    )
    assert odd.pages is None
    assert odd.to_json()["all_bytes_explained"] is False
    assert "no page size" in footnotes(odd)[-1]


def test_table_for_people(deployment: Deployment) -> None:
    console = Console(width=99, file=io.StringIO(), record=True)
    outcome = _outcome(deployment, noes=1)
    console.print(outcome_table(outcome))
    text = console.export_text()
    for part in ("4,000", "1,280", "offload", "local", "80%", "exact", "in pages", "2.8 s", "1.25 s"):
        assert part in text
    assert "a question: no at token 3 (1.000 nat, bound 0.125)." in footnotes(outcome)


def test_plain_vllm_s_time_stands_beside_ours(deployment: Deployment) -> None:
    outcome = _outcome(deployment)
    assert {request["plain_ttft_s"] for request in outcome.to_json()["requests"]} == {1.25}
    text = closing(outcome)
    assert "first token came after 2.8 s; plain vLLM's, with this machine to itself, after 1.25 s:" in text
    untold = replace(outcome, rows=tuple(replace(row, plain_ttft_s=None) for row in outcome.rows))
    assert "plain vLLM's, with" not in closing(untold)
    console = Console(width=99, file=io.StringIO(), record=True)
    console.print(outcome_table(untold))
    assert "1.25 s" not in console.export_text()


def test_the_tie_bound_is_stated(deployment: Deployment) -> None:
    outcome = _outcome(deployment, ties=1)
    assert any("from 16 to 32 it is 0.125" in note for note in footnotes(outcome))
    first, second = outcome.to_json()["requests"][:2]
    assert (first["margin_nats"], first["tie_bound_nats"]) == (0.0625, 0.125)
    assert second["tie_bound_nats"] is None


def test_closing_sentences(deployment: Deployment) -> None:
    hybrid = closing(_outcome(deployment))
    assert hybrid.startswith("3 of 6 prompts, those over 2,000 uncached tokens")
    assert "6 of 6 answers are equal" in hybrid
    dense = closing(_outcome(deployment, model="qwen3"))
    assert "6,144 B of KV per token, 6 times the 1,024 B of qwen3-next" in dense
    # Four thousand tokens take 2.5 s, and the hybrid's 4.5 MB 13 % of it.
    assert "for which a line of 120 Mbit/s would do" in dense
    assert "takes 66% of its prefill's time in place of 13%" in dense
    assert dense.endswith("so 1.5 prefill instances fill it: it should stay home.")


def test_the_line_and_the_answers_are_told(deployment: Deployment) -> None:
    outcome = _outcome(deployment)
    assert outcome.line is not None
    assert footnotes(outcome)[0] == outcome.line.sentence()
    document = outcome.to_json()
    assert document["line"]["bandwidth_bits_per_s"] == outcome.line.bandwidth_bits_per_s
    assert {request["answer"] for request in document["requests"]} == {"x" * 64}
    unknown = replace(outcome, line=None)
    assert unknown.to_json()["line"] is None
    assert not any("line between" in note for note in footnotes(unknown))


def test_words_are_shown_where_there_are_any(deployment: Deployment) -> None:
    written = _outcome(deployment)
    sources = {ModelSource("tiny", "qwen3"): False, ModelSource("trained", "words"): True, None: True}
    for source, writes in sources.items():
        given = {} if source is None else {source.kind: source.name}
        model = replace(deployment.model, **{"tiny": None, "trained": None} | given)
        assert replace(written, deployment=replace(deployment, model=model)).writes_words is writes
    console = Console(width=99, file=io.StringIO(), record=True)
    console.print(answers_table(written))
    text = console.export_text()
    assert text.count("x" * 60) == 6
    assert demo_prompts()[-1].text.split()[-1] in text


def test_the_reference_is_the_same_engine_without_a_connector(deployment: Deployment) -> None:
    from prfaas.serving.engines.command import vllm_command
    from prfaas.serving.engines.trained import trained_model

    trained_model("words", deployment.model.path.parent)
    plain = reference_deployment(deployment)
    (instance,) = plain.instances
    decode = deployment.instance("home-decode-0")
    assert instance.name == REFERENCE_NAME
    assert (instance.host, instance.http_port) == (decode.host, decode.http_port)
    assert plain.logs_dir != deployment.logs_dir
    assert plain.security == deployment.security
    own, usual = reference_command(plain, instance), vllm_command(deployment, decode)
    assert own.env == usual.env
    shared = list(usual.argv)
    at = shared.index("--kv-events-config")
    del shared[at : at + 2]
    at = shared.index("--kv-transfer-config")
    assert list(own.argv[:at]) == shared[:at]
    assert own.argv[at] == "--logits-processors"
    assert own.argv[at + 2 : at + 4] == ("--logprobs-mode", "raw_logits")
    assert list(own.argv[at + 4 :]) == shared[at + 2 :]
