"""The engines, gateway and line that `falsification.py` runs: real vLLM servers in the laboratory of `bench/wan`."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from fidelity_live import OFFLOADED_ABOVE, Depth, driven, first_tokens_s, probes, profiled
from fidelity_stack import (
    EAST,
    EAST_PREFILL,
    ENGINES,
    HOME_DECODE,
    HOME_PREFILL,
    cpu_s,
    engine_section,
    limited_engines,
)
from measured_model import MeasuredModel
from prfaas.core.latency.files import parse_profile, profile_text
from prfaas.core.latency.profile import Curve, DecodeCurve, LatencyProfile
from prfaas.core.workload.requests import TracedRequest
from prfaas.lab.simulator.capacity import Piece
from wan.laboratory import GOODPUT_SHARE, Laboratory, LineSettings
from wan.load import LinkReading, synthetic_model
from wan.stack import (
    ADMIN_PORT,
    FAR,
    GATEWAY_HOST,
    GATEWAY_PORT,
    HOME,
    WanStack,
    engines_of,
    write_deployment,
)

RTT_S = 0.030
MAX_MODEL_LEN, CHUNK_TOKENS = 16_384, 1024
THRESHOLD_PERIOD_S = 15.0
_READ_S = 0.5
_STAND_IN_PREFILL_S = ((512.0, 0.15), (2048.0, 0.6), (6144.0, 1.9), (12288.0, 4.2))
_STAND_IN_STEP_S = ((1.0, 0.01), (8.0, 0.015))
_NAMES = {EAST_PREFILL: "far-prefill-0", HOME_PREFILL: "home-0", HOME_DECODE: "home-1"}


@dataclass(frozen=True, slots=True)
class LineStack:
    """Three engines and the gateway in the laboratory, as `fidelity_live` measures them."""

    wan: WanStack

    @property
    def gateway_url(self) -> str:
        """See `MeasuredStack`."""
        return f"http://127.0.0.1:{GATEWAY_PORT}"

    def url(self, engine: str) -> str:
        """See `MeasuredStack`."""
        return self.wan.url(_NAMES[engine])

    def near(self, engine: str) -> contextlib.AbstractContextManager[None]:
        """See `MeasuredStack`."""
        return self.wan.laboratory.inside(self.wan.engines[_NAMES[engine]].host)

    def cpu_s(self) -> dict[str, float]:
        """See `MeasuredStack`."""
        used = {name: cpu_s(self.wan.running[own].pid(own)) for name, own in _NAMES.items()}
        gateway = self.wan.gateway
        assert gateway is not None
        return used | {"gateway": cpu_s(gateway.pid), "client": time.process_time()}


@contextlib.contextmanager
def running(
    directory: Path, bandwidth_bits_per_s: float, model: MeasuredModel, *, stand_ins: bool
) -> Iterator[LineStack]:
    """Engines and gateway, ready; each real engine with a part of a core, as in `fidelity_stack`.

    Args:
        directory: For all files.
        bandwidth_bits_per_s: Payload that the line carries at first, and what the deployment file says.
        model: Of real engines.
        stand_ins: Engines that wait in place of computing, and send real bytes.
    """
    line = LineSettings.of_round_trip(bandwidth_bits_per_s / GOODPUT_SHARE, RTT_S)
    engines = engines_of(1, [("prefill",), ("decode",)])
    with Laboratory({FAR: 1, HOME: 2}, line) as laboratory:
        deployment = write_deployment(
            directory,
            laboratory,
            engines,
            max_model_len=MAX_MODEL_LEN,
            bandwidth_bits_per_s=bandwidth_bits_per_s,
            rtt_s=RTT_S,
            routing={"policy": "static_threshold", "threshold_tokens": OFFLOADED_ABOVE},
            # An engine that starves on a busy machine is slow, not frozen.
            control={"threshold_period_s": THRESHOLD_PERIOD_S, "allocation": False, "silence_s": 60},
            **(_stand_ins(directory) if stand_ins else _real_engines(directory, model)),
        )
        wan = WanStack(laboratory, deployment, engines)
        with wan.started():
            groups = {engine: wan.running[_NAMES[engine]].pid(_NAMES[engine]) for engine in ENGINES}
            with contextlib.nullcontext() if stand_ins else limited_engines(groups):
                yield LineStack(wan)


def _real_engines(directory: Path, model: MeasuredModel) -> dict[str, Any]:
    return {
        "model": model.write(directory / "model", with_weights=True),
        "clusters": {FAR: {"hardware": "cpu"}, HOME: {"hardware": "cpu"}},
        "engine": engine_section(CHUNK_TOKENS),
    }


def _stand_ins(directory: Path) -> dict[str, Any]:
    """About as fast as the real ones on a core each, with the same KVCache."""
    prefill = Curve.through_points(_STAND_IN_PREFILL_S, "monotone")
    decode = DecodeCurve(Curve.through_points(_STAND_IN_STEP_S, "linear"), 256.0)
    profile = directory / "stand-in.yaml"
    profile.write_text(profile_text(LatencyProfile("stand-in", "cpu", "tiny", 1, prefill, decode, "made up")))
    cluster = {"hardware": "synthetic", "profile": str(profile.resolve()), "speedup": 1}
    return {
        "model": synthetic_model(directory / "model"),
        "clusters": {FAR: cluster, HOME: cluster},
        "engine": engine_section(CHUNK_TOKENS),
    }


def measured(stack: LineStack, depth: Depth) -> dict[str, Any]:
    """The profiles of both clusters and the overheads, over the unhindered line.

    An engine that also sends the KVCache takes longer than one that is asked directly, and the longer the prompt, the
    more so. Here all send: at home from the prefill to the decode engine. So profiles have what that adds.
    """
    laboratory, path = stack.wan.laboratory, stack.wan.deployment.path
    with laboratory.inside(GATEWAY_HOST):
        found = asyncio.run(profiled(stack, depth))
    before = path.read_text()
    routing = {"policy": "static_threshold", "threshold_tokens": MAX_MODEL_LEN}
    path.write_text(json.dumps(json.loads(before) | {"routing": routing}))
    stack.wan.restart_gateway()
    path.write_text(before)
    longer = [tokens for tokens in depth.lengths if tokens > OFFLOADED_ABOVE]
    with laboratory.inside(GATEWAY_HOST):
        local_s = asyncio.run(first_tokens_s(stack, longer, depth.repeats))
    sent_s = {str(tokens): found["idle_ttft_s"][str(tokens)] - RTT_S for tokens in longer}
    beside_s = found["idle_ttft_s"]["1"] + found["hop_s"]
    direct = found["profiles"]
    profiles = {
        EAST: _while_sending(direct[EAST], sent_s, beside_s),
        HOME: _while_sending(direct[HOME], local_s, beside_s),
    }
    return found | {"direct_profiles": direct, "local_ttft_s": local_s, "profiles": profiles}


def _while_sending(text: str, ttft_s: Mapping[str, float], beside_s: float) -> str:
    """A profile whose long prefills take what is left of their times to the first token through the gateway."""
    profile = parse_profile(text, "the measured profile")
    points = tuple(
        (at, max(seconds, ttft_s.get(f"{at:g}", 0.0) - beside_s)) for at, seconds in profile.prefill.points
    )
    return profile_text(replace(profile, prefill=replace(profile.prefill, points=points)))


def reconfigured(document: dict[str, Any], sections: Mapping[str, Any], profiles: Mapping[str, Path]) -> Any:
    """A deployment file's document with other sections, and with each cluster's profile.

    Args:
        document: As `write_deployment` wrote it.
        sections: Replace those of the same name.
        profiles: By the cluster's name.
    """
    clusters = [each | {"profile": str(profiles[each["name"]].resolve())} for each in document["clusters"]]
    return document | {"clusters": clusters} | dict(sections)


def run_policy(
    stack: LineStack,
    document: Mapping[str, Any],
    pieces: Sequence[Piece],
    requests: Sequence[TracedRequest],
) -> dict[str, Any]:
    """One pass of the whole traffic, with a gateway that is started for it from this deployment file."""
    stack.wan.deployment.path.write_text(json.dumps(document, indent=1))
    laboratory = stack.wan.laboratory
    _set_rate(laboratory, pieces[0][1])
    stack.wan.restart_gateway()
    with laboratory.inside(GATEWAY_HOST):
        before_s = asyncio.run(probes(stack))
        found = asyncio.run(_driven(stack, pieces, requests))
        return found | {"probes_s": before_s + asyncio.run(probes(stack))}


async def _driven(
    stack: LineStack, pieces: Sequence[Piece], requests: Sequence[TracedRequest]
) -> dict[str, Any]:
    readings: list[list[float | None]] = []
    carried: list[tuple[float, int]] = []
    began_s = time.monotonic()
    line = asyncio.create_task(_follow(stack.wan.laboratory, pieces, began_s))
    reader = asyncio.create_task(_read(stack.wan.laboratory, began_s, readings, carried))
    try:
        found = await driven(stack, requests)
    finally:
        for task in (line, reader):
            task.cancel()
        await asyncio.gather(line, reader, return_exceptions=True)
    return found | {
        "reading_columns": ["at_s", "threshold_tokens", "capacity_bits_per_s"],
        "readings": readings,
        "carried": carried,
        "began_s": began_s,
    }


async def _follow(laboratory: Laboratory, pieces: Sequence[Piece], began_s: float) -> None:
    for at_s, bits_per_s in pieces:
        await asyncio.sleep(max(began_s + at_s - time.monotonic(), 0.0))
        _set_rate(laboratory, bits_per_s)


def _set_rate(laboratory: Laboratory, bits_per_s: float) -> None:
    """Only the way of the KVCache becomes narrow: prompts go the other way."""
    laboratory.change(FAR, HOME, rate_bits_per_s=bits_per_s / GOODPUT_SHARE)


async def _read(
    laboratory: Laboratory,
    began_s: float,
    readings: list[list[float | None]],
    carried: list[tuple[float, int]],
) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while True:
            now_s = time.monotonic() - began_s
            carried.append((round(now_s, 3), laboratory.counters(FAR, HOME).carried_bytes))
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"http://127.0.0.1:{ADMIN_PORT}/prfaas/state") as answer:
                    reading = LinkReading.of_state(await answer.json(), now_s)
                is_finite = reading.threshold_tokens != float("inf")
                readings.append(
                    [
                        round(now_s, 3),
                        reading.threshold_tokens if is_finite else None,
                        reading.capacity_bits_per_s,
                    ]
                )
            await asyncio.sleep(_READ_S)
