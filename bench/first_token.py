"""How soon the first token comes from the engine that prefills.

Two real vLLM servers with tiny models and the gateway, all on this machine; the link is the deployment file's, paced by
the senders. The models write printable characters alone, one a token, so that each token is an event of the stream.

A hybrid's prompt over 200 Mbit/s: TTFT through the gateway against what the prefill engine counts for the same request,
since prefills on CPUs take longer at one time than at another.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_ports
from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.weights import tiny_weights

# As the tests' stacks.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.integration.introduction import is_introduced

FAR, HOME = "far-prefill-0", "home-0"
ANSWER_TOKENS = 64
GOAL_S = 0.050
_FAMILY = "qwen3-next"
_READY_S = 240.0
_ASK_S = 600.0
_PRINTABLE = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as its client had it."""

    text: str
    times_s: list[float]
    """From the request to each token."""

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens."""
        return [later - sooner for sooner, later in zip(self.times_s, self.times_s[1:], strict=False)]


def checkpoint(directory: Path) -> Path:
    """The tiny Qwen3-Next. No token is likeliest that is no printable character."""
    from safetensors.torch import save_file

    config = tiny_config(_FAMILY)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, config["max_position_embeddings"])
    weights = tiny_weights(_FAMILY, config)
    head = weights["lm_head.weight"]
    head[: _PRINTABLE.start] = 0
    head[_PRINTABLE.stop :] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_deployment(directory: Path, bandwidth: str, gateway: Mapping[str, Any]) -> Path:
    """One PrfaaS prefill engine, and one that decodes."""
    ports = iter(free_ports(6))

    def instance(name: str, roles: Sequence[str]) -> dict[str, object]:
        place = {"host": "127.0.0.1", "http_port": next(ports), "kv_port": next(ports)}
        return {"name": name, "roles": list(roles), **place}

    document = {
        "name": "first-token",
        "model": {"served_name": "tiny", "path": str(directory / "model"), "max_model_len": 20_000},
        "clusters": [
            {"name": "far", "kind": "prfaas", "hardware": "cpu", "instances": [instance(FAR, ["prefill"])]},
            {
                "name": "home",
                "kind": "pd",
                "hardware": "cpu",
                "instances": [instance(HOME, ["prefill", "decode"])],
            },
        ],
        "links": [{"source": "far", "target": "home", "bandwidth": bandwidth, "connections": 4}],
        "routing": {"policy": "offload_all"},
        # An engine that starves on a busy machine is slow, not frozen.
        "control": {"threshold_period_s": 3600, "allocation": False, "silence_s": 60},
        "gateway": {"host": "127.0.0.1", "port": next(ports), "route_header": "full", **gateway},
        "engine": {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 4,
            "kv_cache_gib": 1,
            "staging": "512 MiB",
        },
    }
    checkpoint(directory / "model")
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


@contextlib.contextmanager
def running(path: Path, home: Path, env: Mapping[str, str] | None = None) -> Iterator[Deployment]:
    """Engines and gateway, ready; everything has ended afterwards. `env`: over that of engines."""
    deployment = load_deployment(path, state_dir=home)
    with RunningEngines(deployment, extra_env=env) as engines:
        engines.wait_ready(_READY_S)
        with (path.parent / "gateway.log").open("wb") as log:
            gateway = subprocess.Popen(
                [sys.executable, "-m", "prfaas.cli.main", "serve", str(path)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PRFAAS_HOME": str(home)},
            )
        try:
            wait_introduced(deployment, path.parent / "gateway.log")
            yield deployment
        finally:
            gateway.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.wait(10)
            gateway.kill()
            gateway.wait()


def wait_introduced(deployment: Deployment, log: Path) -> None:
    """Until the gateway has every engine, and no short prompt of its own is computed there. Raises SystemExit."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{deployment.gateway.url}/health", timeout=5) as answer,
        ):
            if is_introduced(log) and set(json.load(answer)["instances"].values()) == {"up"}:
                return
        time.sleep(0.3)
    raise SystemExit("the gateway did not start; its log is gateway.log")


def prompt(seed: int, tokens: int) -> list[int]:
    """Random printable characters: no two prompts share a prefix."""
    draw = random.Random(seed)
    return [draw.choice(_PRINTABLE) for _ in range(tokens)]


def streamed(url: str, ids: Sequence[int], **fields: Any) -> Streamed:
    """The answer of a gateway or an engine."""
    body = {
        "model": "tiny",
        "prompt": list(ids),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | fields).encode(), {"Content-Type": "application/json"}
    )
    begun_s, text, times_s = time.perf_counter(), "", []
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the answer broke off: {event}")
            piece = event["choices"][0]["text"]
            # A character is a token.
            times_s += [time.perf_counter() - begun_s] * len(piece)
            text += piece
    return Streamed(text, times_s)


def first_token(directory: Path, tokens: int, rounds: int, bandwidth: str) -> dict[str, Any]:
    """TTFT through the gateway, and what the prefill engine takes of it."""
    path = write_deployment(directory, bandwidth, {"first_token": "prefill"})
    with running(path, directory / "state") as deployment:
        url, far, home = (
            deployment.gateway.url,
            deployment.instance(FAR).url,
            deployment.instance(HOME).url,
        )
        # Connections, memory and code are warm afterwards.
        streamed(url, prompt(1, tokens))
        own_s, ttft_s, second_s, equal = [], [], [], 0
        for number in range(rounds):
            ids, before_s = prompt(10 + number, tokens), engine_ttft_s(far)
            ours = streamed(url, ids)
            own_s.append(engine_ttft_s(far) - before_s)
            ttft_s.append(ours.times_s[0])
            second_s.append(ours.gaps_s[0])
            # Not what came over the link.
            equal += ours.text == streamed(home, ids, cache_salt="reference").text
            print(f"first token: {ours.times_s[0]:.3f} s, the engine's {own_s[-1]:.3f} s", file=sys.stderr)
    return {
        "row": "first token",
        "model": "hybrid",
        "tokens": tokens,
        "bandwidth": bandwidth,
        "own_ttft_s": statistics.median(own_s),
        "ttft_s": statistics.median(ttft_s),
        "beyond_s": statistics.median(all_s - own for all_s, own in zip(ttft_s, own_s, strict=True)),
        "second_token_s": statistics.median(second_s),
        "equal_answers": equal,
        "rounds": rounds,
    }


def engine_ttft_s(url: str) -> float:
    """Seconds from an engine's requests to their first tokens, as it counts them itself, of all requests so far."""
    return metric(url, "vllm:time_to_first_token_seconds_sum")


def metric(url: str, name: str) -> float:
    """The sum of a series that a server tells."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_000, metavar="N", help="of the hybrid's prompts")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures, goals = [], []
    with tempfile.TemporaryDirectory() as folder:
        found = first_token(Path(folder) / "first", asked.tokens, asked.rounds, "200 Mbit/s")
        figures.append(found)
        goals.append(goal("TTFT beyond the prefill engine's own", found["beyond_s"], "s", GOAL_S))
    if asked.json:
        print(json.dumps({"figures": figures, "goals": goals}, indent=2))
        return
    for figure in figures:
        print(figure["row"], f"({figure['model']}, {figure['tokens']} tokens, {figure['bandwidth']})")
        for key, value in figure.items():
            if isinstance(value, float):
                print(f"  {key:24} {value:8.3f}")
        if "equal_answers" in figure:
            print(f"  {'equal answers':24} {figure['equal_answers']:8} of {figure['rounds']}")
    for each in goals:
        print(f"{each['name']}: {each['value']:.3f} {each['unit']}, goal {each['goal']}: {each['met']}")


def goal(name: str, value: float, unit: str, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": limit, "met": value <= limit}


if __name__ == "__main__":
    main()
