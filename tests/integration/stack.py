"""A whole deployment on this machine for tests: real vLLM engines and the gateway, on free ports."""

import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_ports

from prfaas.core.deployment import TOOLS, Deployment, Instance, load_deployment
from prfaas.serving.engines.preparation import ensure_model, port_problem
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.template import EngineTemplates
from prfaas.serving.pool.running import RunningPools
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.tools.demo import reference as demo_reference
from prfaas.tools.demo.compare import Comparison, Equality, compare, tie_bound_nats

from .introduction import is_introduced

# Importing vLLM for these would take ten seconds.
LOGITS_PROCESSOR = demo_reference._LOGITS_PROCESSOR
FORCED_TOKENS_ARG = demo_reference._FORCED_TOKENS_ARG

MODEL = "tiny"
THRESHOLD_TOKENS = 2000
"""Prompts within a fortieth of it go or stay by their number: a threshold has an edge (`edge_factor`)."""
TENANT_HEADER = "x-tenant"

# Of the tiny Qwen3-Next on CPUs.
BLOCK_TOKENS = 256

# Over the environment of engines. The development routes include /reset_prefix_cache; what pytest says of the test that
# runs would make every environment another.
ENGINE_ENV = {"VLLM_SERVER_DEV_MODE": "1", "PYTEST_CURRENT_TEST": ""}

TEMPLATES = EngineTemplates()
"""Have imported vLLM for all tests of this process; conftest.py ends them."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Random printable bytes; ids of the byte-level tokenizer start behind its few special tokens."""
    return [random.Random(seed * 100003 + i).randrange(40, 130) for i in range(tokens)]


# What makes an engine of this stack report logits.
LOGITS: Mapping[str, Any] = {"logprobs": 10, "return_tokens_as_token_ids": True}

# Share of an answer's tokens that an engine must find likeliest, up to a tie, where the prompt was split otherwise.
# Measured over 28 prompts of 24 tokens: 24 with the same split and in another batch; with another split 23 in the
# median and 15 at worst, where a router picked another expert early.
LIKELY_SHARE = 0.5

# Waiting longer costs nothing where nothing is wrong, and a loaded machine may need it.
PATIENCE_S = 180.0


def write_deployment(
    directory: Path,
    *,
    bandwidth: str,
    extra_args: Sequence[str] = (),
    max_model_len: int = 32768,
    staging: str = "64 MiB",
    policy: str = "static_threshold",
    pools: bool = False,
) -> Path:
    """Three engines of the tiny Qwen3-Next: one PrfaaS prefill, one PD prefill, one PD decode."""
    ports = free_ports(10)
    names = (
        ("prfaas-east", "east-prefill-0", "prefill"),
        ("home", "home-prefill-0", "prefill"),
        ("home", "home-decode-0", "decode"),
    )
    clusters: dict[str, list[dict[str, object]]] = {"prfaas-east": [], "home": []}
    for index, (cluster, name, role) in enumerate(names):
        clusters[cluster].append(
            {
                "name": name,
                "roles": [role],
                "host": "127.0.0.1",
                "http_port": ports[index],
                "kv_port": ports[3 + index],
            }
        )
    deployment: dict[str, Any] = {
        "name": directory.name,
        "model": {"served_name": MODEL, "tiny": "qwen3-next", "max_model_len": max_model_len},
        "clusters": [
            {
                "name": "prfaas-east",
                "kind": "prfaas",
                "hardware": "cpu",
                "instances": clusters["prfaas-east"],
            },
            {"name": "home", "kind": "pd", "hardware": "cpu", "instances": clusters["home"]},
        ],
        "links": [
            {"source": "prfaas-east", "target": "home", "bandwidth": bandwidth, "connections": 4},
            {"source": "home", "target": "prfaas-east", "bandwidth": bandwidth, "connections": 2},
        ],
        "routing": {"policy": policy, "threshold_tokens": THRESHOLD_TOKENS},
        # An engine that starves on a busy machine is slow, not frozen: four ranks spin while they wait for each
        # other, which left the other engine without a core for up to five seconds.
        "control": {"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        "transfer": {"progress_deadline_s": 60},
        "security": {"tenant_header": TENANT_HEADER},
        "gateway": {
            "host": "127.0.0.1",
            "port": ports[6],
            "admin": {"port": ports[7]},
            "route_header": "full",
            # Streams and answers in one piece are split at the same token then, and rounded alike.
            "first_token": "decode",
            # Where a prefill takes half a minute, six of them are no overload.
            "limits": {"queue_s": 600},
        },
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.25,
            "staging": staging,
            # Logits in place of logprobs: only they tell how coarse bf16 was where two answers differ.
            "extra_args": [
                *("--logits-processors", LOGITS_PROCESSOR),
                *("--logprobs-mode", "raw_logits"),
                *extra_args,
            ],
        },
    }
    if pools:
        for cluster, port in zip(("prfaas-east", "home"), ports[8:], strict=True):
            place = next(each for each in deployment["clusters"] if each["name"] == cluster)
            place["pool"] = {"memory": "192 MiB", "ssd": "512 MiB", "kv_port": port}
        deployment["pool"] = {"staging": "16 MiB"}
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(deployment))  # JSON is YAML
    return path


@dataclass(frozen=True)
class DemoAnswer:
    """An HTTP answer; `body` is parsed JSON."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def route(self) -> dict[str, str]:
        """`x-prfaas-route` as a dict; the first word is under "route"."""
        first, *rest = self.headers["x-prfaas-route"].split("; ")
        return {"route": first, **dict(item.split("=", 1) for item in rest)}

    @property
    def token_ids(self) -> list[int]:
        return self.tokens_of(0)

    @property
    def top_logits(self) -> list[dict[int, float]]:
        """The logits of the likeliest tokens at each place; ask for them with `LOGITS`."""
        return [
            {int(token.removeprefix("token_id:")): value for token, value in place.items()}
            for place in self.body["choices"][0]["logprobs"]["top_logprobs"]
        ]

    def tokens_of(self, choice: int) -> list[int]:
        """The token ids of one of several samples."""
        ids: list[int] = self.body["choices"][choice]["token_ids"]
        return ids


class Stack:
    """Engines and gateway of one deployment file; use as a context manager."""

    def __init__(self, path: Path, env: Mapping[str, str] | None = None) -> None:
        """`env`: over that of engines."""
        self.path = path
        self.deployment: Deployment = load_deployment(path)
        self.engines = RunningEngines(
            self.deployment, extra_env={**ENGINE_ENV, **(env or {})}, templates=TEMPLATES
        )
        self.pools = RunningPools(self.deployment)
        self._gateway: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Stack":
        try:
            if self.deployment.pools:
                ensure_model(self.deployment)
                self.pools.start()
                self.pools.wait_ready()
            self.engines.start()
            self.engines.wait_ready()
            self._start_gateway()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._gateway is not None:
            self._gateway.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._gateway.wait(10)
            self._gateway.kill()
            self._gateway.wait()
        self.engines.stop()
        self.pools.stop()

    def revive(self, *names: str) -> None:
        """Start those of these engines anew that don't run."""
        dead = [name for name in names if not self.engines.is_running(name)]
        for name in dead:
            wait_ports_free(self.deployment.instance(name))
            self.engines.start(name)
        self.engines.wait_ready()
        health = self.url("gateway", "/health")
        wait_until(
            lambda: all(call(health).body["instances"][name] == "up" for name in names),
            PATIENCE_S,
            f"the gateway knows that {', '.join(names)} are back",
        )

    def _start_gateway(self) -> None:
        path = self.path.parent / "gateway.log"
        with path.open("wb") as log:
            self._gateway = subprocess.Popen(
                [sys.executable, "-m", "prfaas.cli.main", "serve", str(self.path)], stdout=log, stderr=log
            )
        wait_until(self._gateway_is_up, PATIENCE_S, "the gateway answers /health with every engine up")
        wait_until(lambda: is_introduced(path), PATIENCE_S, "the gateway knows how engines make token ids")

    def _gateway_is_up(self) -> bool:
        with contextlib.suppress(OSError):
            answer = call(self.url("gateway", "/health"))
            return bool(answer.status == 200 and set(answer.body["instances"].values()) == {"up"})
        return False

    def url(self, name: str, path: str) -> str:
        """The URL of an instance's HTTP API, or the gateway's; operators' pages are on a port of their own."""
        if name == "gateway" and path.startswith(("/prfaas/", "/metrics")):
            return self.deployment.gateway.admin.url + path
        if name == "gateway":
            return f"http://127.0.0.1:{self.deployment.gateway.port}{path}"
        return f"http://127.0.0.1:{self.deployment.instance(name).http_port}{path}"

    def complete(
        self, prompt: Sequence[int], max_tokens: int = 24, *, tenant: str | None = None, **fields: Any
    ) -> DemoAnswer:
        """A greedy completion of token ids through the gateway."""
        headers = {} if tenant is None else {TENANT_HEADER: tenant}
        body = completion_body(prompt, max_tokens, **fields)
        return call(self.url("gateway", "/v1/completions"), body, headers=headers)

    def explain(self, answer: DemoAnswer) -> str:
        """What the gateway knows of a request, and why it went where it went, as text: pytest shortens all else."""
        return f"{answer.route}\n{json.dumps(self.record(answer), indent=1)}"

    def record(self, answer: DemoAnswer) -> Any:
        """The gateway's record of a request."""
        return call(self.url("gateway", f"/prfaas/requests/{answer.headers['X-Request-Id']}")).body

    def state(self) -> Any:
        """The deployment as the control plane sees it."""
        return call(self.url("gateway", "/prfaas/state")).body

    def blocks_known(self, name: str) -> int:
        """Blocks of full attention that the global index believes the instance to hold."""
        for cluster in self.state()["clusters"].values():
            if name in cluster["instances"]:
                return int(cluster["instances"][name]["blocks"])
        raise AssertionError(name)

    def settle(self) -> None:
        """Wait until events of what has just been computed have reached the index: for a second, nothing came.

        vLLM publishes with its next step and never says that this was all, so only quiet tells.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        before, quiet = None, 0
        while quiet < 4:
            assert time.monotonic() < deadline_s, "the index never came to rest"
            now = [self.blocks_known(each.name) for each in self.deployment.instances]
            quiet = quiet + 1 if now == before else 0
            before = now
            time.sleep(0.25)

    def reference(
        self,
        prompt: Sequence[int],
        max_tokens: int = 24,
        salt: str = "reference",
        engine: str = "home-prefill-0",
        forced: Sequence[int] = (),
    ) -> DemoAnswer:
        """What a plain engine answers with the same split: the last prompt token is computed alone.

        It is made to begin its answer with `forced`.

        The salt keeps its prefix cache apart from that of the requests under test. A request that starts from a
        cached prefix has its like in a second reference with the salt of the first.
        """
        body = reference_body(prompt, max_tokens, salt, forced)
        return call(self.url(engine, "/v1/completions"), body)

    def plain(
        self,
        prompt: Sequence[int],
        max_tokens: int = 24,
        salt: str = "plain",
        engine: str = "home-prefill-0",
        **fields: Any,
    ) -> DemoAnswer:
        """What an engine answers that prefills the whole prompt itself."""
        body = completion_body(
            prompt,
            max_tokens,
            cache_salt=salt,
            vllm_xargs={FORCED_TOKENS_ARG: []},
            **LOGITS,
        )
        return call(self.url(engine, "/v1/completions"), body | fields)

    def check_answer(self, answer: DemoAnswer, reference: DemoAnswer) -> None:
        """For answers whose prompts were split alike: equal tokens, or a first difference within bf16 rounding.

        The reference may start with a forced token. If the answer came with `LOGITS`, each of them must be within
        one step of the reference's as well, as long as the two have the same past.
        """
        assert answer.status == 200, answer.body
        assert reference.status == 200, reference.body
        comparison = self.compare(answer, reference)
        assert comparison.equality is not Equality.NO, comparison
        if answer.body["choices"][0].get("logprobs"):
            forced = len(reference.token_ids) - len(answer.token_ids)
            end = None if comparison.position is None else comparison.position + 1
            pairs = zip(answer.top_logits[:end], reference.top_logits[forced:][:end], strict=True)
            steps = [logit_steps(ours, theirs) for ours, theirs in pairs]
            assert max(steps) <= 1, steps

    def check_offloaded(self, prompts: Sequence[Sequence[int]], *, prefill: str, decode: str) -> None:
        """Of new engines: each prompt is prefilled at one, loaded at the other, and answered as a plain engine does."""
        for ids in prompts:
            answer = self.complete(ids, **LOGITS)
            assert answer.route["prefill"] == prefill and "fallback" not in answer.route, self.explain(answer)
            self.check_answer(answer, self.reference(ids, engine=decode))
            self.wait_clean()
        assert self.metric(decode, "vllm:prfaas_loads_completed_total") == len(prompts)
        assert self.metric(decode, "vllm:prfaas_loads_failed_total") == 0

    @staticmethod
    def compare(answer: DemoAnswer, reference: DemoAnswer) -> Comparison:
        forced = len(reference.token_ids) - len(answer.token_ids)
        return compare(answer.token_ids, reference.token_ids[forced:], reference.top_logits[forced:])

    def check_likely(
        self, *answered: tuple[Sequence[int], Sequence[int]], engine: str = "home-prefill-0"
    ) -> None:
        """For answers whose prompts were split otherwise, or which ran in a batch with others: (prompt, answer).

        A plain engine that is made to answer the same, and to compute the last prompt token alone as disaggregated
        requests do, must find most of these tokens likeliest, each after those before it. Rounding moves single ones
        by any amount, where a router picks another expert; the state of another prompt moves nearly all.
        """
        likely = [self.likely(ids, answer, engine) for ids, answer in answered]
        assert sum(map(sum, likely)) >= LIKELY_SHARE * sum(map(len, likely)), likely

    def likely(self, prompt: Sequence[int], token_ids: Sequence[int], engine: str) -> list[bool]:
        """Of each token of an answer: whether a plain engine that has said those before it finds it likeliest."""
        same = self.reference(prompt, len(token_ids), "likely", engine, token_ids)
        assert same.status == 200, same.body
        assert same.token_ids == [prompt[-1], *token_ids]
        found = []
        for token, logits in zip(token_ids, same.top_logits[1:], strict=True):
            best = max(logits, key=logits.__getitem__)
            found.append(compare([token], [best], [logits]).equality is not Equality.NO)
        return found

    def kv_stats(self, name: str) -> dict[str, Any]:
        """Counters of an engine's receiver, over its KV port."""

        async def ask() -> dict[str, Any]:
            instance = self.deployment.instance(name)
            observer = Observer(
                TOOLS,
                load_key(self.deployment.security.key_file),
                instance.host,
                instance.kv_port,
                f"{name}/0",
            )
            try:
                return await observer.stats()
            finally:
                await observer.close()

        return asyncio.run(ask())

    def metric(self, name: str, metric: str, label: str = "") -> float:
        """Sum of a Prometheus metric's samples at an instance or the gateway; `label`: only those with it."""
        return metric_of(self.url(name, "/metrics"), metric, label)

    def is_clean(self) -> bool:
        """No block, staging byte, transfer or request is in use anywhere."""
        for instance in self.deployment.instances:
            stats = self.kv_stats(instance.name)
            if stats["staging_used_blocks"] or any(
                stats["transfers"][phase] for phase in ("waiting", "receiving", "complete")
            ):
                return False
            for metric in (
                "vllm:kv_cache_usage_perc",
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
            ):
                if self.metric(instance.name, metric):
                    return False
        flights = ("prfaas_gateway_in_flight_requests", "prfaas_gateway_in_flight_transfers")
        return not any(self.metric("gateway", metric) for metric in flights)

    def wait_clean(self, timeout_s: float = PATIENCE_S) -> None:
        wait_until(self.is_clean, timeout_s, "nothing is left over")


def metric_of(url: str, metric: str, label: str = "") -> float:
    """See `Stack.metric`."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line for line in lines if line.startswith((metric + "{", metric + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples if label in line)


def completion_body(prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def reference_body(
    prompt: Sequence[int], max_tokens: int, salt: str, forced: Sequence[int] = ()
) -> dict[str, Any]:
    """What a plain engine is asked for an answer with the same split: see `Stack.reference`."""
    return completion_body(
        prompt[:-1],
        max_tokens + 1,
        vllm_xargs={FORCED_TOKENS_ARG: [prompt[-1], *forced]},
        cache_salt=salt,
        **LOGITS,
    )


def logit_steps(ours: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """The greatest difference of two places' logits, in bf16 steps at their greatest magnitude."""
    shared = ours.keys() & reference.keys()
    if not shared:
        return math.inf
    step = tie_bound_nats(max(map(abs, reference.values()))) / 2
    return max(abs(ours[token] - reference[token]) for token in shared) / step


def call(
    url: str, body: Any = None, timeout_s: float = 300, headers: Mapping[str, str] | None = None
) -> DemoAnswer:
    """GET, or POST of a JSON body; an HTTP error is an answer like any other."""
    request = urllib.request.Request(url, headers={"Content-Type": "application/json", **(headers or {})})
    if body is not None:
        request.data = json.dumps(body).encode()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return DemoAnswer(answer.status, dict(answer.headers), _parsed(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            return DemoAnswer(error.code, dict(error.headers), _parsed(error.read()))


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, *, every_s: float = 0.2) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)


def wait_ports_free(instance: Instance) -> None:
    """Of an engine that was killed, before it is started again."""
    for port in (instance.http_port, *instance.kv_ports):
        wait_until(
            lambda port=port: port_problem("127.0.0.1", port) is None,  # type: ignore[misc]
            PATIENCE_S,
            "the killed engine's port is free",
        )


def running(path: Path, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """For fixtures. `env`: over that of engines."""
    with Stack(path, env) as stack:
        yield stack
