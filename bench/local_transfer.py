"""What moves KVCache inside a PD cluster: our transport beside vLLM's NIXL connector, on real engines of this machine.

    python bench/local_transfer.py [--model NAME] [--tokens N ...] [--rounds N] [--json]

Example: python bench/local_transfer.py --tokens 1024 4096 --rounds 6

Needs the package nixl (`pip install '.[nixl]'`); without it only our transport is measured. Two engines run at a
time, a prefill and a decode engine, behind a gateway. UCX carries NIXL's bytes over TCP.

Exposed time is what a prompt waits after its prefill until the KVCache is at the decode engine. It and the time to
first token are medians, and both ways answer the same prompts: their tokens are compared.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from ports import free_ports
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.route_header import ROUTE_HEADER, RouteHeader
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES

WAYS = ("prfaas", "nixl")
ANSWER_TOKENS = 16
READY_S = 600.0
REQUEST_S = 300.0
LONGEST_TOKENS = 32768
TOLD_LINES = 20


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's way."""

    token_ids: tuple[int, ...]
    ttft_s: float
    prefill_s: float
    exposed_s: float
    kv_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-next", choices=sorted(TINY_MODEL_NAMES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="prompts' lengths")
    parser.add_argument("--rounds", type=int, default=6, help="prompts of each length")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    options = parser.parse_args()
    ways = WAYS if importlib.util.find_spec("nixl") is not None else WAYS[:1]
    measured: dict[str, dict[int, list[Answered]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            measured[way] = measure(Path(folder) / way, way, options.model, options.tokens, options.rounds)
    figures = figures_of(measured)
    if options.json:
        print(json.dumps({"figures": figures, "goals": goals_of(measured)}, indent=2))
        return
    for row in figures:
        print(
            f"{row['way']:>7}, {row['tokens']:,} tokens: {row['kv_bytes'] / 1e6:.1f} MB, exposed "
            f"{row['exposed_s'] * 1e3:.1f} ms, TTFT {row['ttft_s'] * 1e3:.0f} ms, "
            f"prefill {row['prefill_s'] * 1e3:.0f} ms"
        )


def figures_of(measured: dict[str, dict[int, list[Answered]]]) -> list[dict[str, Any]]:
    return [
        {
            "way": way,
            "tokens": tokens,
            "kv_bytes": rounds[-1].kv_bytes,
            **{
                field: statistics.median(getattr(each, field) for each in rounds)
                for field in ("exposed_s", "ttft_s", "prefill_s")
            },
        }
        for way, lengths in measured.items()
        for tokens, rounds in lengths.items()
    ]


def goals_of(measured: dict[str, dict[int, list[Answered]]]) -> list[dict[str, Any]]:
    """The same tokens on both ways."""
    if len(measured) < len(WAYS):
        return []
    ours, theirs = ([each.token_ids for rounds in measured[way].values() for each in rounds] for way in WAYS)
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(ours)
    return [
        {
            "name": "answers with the same tokens on both ways",
            "value": equal,
            "unit": "",
            "goal": 1.0,
            "met": equal == 1.0,
        }
    ]


def measure(
    folder: Path, way: str, model: str, lengths: Sequence[int], rounds: int
) -> dict[int, list[Answered]]:
    """Each length's prompts, one at a time, after one that nobody counts."""
    with running(folder, way, model) as url:
        found: dict[int, list[Answered]] = {}
        for tokens in lengths:
            ask(url, way, prompt(tokens, -1))
            found[tokens] = [ask(url, way, prompt(tokens, number)) for number in range(rounds)]
            print(f"{way}: {tokens} tokens measured", file=sys.stderr, flush=True)
        return found


def prompt(tokens: int, number: int) -> list[int]:
    """The same for both ways; ids of printable bytes."""
    draw = random.Random(f"{tokens}/{number}")
    return [draw.randrange(40, 130) for _ in range(tokens)]


def ask(url: str, way: str, ids: list[int]) -> Answered:
    """One streamed answer; raises SystemExit where it went another way."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    session = requests.Session()
    # Environments with a proxy for the outside would send it what is for this machine.
    session.trust_env = False
    token_ids: list[int] = []
    began_s, ttft_s = time.perf_counter(), 0.0
    with session.post(f"{url}/v1/completions", json=body, stream=True, timeout=REQUEST_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                ttft_s = ttft_s or time.perf_counter() - began_s
                for choice in json.loads(line[6:])["choices"]:
                    token_ids += choice.get("token_ids") or ()
        route = RouteHeader.parse(answer.headers[ROUTE_HEADER])
    if (route.transfer or "prfaas") != way or route.transfer_s is None or route.prefill_s is None:
        raise SystemExit(f"a prompt of {len(ids)} tokens went another way: {answer.headers[ROUTE_HEADER]}")
    exposed_s = route.transfer_s - route.prefill_s
    return Answered(tuple(token_ids), ttft_s, route.prefill_s, exposed_s, route.kv_bytes)


@contextlib.contextmanager
def running(folder: Path, way: str, model: str) -> Iterator[str]:
    """The URL of a gateway before two engines."""
    deployment = written(folder, way, model)
    with RunningEngines(deployment) as engines:
        engines.wait_ready(READY_S)
        with (folder / "gateway.log").open("wb") as log:
            command = [sys.executable, "-m", "prfaas.cli.main", "serve", str(deployment.path)]
            environment = gateway_environment(deployment)
            gateway = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            url = f"http://127.0.0.1:{deployment.gateway.port}"
            await_gateway(url, gateway)
            yield url
        except SystemExit:
            # The folder is gone when somebody reads why the bench has ended.
            tell_end(folder / "gateway.log")
            raise
        finally:
            gateway.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.wait(20)
            gateway.kill()
            gateway.wait()


def gateway_environment(deployment: Deployment) -> dict[str, str]:
    """With the state of this run: elsewhere the gateway would make a key that the engines don't know."""
    return {**os.environ, "PRFAAS_HOME": str(deployment.state_dir)}


def tell_end(log: Path) -> None:
    """The last lines of a log, on stderr."""
    lines = log.read_text(errors="replace").splitlines()[-TOLD_LINES:]
    print(f"the end of {log.name}:", *lines, sep="\n", file=sys.stderr, flush=True)


def await_gateway(url: str, gateway: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + READY_S
    session = requests.Session()
    session.trust_env = False
    while time.monotonic() < deadline_s and gateway.poll() is None:
        with contextlib.suppress(requests.ConnectionError):
            told = session.get(f"{url}/health", timeout=10)
            if told.status_code == 200 and set(told.json()["instances"].values()) == {"up"}:
                return
        time.sleep(0.3)
    raise SystemExit("the gateway did not start")


def written(folder: Path, way: str, model: str) -> Deployment:
    """A PD cluster with one engine of each role."""
    ports = iter(free_ports(8))
    instances = [
        {
            "name": f"home-{role}-0",
            "roles": [role],
            "host": "127.0.0.1",
            "http_port": next(ports),
            "kv_port": next(ports),
            **({"nixl_port": next(ports)} if way == "nixl" else {}),
        }
        for role in ("prefill", "decode")
    ]
    document = {
        "name": f"local-{way}",
        "model": {"served_name": "tiny", "tiny": model, "max_model_len": LONGEST_TOKENS},
        "clusters": [{"name": "home", "kind": "pd", "hardware": "cpu", "instances": instances}],
        "routing": {"policy": "local_only"},
        # An engine that starves on a busy machine is slow, not frozen.
        "control": {"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        "gateway": {
            "host": "127.0.0.1",
            "port": next(ports),
            "admin": {"port": next(ports)},
            "route_header": "full",
            # What is measured is the way of the KVCache.
            "first_token": "decode",
        },
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "kv_cache_gib": 1,
            "staging": "128 MiB",
            "local_transfer": way,
        },
    }
    folder.mkdir(parents=True)
    path = folder / "deployment.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return load_deployment(path, state_dir=folder / "state")


if __name__ == "__main__":
    main()
