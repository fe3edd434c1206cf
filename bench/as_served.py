"""The KV of models whose attention calls vLLM's hook, and of those whose attention does not: what crosses, and when.

    python bench/as_served.py [--json] [--models NAME ...] [--rows ROW ...]

Two real vLLM servers and the gateway: one engine prefills in another cluster, one decodes.

- `hidden`: of the bytes that were computed before the last chunk, the share that is at the other engine when the
  prefill ends. The last chunk has 1, 4 or 100 tokens, and the line twice what the prefill needs: its bytes over its
  time. The goal is 98 %.

A page is computed when its last token is. A linear state is the last chunk's.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from converted import Cache, Pair, write_deployment
from first_token import prompt, running
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.deployment.model import default_state_dir, made_model_names
from prfaas.core.kv import FullAttention, KvModel, LinearState, SlidingWindow
from prfaas.core.kv.groups import GroupKind, KvGroup, Region, ready_bytes, region_bytes
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.engines.preparation import ensure_model

HIDDEN_GOAL = 0.98
LAST_CHUNKS = (1, 4, 100)
CHUNK_TOKENS = 1024
BLOCK_TOKENS = 128
FEWEST_CHUNKS = 8
SHORTEST_S = 6.0
"""Of a prefill: at the end of any, what a paced line holds takes up to 0.1 s more."""
FREE = "10 Gbit/s"
_ASK_S = 600.0


def ask(deployment: Deployment, ids: Sequence[int]) -> RouteHeader:
    """A prompt through the gateway, for one token. Raises SystemExit where it goes another way."""
    body = {"model": deployment.model.served_name, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{deployment.gateway.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        answer.read()
        route = RouteHeader.parse(answer.headers[ROUTE_HEADER])
    if route.route != "offload" or route.fallback:
        raise SystemExit(f"{deployment.model.served_name}: a request went another way: {route}")
    return route


def set_line(path: Path, deployment: Deployment, bandwidth: str) -> None:
    """Give the link of a running deployment another bandwidth."""
    document = json.loads(path.read_text())
    document["links"][0]["bandwidth"] = bandwidth
    path.write_text(json.dumps(document))
    request = urllib.request.Request(f"{deployment.gateway.admin.url}/prfaas/reload", method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["applied"], "the gateway did not take the line on"


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


def hidden(path: Path, deployment: Deployment, rounds: int) -> Iterator[dict[str, Any]]:
    """A figure for each last chunk."""
    regions, seeds = regions_of(deployment.model.kv_model()), itertools.count(1)

    def prefilled(early_tokens: int, last_tokens: int) -> RouteHeader:
        # The engine that decodes computes the last token of a prompt.
        return ask(deployment, prompt(next(seeds), early_tokens + last_tokens + 1))

    def prefill_s(early_tokens: int, last_tokens: int) -> float:
        """Of the fastest one: then no line is too slow for one that is measured."""
        return min(prefilled(early_tokens, last_tokens).prefill_s or 0.0 for _ in range(3))

    set_line(path, deployment, FREE)
    early_tokens = FEWEST_CHUNKS * CHUNK_TOKENS
    most_tokens = deployment.model.max_model_len - CHUNK_TOKENS
    prefilled(early_tokens, 1)
    while prefill_s(early_tokens, 1) < SHORTEST_S and early_tokens < most_tokens:
        early_tokens = min(2 * early_tokens, most_tokens)
    for last_tokens in LAST_CHUNKS:
        set_line(path, deployment, FREE)
        tokens = early_tokens + last_tokens
        kv_bytes = sum(region_bytes(regions, tokens, 0))
        early_bytes = ready_bytes(regions, tokens, 0, early_tokens)
        needed_bits_per_s = kv_bytes * BITS_PER_BYTE / prefill_s(early_tokens, last_tokens)
        set_line(path, deployment, f"{2 * needed_bits_per_s:.0f} bit/s")
        found = [prefilled(early_tokens, last_tokens) for _ in range(rounds)]
        if {each.kv_bytes for each in found} != {kv_bytes}:
            raise SystemExit(f"{found[0].kv_bytes} bytes crossed, {kv_bytes} were expected")
        shares = [(each.hidden_fraction or 0.0) * kv_bytes / early_bytes for each in found]
        yield {
            "row": "hidden",
            "model": deployment.model.served_name,
            "last_chunk_tokens": last_tokens,
            "tokens": tokens,
            "line_bits_per_s": 2 * needed_bits_per_s,
            "prefill_s": statistics.median(each.prefill_s or 0.0 for each in found),
            "kv_bytes": kv_bytes,
            "early_bytes": early_bytes,
            "hidden_of_all": statistics.median(each.hidden_fraction or 0.0 for each in found),
            "hidden": statistics.median(shares),
            "least_hidden": min(shares),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument(
        "--models", nargs="+", default=["gpt-oss", "mimo-v2-flash", "gemma3"], choices=made_model_names()
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    figures = []
    with tempfile.TemporaryDirectory(prefix="prfaas-as-served-") as home:
        (default_state_dir() / "models").mkdir(parents=True, exist_ok=True)
        Path(home, "models").symlink_to(default_state_dir() / "models")
        for model in arguments.models:
            directory = Path(home) / f"files-{model}"
            directory.mkdir()
            path = write_deployment(directory, model, "bfloat16", Pair("", Cache(), Cache()))
            document = json.loads(path.read_text())
            document["model"]["max_model_len"] = 65536 if model != "gemma3" else 32768
            path.write_text(json.dumps(document))
            ensure_model(load_deployment(path, state_dir=Path(home)))
            with running(path, Path(home)) as deployment:
                for figure in hidden(path, deployment, arguments.rounds):
                    print(json.dumps(figure), file=sys.stderr, flush=True)
                    figures.append(figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
