"""All that a run prints at its end: within 99 columns, with nothing cut, and with what to try next."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.route_header import RouteHeader
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, tiny_config
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.display import DEMO_COLUMNS, next_steps, print_outcome
from prfaas.tools.demo.outcome import ActAnswers, DemoOutcome, outcome_of
from prfaas.tools.demo.prompts import demo_prompts
from prfaas.tools.demo.reference import ReferenceAnswer

EXAMPLE = Path(__file__).parents[3] / "examples" / "local.yaml"
ANSWER = tuple(range(64))
OTHER = (*ANSWER[:60], 99, *ANSWER[61:])


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load_deployment(EXAMPLE, state_dir=tmp_path)


def widest_outcome(deployment: Deployment, model: str) -> DemoOutcome:
    """Two acts whose figures are as wide as any run's."""
    prompts = demo_prompts()
    answers = []
    for number, prompt in enumerate(prompts):
        tokens = len(prompt.text)
        route = RouteHeader(
            route="offload",
            prefill="east-prefill-0",
            decode="home-decode-0",
            cached_tokens=tokens - 1 if number else 0,
            kv_bytes=123_456_789,
            hidden_fraction=1.0,
            prefill_s=12.3,
        )
        answers.append(DemoAnswer(OTHER, "x" * 64, tokens, route, 0.1234, 123.4))
    references = tuple(
        ReferenceAnswer(ANSWER, tuple({t: 12.5, 99: 0.5} for t in ANSWER), 0.1234) for _ in prompts
    )
    again = [replace(answer, token_ids=ANSWER, pool_tokens=31_744) for answer in answers]
    kv_model = model_from_config(tiny_config(model), name=model)
    return outcome_of(
        deployment, kv_model, prompts, ActAnswers(answers, references), ActAnswers(again, references)
    )


@pytest.mark.parametrize("model", TINY_MODEL_NAMES)
def test_it_fits_and_cuts_nothing(deployment: Deployment, model: str) -> None:
    out = io.StringIO()
    outcome = widest_outcome(deployment, model)
    print_outcome(Console(file=out, width=DEMO_COLUMNS, highlight=False), outcome)
    text = out.getvalue()
    assert DEMO_COLUMNS < 100
    assert max(len(line.rstrip()) for line in text.splitlines()) <= DEMO_COLUMNS
    # Only prompts, of which the ends are shown, begin with one.
    assert text.count("…") == text.count(" …") == len(outcome.rows)
    # Both tables on its side, and whole figures in them.
    assert text.count("123,456,789") == 3 * len(outcome.rows)
    assert text.count("123 ms") >= 4 * len(outcome.rows) and "31,744" in text and "60 tokens" in text
    json.dumps(outcome.to_json())


def test_what_to_try_next_are_commands_that_exist(deployment: Deployment) -> None:
    from prfaas.cli.main import app

    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    lines = list(next_steps(is_on_path=True))
    place, _, rest = lines[-1].partition(" ")
    assert Path(place).is_file() and rest == "takes you through it."
    assert max(map(len, lines)) <= DEMO_COLUMNS
    commands = [line.split()[1] for line in lines if line.strip().startswith("prfaas ")]
    assert len(commands) == 5 and set(commands) <= names
    assert not any("activate" in line for line in lines)
    assert "  . .venv/bin/activate" in list(next_steps(is_on_path=False))
