"""The plain engine that answers the same prompts, with the same split of each."""

import asyncio
from dataclasses import dataclass, replace

import aiohttp

from prfaas.core.deployment import Cluster, Deployment, Instance
from prfaas.serving.bounded_answer import read_bounded
from prfaas.serving.engines.command import EngineCommand, vllm_command
from prfaas.tools.demo.client import RequestFailedError, answering
from prfaas.tools.http_client import greedy_body, post_json

REFERENCE_NAME = "reference"
_METRICS_TIMEOUT_S = 10.0

# As in prfaas.serving.engines.vllm.reference, which can't be imported without vLLM.
_EVENTS_FLAG = "--kv-events-config"
_LOGITS_PROCESSOR = "prfaas.serving.engines.vllm.reference:ForcedFirstTokens"
_FORCED_TOKENS_ARG = "forced_first_tokens"

# With this, vLLM's "logprobs" are the logits themselves: only they tell how coarse bf16 was.
_LOGITS_MODE = ("--logprobs-mode", "raw_logits")

# More of the likeliest tokens than can lie within a tie's bound of each other.
_TOP_LOGITS = 10


# vLLM's histogram of TTFTs: its sum and count before and after a request that has the engine to itself.
_TTFT_SERIES = "vllm:time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """`token_ids` of the answer and, for each, the logits of the likeliest tokens at its place."""

    token_ids: tuple[int, ...]
    top_logits: tuple[dict[int, float], ...]
    ttft_s: float | None = None
    """From the request's arrival to its first token, by the engine's own metric; None if not reported."""


def reference_deployment(deployment: Deployment) -> Deployment:
    """`deployment` reduced to one engine, "reference", in the place of its first decode instance.

    It has a folder of its own, so that its log doesn't overwrite another one's.
    """
    decode = deployment.with_role("decode")[0]
    instance = replace(decode, name=REFERENCE_NAME, roles=("prefill", "decode"), tls=False)
    hardware = deployment.cluster_of(decode).hardware
    cluster = Cluster(name=decode.cluster, kind="pd", hardware=hardware, instances=(instance,))
    return replace(deployment, name=f"{deployment.name}-{REFERENCE_NAME}", clusters=(cluster,), links=())


def reference_command(deployment: Deployment, instance: Instance) -> EngineCommand:
    """How to start `instance` as a plain vLLM: the same arguments, no connector, no events, our logits processor.

    What it reports as logprobs are logits.
    """
    command = vllm_command(deployment, instance)
    argv = list(command.argv)
    if _EVENTS_FLAG in argv:
        # Nobody listens to a single engine.
        at = argv.index(_EVENTS_FLAG)
        del argv[at : at + 2]
    at = argv.index("--kv-transfer-config")
    argv[at : at + 2] = ["--logits-processors", _LOGITS_PROCESSOR, *_LOGITS_MODE]
    return replace(command, argv=tuple(argv))


async def complete_alike(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    last_token_alone: bool = True,
) -> ReferenceAnswer:
    """Greedy answer to `prompt`, split as the answer was that it is compared with.

    Args:
        last_token_alone: the last prompt token is computed alone, as a decode engine does after a transfer. Without
            it, it is computed with what is before it, as by an engine that got nothing over a link.

    Raises:
        RequestFailedError: an error status, an answer without what was asked for, or none in time.
    """
    async with answering("the plain engine"):
        asked = {"model": model, "prompt": prompt, "add_special_tokens": True}
        ids = (await post_json(session, f"{url}/tokenize", asked))["tokens"]
    before = await _ttfts(session, url)
    forced = ids[-1:] if last_token_alone else []
    body = greedy_body(
        model,
        ids[: len(ids) - len(forced)],
        len(forced) + max_tokens,
        logprobs=_TOP_LOGITS,
        return_tokens_as_token_ids=True,
        vllm_xargs={_FORCED_TOKENS_ARG: forced},
    )
    async with answering("the plain engine"):
        answer = await post_json(session, f"{url}/v1/completions", body)
    try:
        choice = answer["choices"][0]
        token_ids = tuple(choice["token_ids"])
        logits = tuple(
            {int(token.removeprefix("token_id:")): float(value) for token, value in at_position.items()}
            for at_position in choice["logprobs"]["top_logprobs"]
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RequestFailedError(f"the plain engine's answer lacks what was asked for: {error!r}") from error
    first = len(forced)
    complete = len(token_ids) == len(logits) == first + max_tokens
    if not complete or token_ids[:first] != tuple(forced):
        raise RequestFailedError(
            f"the plain engine must answer with tokens {forced} and {max_tokens} more, not {token_ids}"
        )
    return ReferenceAnswer(token_ids[first:], logits[first:], _one_ttft(before, await _ttfts(session, url)))


async def _ttfts(session: aiohttp.ClientSession, url: str) -> tuple[float, float] | None:
    """Sum in seconds and count of all TTFTs so far; None if the engine does not report them."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        asked = session.get(f"{url}/metrics", allow_redirects=False)
        async with asyncio.timeout(_METRICS_TIMEOUT_S), asked as response:
            text = (await read_bounded(response)).decode() if response.status == 200 else ""
        families = list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, TimeoutError, ValueError):
        # A figure beside the answers; they don't depend on it.
        return None
    samples = [sample for family in families if family.name == _TTFT_SERIES for sample in family.samples]
    totals = {
        ending: sum(sample.value for sample in samples if sample.name == f"{_TTFT_SERIES}_{ending}")
        for ending in ("sum", "count")
    }
    return (totals["sum"], totals["count"]) if samples else None


def _one_ttft(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The TTFT that one request added; None if that is not known."""
    if after is None:
        return None
    sum_s, count = before or (0.0, 0.0)
    return after[0] - sum_s if after[1] - count == 1 else None
