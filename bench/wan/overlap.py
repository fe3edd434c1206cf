"""How much of a KV transfer a client notices: real vLLM at both ends of an emulated line."""

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.core.deployment import Deployment
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.weights import tiny_weights
from prfaas.tools.demo.client import DemoAnswer, stream_completion
from prfaas.tools.demo.compare import Equality, compare
from wan.laboratory import Laboratory, LineSettings
from wan.stack import (
    FAR,
    GATEWAY_HOST,
    GATEWAY_PORT,
    HOME,
    SERVED_NAME,
    WanStack,
    engines_of,
    halves_of_the_cores,
    write_deployment,
)

RTT_S = 0.030
ANSWER_TOKENS = 16
CHUNK_TOKENS = 1024
_WATCH_S = 0.01
# Half of what vLLM reserves otherwise: two engines share the memory of a small machine.
_KV_CACHE_GIB = 1
_MAX_MODEL_LEN = 20_000
_FORCED_TOKENS_ARG = "forced_first_tokens"
_LOGITS_PROCESSOR = "prfaas.serving.engines.vllm.reference:ForcedFirstTokens"
_TOP_LOGITS = 10

# 16 KiB of KV per token: as many bytes per second of prefill as a large dense model makes.
DENSE: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True, slots=True)
class OverlapTrial:
    """A prompt over a line."""

    name: str
    model: str
    """`dense` or `hybrid`."""
    tokens: int
    rate_bits_per_s: float
    loss: float = 0.0
    goal_share: float = 0.02
    goal_s: float = 0.1
    """Exposed time at most: this share of the ideal time, and so many seconds more."""

    @property
    def line(self) -> LineSettings:
        return LineSettings.of_round_trip(self.rate_bits_per_s, RTT_S, loss=self.loss)


TRIALS = (
    OverlapTrial("dense-2k", "dense", 2_000, 200e6),
    OverlapTrial("dense-4k", "dense", 4_000, 200e6),
    OverlapTrial("dense-16k", "dense", 16_000, 200e6),
    OverlapTrial("dense-8k-loss", "dense", 8_000, 1e9, loss=0.001),
    OverlapTrial("hybrid-16k", "hybrid", 16_000, 200e6, goal_share=0.0),
)


@dataclass(frozen=True, slots=True)
class OverlapRound:
    """One prompt, the prefill of another one of its length just before, and the time that was exposed."""

    ttft_s: float
    prefill_s: float
    """The producer's answer of one token, asked without the line."""
    busy_prefill_s: float
    """The same while programs without an aim use the cores of home: more, where cores are not independent."""
    kv_bytes: int
    ideal_s: float
    exposed_s: float
    busy_exposed_s: float
    """Beyond the ideal with that prefill."""
    hop_s: float
    """From the prefill's start to its answer, in the measured request."""
    transfer_s: float
    """From the prefill's start to the last byte."""
    first_bytes_s: float
    """From the request until its first KV was on the line."""
    last_bytes_s: float
    """From the request until its last KV had crossed the line, without the delay."""
    equality: str


def run(
    trials: Sequence[OverlapTrial], rounds: int, directory: Path, *, encryption: bool
) -> list[dict[str, Any]]:
    """Rows of the table: the rounds of each trial and their medians. Trials of one model and rate share engines."""
    rows = []
    for model, rate_bits_per_s in dict.fromkeys((trial.model, trial.rate_bits_per_s) for trial in trials):
        together = [t for t in trials if (t.model, t.rate_bits_per_s) == (model, rate_bits_per_s)]
        folder = directory / f"{model}-{rate_bits_per_s / 1e6:.0f}"
        folder.mkdir(parents=True)
        with running(folder, model, rate_bits_per_s, encryption=encryption) as stack:
            seeds = iter(range(10**6))
            for trial in together:
                stack.laboratory.change(loss=trial.loss)
                one_round(stack, trial, next(seeds))  # connections, memory and code are warm afterwards
                measured = []
                for _ in range(rounds):
                    measured.append(one_round(stack, trial, next(seeds)))
                    print(trial.name, json.dumps(asdict(measured[-1])), file=sys.stderr, flush=True)
                rows.append(summary(trial, measured))
    return rows


@contextlib.contextmanager
def running(folder: Path, model: str, rate_bits_per_s: float, *, encryption: bool) -> Iterator[WanStack]:
    """Engines, each site on cores of its own, and the gateway; the line has no loss yet."""
    line = LineSettings.of_round_trip(rate_bits_per_s, RTT_S)
    engines = engines_of(1, [("prefill", "decode")])
    with Laboratory({FAR: 1, HOME: 1}, line) as laboratory:
        deployment = deployment_of(folder, laboratory, engines, model, line, encryption=encryption)
        stack = WanStack(laboratory, deployment, engines)
        with stack.started(halves_of_the_cores()):
            yield stack


def deployment_of(
    folder: Path, laboratory: Laboratory, engines: Any, model: str, line: LineSettings, *, encryption: bool
) -> Deployment:
    return write_deployment(
        folder,
        laboratory,
        engines,
        model=checkpoint(folder / "model", model),
        max_model_len=_MAX_MODEL_LEN,
        bandwidth_bits_per_s=line.goodput_bits_per_s,
        rtt_s=RTT_S,
        encryption=encryption,
        clusters={FAR: {"hardware": "cpu"}, HOME: {"hardware": "cpu"}},
        routing={"policy": "offload_all"},
        # An engine that starves on a busy machine is slow, not frozen.
        control={"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        engine={
            "max_num_batched_tokens": CHUNK_TOKENS,
            "max_num_seqs": 4,
            "kv_cache_gib": _KV_CACHE_GIB,
            "staging": "512 MiB",
            # Logits in place of logprobs: only they tell how coarse bf16 was where two answers differ.
            "extra_args": [*("--logits-processors", _LOGITS_PROCESSOR), *("--logprobs-mode", "raw_logits")],
        },
    )


def checkpoint(directory: Path, model: str) -> Path:
    """The tiny Qwen3-Next for `hybrid`: 1 KiB of KV per token and 402 KiB of state; for `dense`, see `DENSE`."""
    from safetensors.torch import save_file

    family = "qwen3" if model == "dense" else "qwen3-next"
    config = tiny_config(family) | dict(DENSE if model == "dense" else {})
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, config["max_position_embeddings"])
    save_file(tiny_weights(family, config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def one_round(stack: WanStack, trial: OverlapTrial, seed: int) -> OverlapRound:
    """The prefill alone, the prompt through the gateway, and what plain vLLM answers to it."""
    prefill_s = producer_prefill_s(stack, text(seed * 3, trial.tokens))
    with busy_home():
        busy_prefill_s = producer_prefill_s(stack, text(seed * 3 + 1, trial.tokens))
    prompt = text(seed * 3 + 2, trial.tokens)
    answer, carried = through_gateway(stack, prompt)
    if answer.route.route != "offload" or answer.route.kv_bytes == 0:
        raise SystemExit(f"{trial.name}: the prompt was not offloaded: {answer.route}")
    link_s = answer.route.kv_bytes * 8 / trial.line.goodput_bits_per_s
    ideal_s = max(prefill_s, link_s) + RTT_S
    return OverlapRound(
        ttft_s=answer.ttft_s,
        prefill_s=prefill_s,
        busy_prefill_s=busy_prefill_s,
        kv_bytes=answer.route.kv_bytes,
        ideal_s=ideal_s,
        exposed_s=answer.ttft_s - ideal_s,
        busy_exposed_s=answer.ttft_s - max(busy_prefill_s, link_s) - RTT_S,
        hop_s=answer.route.prefill_s or 0.0,
        transfer_s=answer.route.transfer_s or 0.0,
        first_bytes_s=time_of_share(carried, 0.001),
        last_bytes_s=time_of_share(carried, 0.999),
        equality=equality(stack, prompt, answer).value,
    )


def text(seed: int, tokens: int) -> str:
    """Random printable characters: a tiny model's token is a byte, so no two prompts share a prefix."""
    draw = random.Random(seed)
    return "".join(chr(draw.randrange(0x21, 0x7F)) for _ in range(tokens))


def through_gateway(stack: WanStack, prompt: str) -> tuple[DemoAnswer, list[tuple[float, int]]]:
    """The answer; and how many bytes had crossed the line towards home, by the time since the request."""
    carried: list[tuple[float, int]] = []

    async def watch(began_s: float) -> None:
        while True:
            now_s = time.monotonic() - began_s
            carried.append((now_s, stack.laboratory.counters(FAR, HOME).carried_bytes))
            await asyncio.sleep(_WATCH_S)

    async def ask() -> DemoAnswer:
        async with aiohttp.ClientSession() as session:
            watcher = asyncio.create_task(watch(time.monotonic()))
            url = f"http://127.0.0.1:{GATEWAY_PORT}"
            try:
                return await stream_completion(session, url, SERVED_NAME, prompt, ANSWER_TOKENS)
            finally:
                watcher.cancel()

    with stack.laboratory.inside(GATEWAY_HOST):
        return asyncio.run(ask()), carried


def time_of_share(carried: Sequence[tuple[float, int]], share: float) -> float:
    """When this share of all that crossed in the time had crossed."""
    first, last = carried[0][1], carried[-1][1]
    return next(at_s for at_s, nbytes in carried if nbytes - first >= share * (last - first))


def producer_prefill_s(stack: WanStack, prompt: str) -> float:
    """What the producer takes for an answer of one token, with nothing to send."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began_s = time.perf_counter()
    status, answer = stack.ask_engine("far-prefill-0", "/v1/completions", body)
    if status != 200:
        raise SystemExit(f"the producer answered {status}: {answer}")
    return time.perf_counter() - began_s


@contextlib.contextmanager
def busy_home() -> Iterator[None]:
    """Each core of home is used by a program that does nothing."""
    spinners = []
    try:
        for core in halves_of_the_cores()[HOME]:
            spinners.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            os.sched_setaffinity(spinners[-1].pid, {core})
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def equality(stack: WanStack, prompt: str, answer: DemoAnswer) -> Equality:
    """Compared with the engine at home, which computes the whole prompt itself, with the same split."""
    ids = list(prompt.encode())
    body = {
        "model": SERVED_NAME,
        "prompt": ids[:-1],
        "max_tokens": ANSWER_TOKENS + 1,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _TOP_LOGITS,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        # Not what came over the line.
        "cache_salt": "reference",
        "vllm_xargs": {_FORCED_TOKENS_ARG: [ids[-1]]},
    }
    status, reference = stack.ask_engine("home-0", "/v1/completions", body)
    if status != 200:
        raise SystemExit(f"the plain engine answered {status}: {reference}")
    choice = reference["choices"][0]
    logits = [
        {int(token.removeprefix("token_id:")): value for token, value in place.items()}
        for place in choice["logprobs"]["top_logprobs"]
    ]
    return compare(answer.token_ids, choice["token_ids"][1:], logits[1:]).equality


def summary(trial: OverlapTrial, rounds: Sequence[OverlapRound]) -> dict[str, Any]:
    """Medians, the worst round, and the goal."""
    exposed_s = statistics.median(each.exposed_s for each in rounds)
    goal_s = statistics.median(trial.goal_share * each.ideal_s for each in rounds) + trial.goal_s
    return {
        "trial": trial.name,
        "tokens": trial.tokens,
        "rate_mbit_per_s": trial.rate_bits_per_s / 1e6,
        "loss": trial.loss,
        "kv_mb": rounds[0].kv_bytes / 1e6,
        "prefill_s": statistics.median(each.prefill_s for each in rounds),
        "busy_prefill_s": statistics.median(each.busy_prefill_s for each in rounds),
        "ideal_s": statistics.median(each.ideal_s for each in rounds),
        "ttft_s": statistics.median(each.ttft_s for each in rounds),
        "first_bytes_s": statistics.median(each.first_bytes_s for each in rounds),
        "last_bytes_s": statistics.median(each.last_bytes_s for each in rounds),
        "exposed_s": exposed_s,
        "busy_exposed_s": statistics.median(each.busy_exposed_s for each in rounds),
        "exposed_s_worst": max(each.exposed_s for each in rounds),
        "goal_s": goal_s,
        "met": exposed_s <= goal_s,
        "equal": all(each.equality != Equality.NO for each in rounds),
        "equalities": [each.equality for each in rounds],
        "rounds": [asdict(each) for each in rounds],
    }


def goals(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one trial."""
    return [
        {
            "name": f"{row['trial']}: time exposed",
            "value": row["exposed_s"],
            "unit": "s",
            "goal": row["goal_s"],
            "met": row["met"],
        },
        {
            "name": f"{row['trial']}: answers equal to plain vLLM",
            "value": sum(each != Equality.NO for each in row["equalities"]),
            "unit": "answers",
            "goal": len(row["equalities"]),
            "met": row["equal"],
        },
    ]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        print("                     prefill s          on the line s               exposed s")
        print(
            "trial             MB alone home busy  ideal  first  last   TTFT  median worst home busy  goal  tokens"
        )
    for row in rows:
        print(
            f"{row['trial']:14} {row['kv_mb']:5.1f} {row['prefill_s']:5.2f} {row['busy_prefill_s']:9.2f}"
            f" {row['ideal_s']:6.2f} {row['first_bytes_s']:6.2f} {row['last_bytes_s']:5.2f} {row['ttft_s']:6.2f}"
            f" {row['exposed_s']:7.3f} {row['exposed_s_worst']:5.3f} {row['busy_exposed_s']:9.3f} {row['goal_s']:5.3f}"
            f"  {'equal' if row['equal'] else 'DIFFERENT'}{'' if row['met'] else '  (missed)'}"
        )
