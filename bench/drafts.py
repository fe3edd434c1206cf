"""Tokens that a decode engine drafts behind prompts that another engine has computed, against those behind its own.

    python bench/drafts.py [--json] [--rows ROW ...] [--models NAME ...]

Two real vLLM servers and the gateway, all on this machine: one engine prefills in another cluster, one decodes. Each
prompt is answered twice: through the gateway, and by the engine that decodes alone.

- `drafts`: both engines have the same drafter, of tiny models: Qwen3 drafts for itself, the others have a layer for it
  (MTP). The share of tokens, drafted behind the same ids both times, that are the same.
- `ngram`: the decode engine looks drafts up in what it has read (SmolLM2, pages of this repository's documentation).
  The share that it accepts of what it drafts, both times.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from goals import goal, home_with_models, report

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.integration.shimmed import with_shims
from tests.integration.stack import TEMPLATES, Stack, call, completion_body, prompt, write_deployment
from tests.integration.with_drafter import ToldDrafts, equal_drafts, write_drafting

FAR, HOME = "east-prefill-0", "home-decode-0"
# How many tokens each model drafts at a time.
MODELS = {"qwen3": 3, "mimo-v2-flash": 1, "qwen3-next": 1}
ROWS = ("drafts", "ngram")
# Of three chunks, of four, and of five with a last one that ends at a block's end.
PROMPTS = (2600, 3075, 4097, 2900, 3500, 3900)
ANSWER_TOKENS = 24

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DOCS = Path(__file__).parents[1] / "docs" / "explanation"
PAGES = tuple(f"{name}.md" for name in ("request", "simulator", "scheduling", "pool"))
PAGE_TOKENS, NGRAM_ANSWER_TOKENS = 1000, 96

GOAL_EQUAL = 0.95
GOAL_POINTS = 2.0

Drafts = Mapping[tuple[int, ...], list[int]]


def offloaded(stack: Stack, ids: Sequence[int], tokens: int) -> list[int]:
    """The answer to a prompt, through the gateway. Raises SystemExit where it goes another way."""
    answer = stack.complete(ids, tokens)
    if answer.status != 200 or answer.route["prefill"] != FAR or "fallback" in answer.route:
        raise SystemExit(f"a request went another way: {answer.status} {answer.headers}")
    stack.wait_clean()
    return answer.token_ids


def alone(stack: Stack, ids: Sequence[int], tokens: int) -> list[int]:
    """What the engine that decodes answers by itself."""
    body = completion_body(ids, tokens, cache_salt="alone")
    return call(stack.url(HOME, "/v1/completions"), body).token_ids


def accepted(drafted: Drafts, answer: Sequence[int]) -> tuple[int, int]:
    """Of the tokens that were drafted for an answer: how many it took, and how many there were."""
    taken = total = 0
    for known, ids in drafted.items():
        rest = answer[len(known) :]
        total += min(len(ids), len(rest))
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, rest, strict=False))
        taken += sum(1 for _ in pairs)
    return taken, total


def answered_twice(stack: Stack, told: Path, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """What is drafted behind prompts that were moved, and behind the same ones alone."""
    drafts, equal, equal_tokens = ToldDrafts(told), list[bool](), list[bool]()
    taken: dict[str, list[tuple[int, int]]] = {"moved": [], "alone": []}
    for ids in prompts:
        ours = offloaded(stack, ids, tokens)
        behind_moved = drafts.new()
        its = alone(stack, ids, tokens)
        behind_own = drafts.new()
        equal += equal_drafts(behind_moved, behind_own)
        equal_tokens += (one == other for one, other in zip(ours, its, strict=True))
        taken["moved"].append(accepted(behind_moved, ours))
        taken["alone"].append(accepted(behind_own, its))
    shares = {
        f"accepted_{which}": sum(each for each, _ in counts) / max(1, sum(total for _, total in counts))
        for which, counts in taken.items()
    }
    return {
        "prompts": len(prompts),
        "loaded": int(stack.metric(HOME, "vllm:prfaas_loads_completed_total")),
        "equal_tokens": statistics.fmean(equal_tokens),
        "compared": len(equal),
        "equal_drafts": statistics.fmean(equal) if equal else 0.0,
        "drafted": sum(total for _, total in taken["alone"]),
        **shares,
    }


def both_draft(model: str) -> dict[str, Any]:
    """A model that drafts at both engines."""
    with tempfile.TemporaryDirectory(prefix=f"drafts-{model}-") as folder:
        directory, told = _folders(folder, model)
        count = MODELS[model]
        path, env = write_drafting(directory, model=model, prefill=count, decode=count, told=told)
        prompts = [prompt(870 + seed, tokens) for seed, tokens in enumerate(PROMPTS)]
        with Stack(path, env) as stack:
            return {"row": "drafts", "model": model, **answered_twice(stack, told, prompts, ANSWER_TOKENS)}


def looked_up() -> dict[str, Any]:
    """SmolLM2, which drafts what followed the same words before."""
    with tempfile.TemporaryDirectory(prefix="drafts-ngram-") as folder:
        directory, told = _folders(folder, "smollm2")
        path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=4096, policy="offload_all")
        document = json.loads(path.read_text())
        document["clusters"][1]["instances"].pop(0)
        document["clusters"][1]["extra_args"] = ["--speculative-config", json.dumps(NGRAM)]
        document["engine"]["extra_args"] = []
        del document["model"]["tiny"]
        document["model"]["trained"] = "smollm2"
        path.write_text(json.dumps(document))
        with Stack(path, {"TOLD_DRAFTS": str(told)} | with_shims("with_drafts_told")) as stack:
            tokenizer = Tokenizer.from_file(str(stack.deployment.model.path / "tokenizer.json"))
            prompts = [
                tokenizer.encode((DOCS / page).read_text(encoding="utf-8")).ids[:PAGE_TOKENS]
                for page in PAGES
            ]
            return {
                "row": "ngram",
                "model": "smollm2",
                **answered_twice(stack, told, prompts, NGRAM_ANSWER_TOKENS),
            }


def _folders(folder: str, name: str) -> tuple[Path, Path]:
    """Of a deployment, and of what its engines tell."""
    places = Path(folder, name), Path(folder, "told")
    for place in places:
        place.mkdir()
    return places


def goals_of(figure: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a row is to reach, and whether it does."""
    model = figure["model"]
    yield goal(f"{model}: loaded", figure["loaded"], figure["prompts"], is_least=True)
    if figure["row"] == "drafts":
        yield goal(f"{model}: equal drafts", figure["equal_drafts"], GOAL_EQUAL, is_least=True)
        return
    points = 100 * abs(figure["accepted_moved"] - figure["accepted_alone"])
    yield goal(f"{model}: points between the shares accepted", points, GOAL_POINTS, is_least=False)


def sentence(figure: Mapping[str, Any]) -> str:
    """A figure in words."""
    return (
        f"{figure['row']}: {figure['model']}: {figure['loaded']} of {figure['prompts']} loaded, "
        f"{figure['equal_tokens']:.1%} of answers' tokens equal, {figure['equal_drafts']:.1%} of {figure['compared']} "
        f"drafts equal; accepted {figure['accepted_moved']:.1%}, alone {figure['accepted_alone']:.1%} of "
        f"{figure['drafted']}"
    )


def measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All figures, one after the other."""
    if "drafts" in asked.rows:
        yield from map(both_draft, asked.models)
    if "ngram" in asked.rows:
        yield looked_up()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures and goals as JSON")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=MODELS, help="of `drafts`")
    asked = parser.parse_args(argv)
    with home_with_models("prfaas-drafts-") as home, TEMPLATES:
        os.environ["PRFAAS_HOME"] = str(home)
        report(measured(asked), sentence, goals_of, as_json=asked.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
