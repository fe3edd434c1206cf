"""A prefill engine and a decode engine on one device, against a plain engine on it.

    python bench/gpu/engines.py MODEL [--device cpu] [--graphs full|piecewise] [--out FOLDER]

Real vLLM servers of a tiny model: Qwen3-Next with MTP, or Kimi Linear (Kimi Delta Attention and MLA). The plain engine
has no connector. The other two have ours, the gateway before them, and loopback between them. What is asked of both:

- Answers to the same prompts, the last prompt token computed alone both times. They are equal, or differ first at a tie
  of bf16; or, where a router picked another expert or drafts split a step otherwise, the decode engine that is made to
  say the same finds most of the tokens likeliest.
- The time of a token (TPOT) of one request, and tokens a second of several: with the connector and without.
- The time of a prefill at the prefill engine, alone and while it sends.

`--device cpu` runs the same where there is no GPU: Triton's kernels are interpreted and there are no graphs, so its
times say nothing. It is the form that this repository's tests run.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.integration import kimi_linear, with_drafter
from tests.integration.shimmed import with_shims
from tests.integration.stack import (
    LIKELY_SHARE,
    TEMPLATES,
    DemoAnswer,
    Stack,
    call,
    completion_body,
    metric_of,
    prompt,
    reference_body,
    write_deployment,
)

from prfaas.core.deployment import load_deployment
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.running import RunningEngines
from prfaas.tools.demo.compare import Equality
from prfaas.tools.demo.reference import REFERENCE_NAME, reference_command, reference_deployment

FAR, HOME = "east-prefill-0", "home-decode-0"
DRAFTED_TOKENS = 1
GPU_SHARE = 0.2
"""Of a GPU's memory, for each engine: tiny models need a fraction of it."""

GRAPHS = {"full": "FULL_AND_PIECEWISE", "piecewise": "PIECEWISE"}

NO_BINARIES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0",
    "VLLM_GDN_DECODE_KERNEL": "triton",
    # Graphs of pieces are captured around attention then: Inductor's would take as long as all the rest, and vLLM's
    # passes over them name compiled operators.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Engines on GPUs take Triton's kernels and torch's where compiled ones may be missing."""


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model, and what vLLM needs to run it on either device."""

    write: Callable[[Path], Path]
    """Its checkpoint into a new folder; returns where it is."""
    shims: tuple[str, ...]
    """Folders of the tests, for CPUs."""
    attention: Mapping[str, str]
    """vLLM's backends of it on GPUs, of those that need no compiled operators."""
    extra_args: tuple[str, ...] = ()
    keeps_prefixes_on_cpus: bool = True


MODELS = {
    "qwen3-next-mtp": Model(
        with_drafter.write_checkpoint,
        ("with_triton", "with_async_scheduling"),
        {"backend": "TRITON_ATTN"},
        (
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTED_TOKENS}),
        ),
    ),
    "kimi-linear": Model(
        kimi_linear.write_checkpoint,
        ("with_kimi_linear",),
        {"backend": "TRITON_MLA", "mla_prefill_backend": "CPU"},
        keeps_prefixes_on_cpus=" amx_tile" in Path("/proc/cpuinfo").read_text(),
    ),
}


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked on a device."""

    prompts: tuple[int, ...]
    """Tokens of each prompt that is answered both ways."""
    answer_tokens: int
    pace_tokens: int
    """Of answers whose tokens are timed."""
    at_once: int
    """So many of them, where the engine's tokens a second are counted."""
    prefill_tokens: int
    prefills: int
    context_tokens: int
    step_tokens: int
    kv_gib: float


LOADS = {
    # Of less than a chunk, of several, and of several with a last one that ends with a block.
    "cuda": Load((700, 5000, 8193), 64, 256, 8, 8192, 6, 16_384, 2048, 1.0),
    "cpu": Load((41, 300), 8, 4, 2, 300, 1, 1024, 1024, 0.25),
}


@dataclass(frozen=True, slots=True)
class Pace:
    """Of an engine that decodes."""

    tpot_ms: float
    tokens_per_s: float
    """Of several requests at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came out for one model."""

    model: str
    device: str
    graphs: str
    prompts: int
    exact: int
    """Answers whose tokens are all those of the plain engine."""
    ties: int
    """Answers that differ first where two tokens were as likely, in bf16."""
    likely_share: float
    """Of all answers' tokens."""
    loaded: int
    loads_failed: int
    without: Pace
    having: Pace
    prefill_ms: float
    prefill_sending_ms: float

    @property
    def problem(self) -> str | None:
        """Why it is not right; None if it is."""
        if self.loads_failed or self.loaded < self.prompts:
            return f"{self.loaded} of {self.prompts} prompts were loaded, {self.loads_failed} loads failed"
        if self.exact + self.ties < self.prompts and self.likely_share < LIKELY_SHARE:
            return f"only {self.likely_share:.0%} of the tokens are those that the model finds likeliest"
        return None


def write(directory: Path, model: Model, load: Load, device: str, graphs: str) -> Path:
    """A deployment of one engine that prefills elsewhere and one that decodes."""
    path = write_deployment(directory, bandwidth="10 Gbit/s", max_model_len=load.context_tokens)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"] |= {"path": str(model.write(directory / "model").resolve())}
    del document["model"]["tiny"]
    document["clusters"][1]["instances"].pop(0)
    engine = document["engine"]
    engine |= {"kv_cache_gib": load.kv_gib, "max_num_batched_tokens": load.step_tokens}
    engine["extra_args"] += model.extra_args
    if device == "cuda":
        for cluster in document["clusters"]:
            cluster["hardware"] = "gpu"
        engine["env"] = NO_BINARIES
        engine["extra_args"] += _gpu_args(model, graphs)
    elif not model.keeps_prefixes_on_cpus:
        # vLLM caches none with MLA on such CPUs, and refuses the block size that it had chosen for them.
        engine["extra_args"] += ["--no-enable-prefix-caching"]
        engine["prefix_cache_retention_tokens"] = load.context_tokens
    path.write_text(json.dumps(document))
    return path


def _gpu_args(model: Model, graphs: str) -> list[str]:
    compilation = {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": GRAPHS[graphs]}
    kernels = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    return [
        *("--gpu-memory-utilization", str(GPU_SHARE)),
        *("--attention-config", json.dumps(model.attention)),
        *("--gdn-prefill-backend", "triton"),
        *("--compilation-config", json.dumps(compilation)),
        *("--ir-op-priority", json.dumps(kernels)),
    ]


def environment(model: Model, device: str) -> dict[str, str]:
    """Over that of engines: the shims of a device."""
    return with_shims("on_cuda") if device == "cuda" else with_shims(*model.shims)


@contextmanager
def plain_engine(path: Path, env: dict[str, str]) -> Iterator[Callable[[], str]]:
    """A plain engine, started; what waits until it answers, and tells its URL."""
    deployment = reference_deployment(load_deployment(path))

    def ready() -> str:
        engines.wait_ready()
        return deployment.instance(REFERENCE_NAME).url

    with RunningEngines(deployment, extra_env=env, command=reference_command, templates=TEMPLATES) as engines:
        yield ready


def asked(url: str, body: dict[str, Any]) -> DemoAnswer:
    """A completion of an engine."""
    answer = call(f"{url}/v1/completions", body)
    if answer.status != 200:
        raise EngineError(f"{url} answers {answer.status} to a completion: {answer.body}")
    return answer


def mean_ms(url: str, metric: str, work: Callable[[], object]) -> float:
    """Mean of what an engine puts into a histogram of seconds while something is done."""
    names = [f"vllm:{metric}_{each}" for each in ("sum", "count")]
    before = [metric_of(f"{url}/metrics", name) for name in names]
    work()
    total_s, count = (
        metric_of(f"{url}/metrics", name) - start for name, start in zip(names, before, strict=True)
    )
    return 1000 * total_s / count if count else 0.0


def pace(url: str, load: Load) -> Pace:
    """How fast an engine decodes, after answers that are not counted."""

    def answers(count: int, seed: int) -> float:
        """Seconds that so many requests at once take."""
        bodies = [
            completion_body(prompt(seed + number, load.prompts[0]), load.pace_tokens)
            for number in range(count)
        ]
        began_s = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda body: asked(url, body), bodies))
        return time.perf_counter() - began_s

    answers(1, 10)
    answers(load.at_once, 20)
    tpot_ms = mean_ms(url, "request_time_per_output_token_seconds", lambda: answers(1, 30))
    took_s = answers(load.at_once, 40)
    return Pace(tpot_ms, load.at_once * load.pace_tokens / took_s)


def prefill_ms(stack: Stack, load: Load) -> tuple[float, float]:
    """Of the prefill engine, alone and while it sends: its own mean time of a prompt."""
    url = stack.deployment.instance(FAR).url

    def alone(seed: int) -> None:
        for number in range(load.prefills):
            asked(url, completion_body(prompt(seed + number, load.prefill_tokens), 1))

    def sending(seed: int) -> None:
        for number in range(load.prefills):
            stack.complete(prompt(seed + number, load.prefill_tokens), 1)
            stack.wait_clean()

    metric = "request_prefill_time_seconds"
    alone(100)
    sending(200)
    return mean_ms(url, metric, lambda: alone(300)), mean_ms(url, metric, lambda: sending(400))


@dataclass(frozen=True, slots=True)
class Plain:
    """What a plain engine says, and how fast."""

    answers: Sequence[DemoAnswer]
    pace: Pace


def check(name: str, device: str, graphs: str, directory: Path) -> Found:
    """All that is asked of a model."""
    model, load = MODELS[name], LOADS[device]
    path, env = write(directory, model, load, device, graphs), environment(model, device)
    prompts = [prompt(870 + seed, tokens) for seed, tokens in enumerate(load.prompts)]

    def plain(url: str) -> Plain:
        bodies = [reference_body(ids, load.answer_tokens, "plain") for ids in prompts]
        return Plain([asked(url, body) for body in bodies], pace(url, load))

    if device == "cuda":
        # Three of them fit a GPU, and start in the time of one.
        with plain_engine(path, env) as ready, Stack(path, env) as stack:
            return compared(name, graphs, stack, prompts, plain(ready()), load)
    with plain_engine(path, env) as ready:
        said = plain(ready())
    with Stack(path, env) as stack:
        return compared(name, "none", stack, prompts, said, load)


def compared(
    name: str, graphs: str, stack: Stack, prompts: Sequence[Sequence[int]], plain: Plain, load: Load
) -> Found:
    """What two engines say, and how fast, beside what a plain one does."""
    answers = [_offloaded(stack, ids, load.answer_tokens) for ids in prompts]
    equalities = [stack.compare(*pair).equality for pair in zip(answers, plain.answers, strict=True)]
    likely = [
        each
        for ids, answer in zip(prompts, answers, strict=True)
        for each in stack.likely(ids, answer.token_ids, HOME)
    ]
    loaded = int(stack.metric(HOME, "vllm:prfaas_loads_completed_total"))
    having = pace(stack.deployment.instance(HOME).url, load)
    alone_ms, sending_ms = prefill_ms(stack, load)
    return Found(
        model=name,
        device="cpu" if graphs == "none" else "cuda",
        graphs=graphs,
        prompts=len(prompts),
        exact=equalities.count(Equality.EXACT),
        ties=equalities.count(Equality.TIE),
        likely_share=statistics.fmean(likely),
        loaded=loaded,
        loads_failed=int(stack.metric(HOME, "vllm:prfaas_loads_failed_total")),
        without=plain.pace,
        having=having,
        prefill_ms=alone_ms,
        prefill_sending_ms=sending_ms,
    )


def _offloaded(stack: Stack, ids: Sequence[int], tokens: int) -> DemoAnswer:
    answer = stack.complete(ids, tokens)
    if answer.status != 200 or answer.route["prefill"] != FAR or "fallback" in answer.route:
        told = stack.explain(answer) if answer.status == 200 else answer.body
        raise EngineError(f"a prompt of {len(ids)} tokens was not prefilled elsewhere: {told}")
    stack.wait_clean()
    return answer


_RAISED = re.compile(r"\b(\w+(?:\.\w+)*(?:Error|Exception): .+)")
_LATER = "Engine core initialization failed"


def reason(error: BaseException, home: Path) -> str:
    """A line: what was raised, and the first thing that an engine's log says was raised in it."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    for log in sorted(home.rglob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            found = _RAISED.search(line)
            if found is not None and _LATER not in line:
                return f"{first} ({log.name}: {found[1]})"
    return first


def table(found: Found) -> str:
    """For people."""
    rows = (
        ("answers of the plain engine", f"{found.exact} of {found.prompts}, {found.ties} more within a tie"),
        ("likeliest tokens", f"{found.likely_share:.0%}"),
        ("prompts loaded", f"{found.loaded}, {found.loads_failed} failed"),
        (
            "TPOT without, with connector",
            f"{found.without.tpot_ms:.2f} ms, {found.having.tpot_ms:.2f} ms",
        ),
        (
            f"tokens a second of {LOADS[found.device].at_once} requests",
            f"{found.without.tokens_per_s:.0f}, {found.having.tokens_per_s:.0f}",
        ),
        (
            "prefill alone, while sending",
            f"{found.prefill_ms:.1f} ms, {found.prefill_sending_ms:.1f} ms",
        ),
    )
    title = f"{found.model} on {found.device}, graphs: {found.graphs}"
    return "\n".join([title, *(f"  {what:<34}{value}" for what, value in rows)])


def main() -> int:
    """Print a table; 1 if something is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda", choices=LOADS, help="where the engines compute")
    parser.add_argument("--graphs", default="full", choices=GRAPHS, help="vLLM's CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("build/gpu/engines"), help="a new folder")
    options = parser.parse_args()
    # Engines end with this process; being asked to end, it tells so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended before it was done"))
    options.out.mkdir(parents=True)
    os.environ["PRFAAS_HOME"] = str(options.out / "home")
    try:
        with TEMPLATES:
            found = check(options.model, options.device, options.graphs, options.out)
    except (EngineError, OSError) as error:
        sys.exit(reason(error, options.out))
    print(table(found))
    (options.out / "found.json").write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    if found.problem is not None:
        print(found.problem, file=sys.stderr)
    return 0 if found.problem is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
