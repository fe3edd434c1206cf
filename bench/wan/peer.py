"""The same trial with a pair of engines that vLLM's own NixlConnector joins, as its documentation describes it.

It needs the package nixl in the environment that runs the bench. UCX carries the KVCache over TCP.
"""

import contextlib
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.engines.command import EngineCommand, vllm_command
from wan.laboratory import Laboratory
from wan.overlap import CHUNK_TOKENS, RTT_S, OverlapTrial, deployment_of, producer_prefill_s, text
from wan.stack import FAR, HOME, SERVED_NAME, WanStack, engines_of, halves_of_the_cores

_SIDE_CHANNEL_PORT = 5600
# UCX looks for network devices in /sys, which shows those of the namespace in which it was mounted.
_WITH_OWN_DEVICES = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
_PRODUCER, _CONSUMER = "far-prefill-0", "home-0"


@dataclass(frozen=True, slots=True)
class PeerRound:
    """One prompt through the pair of engines; the ideal is that of `OverlapRound`."""

    ttft_s: float
    prefill_s: float
    kv_bytes: int
    """What crossed the line for it, without TCP's and IP's headers."""
    ideal_s: float
    exposed_s: float


def missing_peer() -> str | None:
    """What this environment lacks, as a sentence; None: nothing."""
    if importlib.util.find_spec("nixl") is None:
        return "trials with NIXL need the package nixl in this Python's environment"
    return None


def run(trials: Sequence[OverlapTrial], rounds: int, directory: Path) -> list[dict[str, Any]]:
    """Rows like those of `overlap.run`."""
    rows = []
    for trial in trials:
        folder = directory / f"nixl-{trial.name}"
        folder.mkdir(parents=True)
        with running(folder, trial) as stack:
            draw = random.Random(0)
            # A CPU engine asks for its matrix unit (AMX) in its first prefill; a decode before that ends in SIGILL.
            plain = {"model": SERVED_NAME, "prompt": text(0, CHUNK_TOKENS), "max_tokens": 1}
            asked(stack, _CONSUMER, plain)
            one_round(stack, trial, draw)
            measured = []
            for _ in range(rounds):
                measured.append(one_round(stack, trial, draw))
                print(f"nixl {trial.name}", json.dumps(asdict(measured[-1])), file=sys.stderr, flush=True)
        rows.append(
            {
                "trial": trial.name,
                "exposed_s": statistics.median(each.exposed_s for each in measured),
                "ttft_s": statistics.median(each.ttft_s for each in measured),
                "ideal_s": statistics.median(each.ideal_s for each in measured),
                "rounds": [asdict(each) for each in measured],
            }
        )
    return rows


@contextlib.contextmanager
def running(folder: Path, trial: OverlapTrial) -> Iterator[WanStack]:
    engines = engines_of(1, [("prefill", "decode")])
    with Laboratory({FAR: 1, HOME: 1}, trial.line) as laboratory:
        deployment = deployment_of(folder, laboratory, engines, trial.model, trial.line, encryption=False)
        stack = WanStack(laboratory, deployment, engines, command=nixl_command)
        with stack.started(halves_of_the_cores(), gateway=False):
            yield stack


def nixl_command(deployment: Deployment, instance: Instance) -> EngineCommand:
    """The engine of the deployment with the other connector."""
    command = vllm_command(deployment, instance)
    argv = list(command.argv)
    argv[argv.index("--kv-transfer-config") + 1] = json.dumps(
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    )
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": instance.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_CHANNEL_PORT),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "wan0",
    }
    return replace(command, argv=(*_WITH_OWN_DEVICES, *argv), env={**command.env, **env})


def one_round(stack: WanStack, trial: OverlapTrial, draw: random.Random) -> PeerRound:
    """The prefill alone, then the prompt through both engines, asked from home."""
    prefill_s = producer_prefill_s(stack, text(draw.randrange(1 << 30), trial.tokens))
    prompt = text(draw.randrange(1 << 30), trial.tokens)
    before = stack.laboratory.counters(FAR, HOME)
    began_s = time.perf_counter()
    body: dict[str, Any] = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    prefilled = asked(
        stack,
        _PRODUCER,
        body | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )
    asked(stack, _CONSUMER, body | {"kv_transfer_params": prefilled["kv_transfer_params"]})
    ttft_s = time.perf_counter() - began_s
    after = stack.laboratory.counters(FAR, HOME)
    segments = after.carried_segments - before.carried_segments
    kv_bytes = after.carried_bytes - before.carried_bytes - 52 * segments
    ideal_s = max(prefill_s, kv_bytes * 8 / trial.line.goodput_bits_per_s) + RTT_S
    return PeerRound(ttft_s, prefill_s, kv_bytes, ideal_s, ttft_s - ideal_s)


def asked(stack: WanStack, engine: str, body: Mapping[str, Any]) -> Any:
    instance = stack.deployment.instance(engine)
    status, answer = stack.ask("home-0", instance.http_port, "/v1/completions", body, address=instance.host)
    if status != 200:
        raise SystemExit(f"{engine} answered {status}: {answer}")
    return answer


def goals(row: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours in the same run, if it was among the trials, is to be a tenth of the peer's."""
    return [
        {
            "name": f"{row['trial']}: time exposed, over that of NIXL",
            "value": each["exposed_s"] / row["exposed_s"],
            "unit": "",
            "goal": 0.1,
            "met": each["exposed_s"] <= 0.1 * row["exposed_s"],
        }
        for each in ours
        if each["trial"] == row["trial"]
    ]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(
            f"NIXL, {row['trial']}: ideal {row['ideal_s']:.2f} s, TTFT {row['ttft_s']:.2f} s, "
            f"exposed {row['exposed_s']:.2f} s"
        )
