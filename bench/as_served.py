"""The KV of models as they are served: whether all of it crosses where attention calls no hook, and how much in time.

    python bench/as_served.py [--json] [--rows ROW ...] [--models NAME ...] [--hook-models NAME ...]

Two real vLLM servers and the gateway, all on this machine: one engine prefills in another cluster, one decodes.

- `hook-off`: vLLM's hook does nothing, as in the attention of Kimi Linear on NVIDIA and of DeepSeek V3.2 and V4. Of
  each model some prompts: how many were loaded; how far an answer's logits are from those of a plain engine that is
  made to answer the same, in steps of bf16; how many of its greedy tokens are the same; and what arrived by TCP per
  byte of KVCache.
- `hidden`: of the bytes that were computed before the last chunk, the share that is at the other engine when the
  prefill ends. The last chunk has 1, 4 or 100 tokens. The line has twice what the prefill needs on average, its bytes
  over its time, then twice what its busiest chunk needs. A page is computed when its last token is.

Gemma 3 is fetched if it is not there: `--models` without it does without.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from goals import goal, home_with_models, report
from prfaas.core.deployment.model import TINY_MODELS, made_model, made_model_names
from prfaas.core.kv.groups import GroupKind, KvGroup, Region, region_bytes
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.units import BITS_PER_BYTE, format_bits_per_s

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.integration.kimi_linear import write_checkpoint
from tests.integration.shimmed import with_shims
from tests.integration.stack import LOGITS, TEMPLATES, Stack, logit_steps, prompt, write_deployment

FAR, HOME = "east-prefill-0", "home-decode-0"
KIMI_LINEAR = "kimi-linear"
HOOK_MODELS = (*TINY_MODELS, KIMI_LINEAR, "words", "smollm2")
WINDOW_MODELS = ("gpt-oss", "mimo-v2-flash", "gemma3")
ROWS = ("hook-off", "hidden")

GOAL_HIDDEN = 0.98
GOAL_STEPS = 1.0
GOAL_GREEDY = 0.95
# What frames, encryption and digests add.
GOAL_WIRE = 1.05

ANSWER_TOKENS = 24
# Of three chunks, of four, and of five with a last one that ends at a block's end.
PROMPTS = (2600, 3075, 4097)
# On CPUs vLLM computes prompts of MLA whole: of less than a block, and of more.
KIMI_PROMPTS = (41, 60, 300)

LAST_CHUNKS = (1, 4, 100)
CHUNK_TOKENS = 1024
BLOCK_TOKENS = 128
FEWEST_CHUNKS = 8
SHORTEST_S = 3.0
"""Of a prefill: what is on a paced line when it ends takes up to 0.1 s, whatever the prefill took."""
LINE = "1 Gbit/s"
FREE_LINE = "10 Gbit/s"


@contextlib.contextmanager
def serving(model: str, *, hook: bool, bandwidth: str, most_tokens: int) -> Iterator[Stack]:
    """One engine that prefills elsewhere and one that decodes, and the gateway."""
    source = made_model(model)
    shims = ["with_kimi_linear"] if source is None else []
    if not hook:
        shims.append("without_hook")
    with tempfile.TemporaryDirectory(prefix=f"as-served-{model}-") as folder:
        directory = Path(folder)
        path = write_deployment(directory, bandwidth=bandwidth, max_model_len=most_tokens, staging="256 MiB")
        document = json.loads(path.read_text())
        document["routing"] = {"policy": "offload_all"}
        document["clusters"][1]["instances"].pop(0)
        del document["model"]["tiny"]
        if source is None:
            document["model"]["path"] = str(write_checkpoint(directory / "model"))
        else:
            document["model"][source.kind] = source.name
        path.write_text(json.dumps(document))
        with Stack(path, with_shims(*shims)) as stack:
            yield stack


def offloaded(stack: Stack, ids: Sequence[int], answer_tokens: int = 1) -> Any:
    """The answer to a prompt, through the gateway. Raises SystemExit where it goes another way."""
    answer = stack.complete(ids, answer_tokens, **LOGITS)
    if answer.status != 200 or answer.route["prefill"] != FAR or "fallback" in answer.route:
        raise SystemExit(f"a request went another way: {answer.status} {answer.headers}")
    return answer


def hook_off(model: str) -> dict[str, Any]:
    """What becomes of some prompts of a model whose attention calls no hook."""
    lengths = KIMI_PROMPTS if model == KIMI_LINEAR else PROMPTS
    steps: list[float] = []
    equal: list[bool] = []
    kv_bytes = 0
    with serving(model, hook=False, bandwidth=LINE, most_tokens=8192) as stack:
        before = arrived_bytes(stack)
        for seed, tokens in enumerate(lengths):
            ids = prompt(900 + seed, tokens)
            answer = offloaded(stack, ids, ANSWER_TOKENS)
            kv_bytes += int(answer.route["bytes"])
            plain = stack.reference(ids, ANSWER_TOKENS, engine=HOME)
            equal += (ours == its for ours, its in zip(answer.token_ids, plain.token_ids[1:], strict=True))
            forced = stack.reference(ids, ANSWER_TOKENS, "forced", HOME, answer.token_ids)
            steps += map(logit_steps, answer.top_logits, forced.top_logits[1:])
            stack.wait_clean()
        wire_bytes = arrived_bytes(stack) - before
        loads = int(stack.metric(HOME, "vllm:prfaas_loads_completed_total"))
    return {
        "row": "hook-off",
        "model": model,
        "prompts": len(lengths),
        "loaded": loads,
        "most_logit_steps": max(steps),
        "equal_greedy": statistics.fmean(equal),
        "kv_bytes": kv_bytes,
        "wire_per_kv_byte": wire_bytes / kv_bytes,
    }


def arrived_bytes(stack: Stack) -> int:
    """What has come from the engine that prefills, as the kernel counts it."""
    return sum(each["bytes_total"] for each in stack.kv_stats(HOME)["arrivals"].values())


def set_line(stack: Stack, bandwidth: str) -> None:
    """Give the line of a running deployment another bandwidth."""
    document = json.loads(stack.path.read_text())
    for link in document["links"]:
        link["bandwidth"] = bandwidth
    stack.path.write_text(json.dumps(document))
    url = stack.url("gateway", "/prfaas/reload")
    with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=60) as answer:
        if not json.load(answer)["applied"]:
            raise SystemExit(f"the gateway did not take a line of {bandwidth} on")


def regions_of(model: KvModel) -> list[Region]:
    """One for each layer. vLLM gives all layers pages of one size: where a token has less, a block has more of them."""
    groups = [group for group in model.groups if not isinstance(group, LinearState)]
    page_bytes = max(group.token_bytes // group.layers for group in groups) * BLOCK_TOKENS
    found: list[Region] = []
    for index, group in enumerate(groups):
        kind = GroupKind.FULL if isinstance(group, FullAttention) else GroupKind.WINDOW
        window_tokens = group.window_tokens if isinstance(group, SlidingWindow) else 0
        kept = KvGroup(index, kind, page_bytes * group.layers // group.token_bytes, window_tokens)
        found += [Region(kept, page_bytes)] * group.layers
    return found


def ready_bytes(regions: Sequence[Region], num_tokens: int, done_tokens: int) -> int:
    """Of a transfer of so many tokens, the pages that are full when `done_tokens` of them are computed."""
    ready = [region.group.ready_block(num_tokens, done_tokens) for region in regions]
    firsts = [region.group.first_block(num_tokens, 0) for region in regions]
    pages = zip(regions, ready, firsts, strict=True)
    return sum(max(0, end - first) * region.page_bytes for region, end, first in pages)


def hidden(model: str, rounds: int, early_tokens: int | None) -> Iterator[dict[str, Any]]:
    """A figure for each last chunk, behind so many tokens; None: as many as take long enough."""
    source = made_model(model)
    most_tokens = 32768 if source is not None and source.kind == "trained" else 65536
    seeds = itertools.count(1)
    with serving(model, hook=True, bandwidth=FREE_LINE, most_tokens=most_tokens) as stack:
        regions = regions_of(stack.deployment.model.kv_model())

        def prefilled(tokens: int) -> Mapping[str, str]:
            # The engine that decodes computes the last token of a prompt.
            route: Mapping[str, str] = offloaded(stack, prompt(next(seeds), tokens + 1)).route
            return route

        def prefill_s(tokens: int) -> float:
            """Of the faster of two: then the line is too slow for none that is measured."""
            return min(float(prefilled(tokens)["prefill_s"]) for _ in range(2))

        prefilled(FEWEST_CHUNKS * CHUNK_TOKENS)
        if early_tokens is None:
            early_tokens = FEWEST_CHUNKS * CHUNK_TOKENS
            while prefill_s(early_tokens) < SHORTEST_S and early_tokens < most_tokens - CHUNK_TOKENS:
                early_tokens = min(2 * early_tokens, most_tokens - CHUNK_TOKENS)
        for last_tokens in LAST_CHUNKS:
            tokens = early_tokens + last_tokens
            set_line(stack, FREE_LINE)
            alone_s = prefill_s(tokens)
            for need, needed_bits_per_s in needs(regions, tokens, early_tokens, alone_s).items():
                set_line(stack, f"{2 * needed_bits_per_s:.0f} bit/s")
                found = hidden_figure(
                    regions, tokens, early_tokens, [prefilled(tokens) for _ in range(rounds)]
                )
                line = {"need": need, "line_bits_per_s": 2 * needed_bits_per_s}
                yield {"row": "hidden", "model": model, "last_chunk_tokens": last_tokens, **line, **found}


def needs(regions: Sequence[Region], tokens: int, early_tokens: int, prefill_s: float) -> Mapping[str, float]:
    """Bits per second that a prefill makes: on average, and in its busiest chunk, where chunks take the same time.

    All that windows hold is made in the last ones.
    """
    ends = [*range(0, early_tokens + 1, CHUNK_TOKENS), tokens]
    ready = [ready_bytes(regions, tokens, end) for end in ends]
    of_chunks = [after - before for before, after in itertools.pairwise(ready[:-1])]
    chunk_s = prefill_s * CHUNK_TOKENS / tokens
    return {
        "mean": ready[-1] * BITS_PER_BYTE / prefill_s,
        "busiest": max(of_chunks) * BITS_PER_BYTE / chunk_s,
    }


def hidden_figure(
    regions: Sequence[Region], tokens: int, early_tokens: int, routes: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Of some prompts on one line. Raises SystemExit where other bytes crossed than the model has."""
    kv_bytes = sum(region_bytes(regions, tokens, 0))
    early_bytes = ready_bytes(regions, tokens, early_tokens)
    if {int(route["bytes"]) for route in routes} != {kv_bytes}:
        raise SystemExit(f"{routes[0]['bytes']} bytes crossed, {kv_bytes} were expected")
    of_all = statistics.median(float(route["hidden"]) for route in routes)
    return {
        "tokens": tokens,
        "prefill_s": statistics.median(float(route["prefill_s"]) for route in routes),
        "kv_bytes": kv_bytes,
        "early_bytes": early_bytes,
        "hidden_of_all": of_all,
        # In a last chunk of many tokens some of its own bytes arrive too.
        "hidden": min(1.0, of_all * kv_bytes / early_bytes),
        "rounds": len(routes),
    }


def goals_of(figure: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a row is to reach, and whether it does."""
    if figure["row"] == "hidden":
        name = f"{figure['model']}, last chunk {figure['last_chunk_tokens']}, twice the {figure['need']} need: hidden"
        yield goal(name, figure["hidden"], GOAL_HIDDEN, is_least=True)
        return
    model = figure["model"]
    yield goal(f"{model}: loaded", figure["loaded"], figure["prompts"], is_least=True)
    yield goal(f"{model}: logits, steps of bf16", figure["most_logit_steps"], GOAL_STEPS, is_least=False)
    yield goal(f"{model}: TCP bytes per KV byte", figure["wire_per_kv_byte"], GOAL_WIRE, is_least=False)
    source = made_model(model)
    if source is not None and source.kind == "trained":
        yield goal(f"{model}: equal greedy tokens", figure["equal_greedy"], GOAL_GREEDY, is_least=True)


def measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All figures, one after the other."""
    if "hook-off" in asked.rows:
        for model in asked.hook_models:
            yield hook_off(model)
    if "hidden" in asked.rows:
        for model in asked.models:
            yield from hidden(model, asked.rounds, asked.tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures and goals as JSON")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    windows = [name for name in made_model_names() if name not in ("words", "qwen3-next")]
    parser.add_argument("--models", nargs="+", default=WINDOW_MODELS, choices=windows, help="of `hidden`")
    parser.add_argument(
        "--hook-models",
        nargs="+",
        default=HOOK_MODELS,
        choices=(*made_model_names(), KIMI_LINEAR),
        help="of `hook-off`",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of `hidden`: prompts for each figure"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="of `hidden`, before the last chunk; default: what takes 3 s"
    )
    asked = parser.parse_args(argv)
    with home_with_models("prfaas-as-served-") as home, TEMPLATES:
        os.environ["PRFAAS_HOME"] = str(home)
        report(measured(asked), sentence, goals_of, as_json=asked.json)
    return 0


def sentence(figure: Mapping[str, Any]) -> str:
    """A figure in words."""
    if figure["row"] == "hidden":
        line = f"twice the {figure['need']} need ({format_bits_per_s(figure['line_bits_per_s'])})"
        return (
            f"hidden: {figure['model']}, {figure['tokens']} tokens in {figure['prefill_s']:.1f} s, {line}, a last "
            f"chunk of {figure['last_chunk_tokens']}: {figure['hidden']:.1%} of what was computed before it, "
            f"{figure['hidden_of_all']:.1%} of all"
        )
    return (
        f"hook-off: {figure['model']}: {figure['loaded']} of {figure['prompts']} loaded, logits within "
        f"{figure['most_logit_steps']:.2f} steps of bf16, {figure['equal_greedy']:.1%} of greedy tokens equal, "
        f"{figure['wire_per_kv_byte']:.3f} bytes of TCP per byte of KVCache"
    )


if __name__ == "__main__":
    raise SystemExit(main())
