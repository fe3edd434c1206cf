"""Answers after a hit in the pool, in the engine's own blocks, and in plain vLLM's (for `pool.py`)."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool_engines import READY_S, Engine, random_ids, running_engine, settle
from pool_world import pooled_deployment, running_pool
from prfaas.core.deployment import Deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.tools.demo.compare import Equality, compare
from prfaas.tools.demo.reference import reference_command, reference_deployment

Row = tuple[str, float, str] | tuple[str, float, str, float | None, bool]
PROMPTS, ANSWER_TOKENS = 24, 24
SHORTEST, LONGEST = 1500, 6000


@dataclass(frozen=True)
class Answer:
    """Token ids, tokens that were cached, and the logits of the likeliest tokens where they were asked for."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    top_logits: tuple[dict[int, float], ...] = ()


def answers(folder: Path, models: Sequence[str]) -> list[Row]:
    """Of 24 prompts of random lengths, how many answers and how many lengths of hits are the same."""
    rows: list[Row] = []
    for model in models:
        deployment = pooled_deployment(folder, model.replace("-", ""), memory="2 GiB", model=model)
        rng = random.Random(3)
        prompts = [random_ids(rng, rng.randint(SHORTEST, LONGEST)) for _ in range(PROMPTS)]
        with running_pool(deployment), running_engine(deployment) as engine:
            found = [_own_and_pooled(deployment, engine, ids) for ids in prompts]
        plain = _plain(deployment, prompts)
        counts: Counter[str] = Counter()
        for (own, pooled), reference in zip(found, plain, strict=True):
            judged = compare(pooled.token_ids, reference.token_ids, reference.top_logits).equality
            counts["hit as long as in own blocks"] += pooled.cached_tokens == own.cached_tokens > 0
            counts["answer of a hit in own blocks"] += pooled.token_ids == own.token_ids
            counts["answer of plain vLLM's hit"] += judged is Equality.EXACT
            counts["or a tie with it"] += judged is not Equality.NO
        for what, count in counts.items():
            goal = None if what == "answer of plain vLLM's hit" else float(PROMPTS)
            rows.append((f"{model}: {what}", float(count), f"of {PROMPTS}", goal, True))
    return rows


def _own_and_pooled(deployment: Deployment, engine: Engine, ids: list[int]) -> tuple[Answer, Answer]:
    """After a hit in the engine's own blocks, and after one in the pool alone."""
    # The second time an engine notices how far its attention goes, and keeps a state there.
    own = [_ask(engine, ids) for _ in range(3)][-1]
    settle(deployment)
    engine.forget()
    return own, _ask(engine, ids)


def _plain(deployment: Deployment, prompts: Sequence[list[int]]) -> list[Answer]:
    """What vLLM without a connector answers after a hit in its own blocks."""
    alone = reference_deployment(deployment)
    with RunningEngines(alone, command=reference_command) as engines:
        engines.wait_ready(READY_S)
        engine = Engine(alone)
        return [[_ask(engine, ids, logprobs=10) for _ in range(3)][-1] for ids in prompts]


def _ask(engine: Engine, ids: Sequence[int], **fields: Any) -> Answer:
    _, body = engine.answer(ids, ANSWER_TOKENS, return_tokens_as_token_ids=True, **fields)
    choice = body["choices"][0]
    details = body["usage"].get("prompt_tokens_details") or {}
    places = (choice.get("logprobs") or {}).get("top_logprobs") or ()
    logits = tuple(
        {int(token.removeprefix("token_id:")): float(value) for token, value in place.items()}
        for place in places
    )
    return Answer(tuple(choice["token_ids"]), details.get("cached_tokens") or 0, logits)
