"""What a prefill by unlike engines does to a model's next tokens: KVCache in 8 bits at one end, or in other blocks.

    python bench/converted.py [--json] [--models NAME ...] [--rows ROW ...]

Two real vLLM servers: one prefills in another cluster, one decodes. Their caches are as the row says. The engine that
decodes reads on in the documentation of this repository, behind a prompt whose KVCache came over the link, and tells
how likely it finds each token. Beside it reads an engine with 16 bits by itself, split at the same token.

- `agreement`: tokens at whose place both find the same one likeliest.
- `perplexity`: of the text, against that of 16 bits alone.
- `... alone`: an engine with 8 bits prefills and decodes. That is what 8 bits cost without prfaas.
- `16 to 16`: equal engines over the link.

Of a tiny model, whose weights are random, only the agreement says something. vLLM is told that there is no AMX: with
it pages of bfloat16 have an order that is not known, and nothing is converted.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from first_token import running
from goals import home_with_models
from ports import free_ports
from prfaas.core.deployment import load_deployment
from prfaas.core.deployment.model import TRAINED_MODELS, made_model, made_model_names
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.serving.engines.preparation import ensure_model

# As the tests' engines.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.integration.known_pages import with_known_pages

FAR, HOME = "far-prefill-0", "home-0"
TEXTS = ("docs/explanation/request.md", "docs/explanation/simulator.md", "docs/explanation/scheduling.md")
_ROOT = Path(__file__).parents[1]
# In 8 bits, blocks of a hybrid's attention have more tokens: a multiple of both sides' blocks.
RETENTION_TOKENS = 768
_LOGITS_PROCESSOR = "prfaas.serving.engines.vllm.reference:ForcedFirstTokens"
_FORCED_TOKENS_ARG = "forced_first_tokens"
_ASK_S = 600.0


@dataclass(frozen=True, slots=True)
class Cache:
    """How an engine keeps its KV."""

    dtype: str = "auto"
    block_tokens: int | None = None
    """None: as vLLM chooses."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines, and the rows that they give. `home_row`: the engine at home alone; empty: it is not measured."""

    row: str
    far: Cache
    home: Cache
    home_row: str = ""


_E4M3, _E5M2 = Cache("fp8_e4m3"), Cache("fp8_e5m2")
# Each has an engine with 16 bits, to compare with.
PAIRS = (
    Pair("16 to 16", Cache(), Cache()),
    Pair("e4m3 to 16", _E4M3, Cache()),
    Pair("16 to e4m3", Cache(), _E4M3, "e4m3 alone"),
    Pair("16 to e5m2", Cache(), _E5M2, "e5m2 alone"),
    Pair("blocks of 32 to 128", Cache(block_tokens=32), Cache(block_tokens=128)),
)


@dataclass(frozen=True, slots=True)
class Passage:
    """Token ids of a text: what is prefilled, and what is read on."""

    prompt: list[int]
    rest: list[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """How an engine found a text: for each token its likeliest one, and the logarithm of the text's own probability."""

    likeliest: list[int]
    logprobs_nats: list[float]
    sent_bytes: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs_nats))

    def agreement(self, other: "Reading") -> float:
        """Share of the places at which both find the same token likeliest."""
        return statistics.fmean(own == its for own, its in zip(self.likeliest, other.likeliest, strict=True))


def write_deployment(directory: Path, model: str, dtype: str, pair: Pair) -> Path:
    """Two engines with the caches of a pair."""
    ports = iter(free_ports(6))
    source = made_model(model)
    assert source is not None

    def cluster(name: str, kind: str, instance: str, roles: Sequence[str], cache: Cache) -> dict[str, Any]:
        place = {"host": "127.0.0.1", "http_port": next(ports), "kv_port": next(ports)}
        kept: dict[str, Any] = {} if cache.dtype == "auto" else {"kv_cache_dtype": cache.dtype}
        if cache.block_tokens is not None:
            kept["extra_args"] = ["--block-size", str(cache.block_tokens)]
        instances = [{"name": instance, "roles": list(roles), **place}]
        return {"name": name, "kind": kind, "hardware": "cpu", "instances": instances, **kept}

    document = {
        "name": "converted",
        "model": {"served_name": model, source.kind: source.name, "max_model_len": 4096, "dtype": dtype},
        "clusters": [
            cluster("far", "prfaas", FAR, ["prefill"], pair.far),
            cluster("home", "pd", HOME, ["prefill", "decode"], pair.home),
        ],
        "links": [{"source": "far", "target": "home", "bandwidth": "1 Gbit/s", "connections": 4}],
        "routing": {"policy": "offload_all"},
        "control": {"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        "gateway": {"host": "127.0.0.1", "port": next(ports), "route_header": "full"},
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 4,
            "kv_cache_gib": 1,
            "staging": "256 MiB",
            "prefix_cache_retention_tokens": RETENTION_TOKENS,
            "extra_args": ["--logits-processors", _LOGITS_PROCESSOR],
        },
    }
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def passages(checkpoint: Path, prompt_tokens: int, rest_tokens: int) -> list[Passage]:
    """The beginning of each text, in the model's tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found = []
    for text in TEXTS:
        ids = tokenizer.encode((_ROOT / text).read_text()).ids[: prompt_tokens + rest_tokens]
        found.append(Passage(ids[:prompt_tokens], ids[prompt_tokens:]))
    return found


def read_on(
    url: str, model: str, prompt: Sequence[int], rest: Sequence[int], **fields: Any
) -> tuple[Reading, RouteHeader]:
    """An engine or a gateway is made to answer `prompt` with `rest`: what the engine thinks of that."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": len(rest),
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {_FORCED_TOKENS_ARG: list(rest)},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        told = json.load(answer)["choices"][0]["logprobs"]
        route = RouteHeader.parse(answer.headers.get(ROUTE_HEADER, "local"))
    if [int(token.removeprefix("token_id:")) for token in told["tokens"]] != list(rest):
        raise SystemExit(f"{url} answered with another text than it was made to")
    likeliest = [max(place, key=place.__getitem__) for place in told["top_logprobs"]]
    ids = [int(token.removeprefix("token_id:")) for token in likeliest]
    return Reading(ids, told["token_logprobs"], route.kv_bytes), route


def joined(readings: Sequence[Reading]) -> Reading:
    """Of several passages as one."""
    return Reading(
        [token for each in readings for token in each.likeliest],
        [logprob for each in readings for logprob in each.logprobs_nats],
        sum(each.sent_bytes for each in readings),
    )


def over_the_link(url: str, model: str, texts: Sequence[Passage]) -> Reading:
    """The passages through the gateway. Raises SystemExit where one goes another way."""
    readings = []
    for text in texts:
        reading, route = read_on(url, model, text.prompt, text.rest)
        if route.route != "offload" or route.fallback:
            raise SystemExit(f"{model}: a request went another way: {route}")
        readings.append(reading)
    return joined(readings)


def alone(url: str, model: str, texts: Sequence[Passage]) -> Reading:
    """The passages at one engine, which computes the last token of a prompt alone, as after a transfer."""
    readings = []
    for text in texts:
        forced = [text.prompt[-1], *text.rest]
        reading, _ = read_on(url, model, text.prompt[:-1], forced, cache_salt="alone")
        readings.append(Reading(reading.likeliest[1:], reading.logprobs_nats[1:]))
    return joined(readings)


def measure(
    home: Path, model: str, dtype: str, pair: Pair, reference: Reading | None, lengths: tuple[int, int]
) -> Iterator[tuple[str, Reading]]:
    """The rows of a pair. First "16 alone", unless it is given."""
    with tempfile.TemporaryDirectory(prefix="prfaas-converted-") as directory:
        path = write_deployment(Path(directory), model, dtype, pair)
        ensure_model(load_deployment(path, state_dir=home))
        with running(path, home, with_known_pages()) as deployment:
            texts = passages(deployment.model.path, *lengths)
            if reference is None:
                engine = FAR if pair.far.dtype == "auto" else HOME
                yield "16 alone", alone(deployment.instance(engine).url, model, texts)
            yield pair.row, over_the_link(deployment.gateway.url, model, texts)
            if pair.home_row:
                yield pair.home_row, alone(deployment.instance(HOME).url, model, texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows of all models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--models", nargs="+", default=list(TRAINED_MODELS), choices=made_model_names())
    rows = [pair.row for pair in PAIRS]
    parser.add_argument("--rows", nargs="+", default=rows, choices=rows, help="those over the link")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"], help="of 16 bits")
    parser.add_argument("--tokens", type=int, default=1500, help="of each prompt")
    parser.add_argument("--rest-tokens", type=int, default=256, help="of each text, that are read on")
    arguments = parser.parse_args(argv)
    lengths = (arguments.tokens, arguments.rest_tokens)
    figures = []
    with home_with_models("prfaas-converted-") as home:
        for model in arguments.models:
            reference: Reading | None = None
            for pair in (each for each in PAIRS if each.row in arguments.rows):
                for row, reading in measure(home, model, arguments.dtype, pair, reference, lengths):
                    reference = reference or reading
                    figures.append(
                        {
                            "model": model,
                            "row": row,
                            "agreement": reading.agreement(reference),
                            "perplexity": reading.perplexity,
                            "tokens": len(reading.likeliest),
                            "sent_bytes": reading.sent_bytes,
                        }
                    )
                    print(f"{model}, {row}: {figures[-1]}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"rows": figures}, indent=2))
        return 0
    print("model, caches (prefill to decode) | agreement | perplexity | over the link, MB")
    for each in figures:
        print(
            f"{each['model']:>10}, {each['row']:<20} | {each['agreement']:6.1%} | {each['perplexity']:8.3f} | "
            f"{each['sent_bytes'] / 1e6:.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
