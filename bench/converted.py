"""What converting KVCache between 16 and 8 bits does to the tokens of answers, and to the bytes on the link.

Real vLLM servers with tiny models: one prefills in another cluster, one decodes. For each row, they keep caches in the
dtypes that the row names. A plain engine with 16 bits judges the answers: it reads prompt and answer, and tells for
each token whether it finds it likeliest, and how much less likely than the likeliest otherwise.

- `8 alone`: an engine with 8 bits prefills and decodes by itself. That is what 8 bits cost without prfaas.
- `16 to 16`: the same with 16 bits, over the link: what rounding in another order of steps does.

The weights are random, so nearly all tokens are about as likely: no trained model is moved so easily.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from first_token import running
from ports import free_ports
from prfaas.core.deployment import load_deployment
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.serving.engines.preparation import ensure_model

FAR, HOME = "far-prefill-0", "home-0"
MODELS = ("qwen3", "gpt-oss", "qwen3-next")
# In 8 bits, blocks of a hybrid's attention have more tokens: a multiple of both sides' blocks.
RETENTION_TOKENS = 768
_ASK_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """Dtypes of the caches of the engine that prefills and of the one that decodes."""

    far: str
    home: str
    alone: bool = False
    """The decode engine prefills too."""

    def __str__(self) -> str:
        bits = {"auto": "16"}
        if self.alone:
            return f"{self.home} alone"
        return f"{bits.get(self.far, self.far)} to {bits.get(self.home, self.home)}"


ROWS = (
    Row("auto", "auto"),
    Row("fp8_e4m3", "auto"),
    Row("auto", "fp8_e4m3"),
    Row("auto", "fp8_e4m3", alone=True),
    Row("auto", "fp8_e5m2"),
    Row("auto", "fp8_e5m2", alone=True),
)


def write_deployment(directory: Path, model: str, row: Row) -> Path:
    """Two engines of a tiny model, with the caches of a row."""
    ports = iter(free_ports(6))

    def cluster(name: str, kind: str, instance: str, roles: Sequence[str], dtype: str) -> dict[str, Any]:
        place = {"host": "127.0.0.1", "http_port": next(ports), "kv_port": next(ports)}
        kept = {} if dtype == "auto" else {"kv_cache_dtype": dtype}
        instances = [{"name": instance, "roles": list(roles), **place}]
        return {"name": name, "kind": kind, "hardware": "cpu", "instances": instances, **kept}

    document = {
        "name": "converted",
        "model": {"served_name": "tiny", "tiny": model, "max_model_len": 8192},
        "clusters": [
            cluster("far", "prfaas", FAR, ["prefill"], row.far),
            cluster("home", "pd", HOME, ["prefill", "decode"], row.home),
        ],
        "links": [{"source": "far", "target": "home", "bandwidth": "1 Gbit/s", "connections": 4}],
        "routing": {"policy": "local_only" if row.alone else "offload_all"},
        "control": {"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        "gateway": {"host": "127.0.0.1", "port": next(ports), "route_header": "full"},
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 4,
            "kv_cache_gib": 1,
            "staging": "256 MiB",
            "prefix_cache_retention_tokens": RETENTION_TOKENS,
        },
    }
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def ask(url: str, ids: Sequence[int], max_tokens: int, **fields: Any) -> tuple[dict[str, Any], RouteHeader]:
    """A greedy completion: the choice, and the route that a gateway tells."""
    body = {
        "model": "tiny",
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
        return choice, RouteHeader.parse(answer.headers.get(ROUTE_HEADER, "local"))


def judged(url: str, ids: Sequence[int], answer: Sequence[int]) -> list[float]:
    """How much less likely than the likeliest one a plain engine finds each token of an answer: nats."""
    choice, _ = ask(url, [*ids, *answer], 1, prompt_logprobs=1, cache_salt="judge")
    places = choice["prompt_logprobs"][len(ids) :]
    return [
        max(each["logprob"] for each in place.values()) - place[str(token)]["logprob"]
        for token, place in zip(answer, places, strict=True)
    ]


def measure(
    directory: Path, model: str, row: Row, prompts: int, tokens: int, answer_tokens: int
) -> dict[str, Any]:
    """Answers of one row."""
    path = write_deployment(directory, model, row)
    ensure_model(load_deployment(path, state_dir=directory / "state"))
    shortfalls: list[float] = []
    sent_bytes = 0
    with running(path, directory / "state") as deployment:
        judge = deployment.instance(FAR if row.far == "auto" else HOME).url
        for number in range(prompts):
            draw = random.Random(number)
            ids = [draw.randrange(3, 256) for _ in range(tokens + 61 * number)]
            how = {"logprobs": 1, "return_tokens_as_token_ids": True}
            choice, route = ask(deployment.gateway.url, ids, answer_tokens, **how)
            if route.route != ("local" if row.alone else "offload") or route.fallback:
                raise SystemExit(f"{model}, {row}: a request went another way: {route}")
            answer = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
            shortfalls += judged(judge, ids, answer)
            sent_bytes += route.kv_bytes
            print(f"{model}, {row}: prompt {number + 1} of {prompts}", file=sys.stderr)
    return {
        "model": model,
        "row": str(row),
        "likeliest": sum(each == 0 for each in shortfalls) / len(shortfalls),
        "shortfall_nats": statistics.fmean(shortfalls),
        "tokens": len(shortfalls),
        "sent_bytes": sent_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows of all models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--prompts", type=int, default=8, help="of each row")
    parser.add_argument("--tokens", type=int, default=2000, help="of the shortest prompt")
    parser.add_argument("--answer-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    lengths = (arguments.prompts, arguments.tokens, arguments.answer_tokens)
    rows = []
    for model in arguments.models:
        for row in ROWS:
            with tempfile.TemporaryDirectory(prefix="prfaas-converted-") as directory:
                rows.append(measure(Path(directory), model, row, *lengths))
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return 0
    print("model, caches (prefill to decode) | likeliest | shortfall, nats | over the link, MB")
    for row_figures in rows:
        print(
            f"{row_figures['model']:>10}, {row_figures['row']:<16} | {row_figures['likeliest']:6.1%} | "
            f"{row_figures['shortfall_nats']:.4f} | {row_figures['sent_bytes'] / 1e6:.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
