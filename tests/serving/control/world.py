"""A small deployment, a clock that a test moves, and engines that are not there."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from prfaas.core.deployment import AppliedDeployment, Deployment, Instance, load_deployment
from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.decision import CacheTransfer, Decision, KvFacts, Route
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.members import Members
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import prefill_curves, view_of
from prfaas.serving.engines.tiny.configs import tiny_config
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.protocol.pacing import PaceOrder, ProbeOrder
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.requests import FollowOrder

from .relay_port import RelayPort

KEY = bytes(range(32))

FILE = """
name: test
model: {served_name: m, tiny: qwen3-next, max_model_len: 32768}
clusters:
  - name: far
    kind: prfaas
    hardware: synthetic
    profile: internal-1t-h200
    instances:
      - {name: far-0, roles: [prefill], host: 127.0.0.1, http_port: 21000, kv_port: 22000}
      - {name: far-1, roles: [prefill], host: 127.0.0.1, http_port: 21001, kv_port: 22001}
  - name: home
    kind: pd
    hardware: synthetic
    profile: internal-1t-h20
    instances:
      - {name: home-p0, roles: [prefill], host: 127.0.0.1, http_port: 21002, kv_port: 22002}
      - {name: home-p1, roles: [prefill], host: 127.0.0.1, http_port: 21003, kv_port: 22003}
      - {name: home-d0, roles: [decode], host: 127.0.0.1, http_port: 21004, kv_port: 22004}
      - {name: home-d1, roles: [decode], host: 127.0.0.1, http_port: 21005, kv_port: 22005}
links:
  - {source: far, target: home, bandwidth: 1 Gbit/s}
routing: {policy: paper, threshold_tokens: 4000}
slo: {tokens_per_s: 40}
engine: {max_num_seqs: 16, staging: 64 MiB}
control: {threshold_period_s: 30, allocation_period_s: 60, window_s: 600}
"""


def with_pools(text: str = FILE) -> str:
    """The same deployment with a pool in each cluster: `far-pool` and `home-pool`."""
    for port in (22100, 22101):
        pool = f"hardware: h200\n    pool: {{memory: 1 GiB, kv_port: {port}}}"
        text = text.replace("hardware: synthetic", pool, 1)
    return text


LINK = ("far", "home")
BYTES_PER_TOKEN = 1000


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def deployment_of(folder: Path, *, text: str = FILE, **changes: str) -> Deployment:
    """`FILE` with some of its text replaced: `old=new` pairs by position in `changes`' values "old -> new"."""
    for change in changes.values():
        old, new = change.split(" -> ")
        assert old in text
        text = text.replace(old, new)
    path = folder / "deployment.yaml"
    path.write_text(text)
    deployment = load_deployment(path, state_dir=folder / "state")
    # Of a model that is not known links would count as for the largest one.
    model = deployment.model.path
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(tiny_config("qwen3-next")))
    return deployment


def grouped_deployment_of(folder: Path) -> Deployment:
    """`FILE` with its decode instances as the ranks of a data-parallel group."""
    return deployment_of(
        folder,
        a="kv_port: 22004} -> kv_port: 22014, data_parallel: moe}",
        b="kv_port: 22005} -> kv_port: 22025, data_parallel: moe}",
    )


def kv_facts() -> KvFacts:
    return KvFacts(
        is_hybrid=True,
        can_skip=True,
        bytes_to_move=lambda tokens, skip: (tokens - 1 - skip) * BYTES_PER_TOKEN,
        prefix_bytes_to_move=lambda tokens, skip: (tokens - skip) * BYTES_PER_TOKEN,
    )


def cluster_state_of(
    deployment: Deployment,
    clock: FakeClock,
    *,
    prefill_s: Callable[[float], float] = lambda tokens: tokens / 1000,
    on_service: Callable[[str, int, float], None] = lambda *_: None,
) -> ClusterState:
    """A cluster_state whose instances prefill 1000 tokens a second."""
    view = view_of(deployment, None, prefill_curves(deployment), clock())
    view.kv = kv_facts()
    for cluster in view.clusters.values():
        cluster.prefill_s = prefill_s
        for instance in cluster.instances:
            instance.decode_slots = 16 if cluster.kind == "pd" else 1
    return ClusterState(view, clock=clock, on_service=on_service)


def plane_of(
    deployment: Deployment,
    registry: CollectorRegistry,
    kv_model: KvModel | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    **asked: Any,
) -> LivePlane:
    """A plane of the tests' key; `asked`: how engines and pools are, see `Members`."""
    members = Members(RunningDeployment(deployment), KEY, **asked)
    return LivePlane(members, registry, kv_model, clock=clock)


def take_on(plane: LivePlane, applied: AppliedDeployment) -> None:
    """As a reloader does it."""
    running = plane.members.running
    before = running.applied
    running.move(applied)
    try:
        plane.follow(before, applied)
    except Exception:
        running.move(before)
        plane.follow(applied, before)
        raise


def decision(
    prefill: str,
    decode: str,
    *,
    prefill_tokens: int = 1000,
    skip_tokens: int = 0,
    cache_transfer: CacheTransfer | None = None,
    num_tokens: int = 0,
) -> Decision:
    """Its last token is not sent. Without `num_tokens` nothing of the prompt is cached where it is prefilled."""
    route = Route.OFFLOAD if prefill.startswith("far") else Route.LOCAL
    return Decision(
        route=route,
        prefill=prefill,
        decode=decode,
        uncached_tokens=prefill_tokens,
        prefill_tokens=prefill_tokens,
        skip_tokens=skip_tokens,
        kv_bytes=(prefill_tokens - skip_tokens) * BYTES_PER_TOKEN,
        reason="long",
        threshold_tokens=4000.0,
        predicted_ttft_s=1.0,
        cache_transfer=cache_transfer,
        num_tokens=num_tokens,
    )


class FakeHttp:
    """Engines that answer /health and /metrics as a test wants."""

    def __init__(self) -> None:
        self.healthy: dict[str, bool | None] = {}
        self.texts: dict[str, bytes | None] = {}
        self.probed: list[str] = []
        self.closed = False

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None:
        self.probed.append(instance.name)
        return self.healthy.get(instance.name, True)

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None:
        return self.texts.get(instance.name)

    async def close(self) -> None:
        self.closed = True


class FakeSender:
    """One rank's KV port; `links` is what its sender tells, None: it does not answer."""

    def __init__(self) -> None:
        self.links: dict[str, dict[str, Any]] | None = {}
        self.rejected: dict[str, str] = {}
        self.arrivals: dict[str, dict[str, Any]] = {}
        self.probes: list[tuple[str, int]] = []
        self.asked = 0
        self.orders: list[PaceOrder] = []
        self.rosters: list[PeerList] = []
        self.roster: dict[str, Any] | None = None
        self.takes_rosters = True
        self.closed = False
        self.relay: RelayPort | None = None

    async def stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.links is None:
            raise ConnectionError("nobody there")
        links = {name: dict(report) for name, report in self.links.items()}
        told = {"sender": {"links": links, "rejected": dict(self.rejected)}, "arrivals": dict(self.arrivals)}
        return told if self.roster is None else told | {"roster": self.roster}

    async def telemetry(self) -> dict[str, Any]:
        return await self.stats()

    async def order(self, order: PaceOrder | ProbeOrder | PeerList) -> None:
        if isinstance(order, ProbeOrder):
            self.probes.append((order.link, order.nbytes))
            return
        if self.links is None:
            raise ConnectionError("nobody there")
        if isinstance(order, PaceOrder):
            self.orders.append(order)
            return
        self.rosters.append(order)
        if self.takes_rosters:
            self.roster = {"digest": order.digest, "told": True, "trouble": ""}

    async def request(self, transfer_id: bytes, order: FollowOrder, timeout_s: float) -> dict[str, Any]:
        if self.relay is None:
            raise ConnectionError("nobody there")
        return await self.relay.request(transfer_id, order, timeout_s)

    async def close(self) -> None:
        self.closed = True


def report(**changes: Any) -> dict[str, Any]:
    """One link as a sender with nothing to do tells it."""
    return {
        "pace_bits_per_s": 1e9,
        "queued_bytes": 0,
        "waiting_bytes": 0,
        "open_bytes": 0,
        "acked_bytes_total": 0,
        "unsent_bytes": 0,
        "filled_connections": 0,
        "delivery_bits_per_s": 0.0,
        "rtt_s": 0.001,
        "least_rtt_s": 0.001,
        "retransmits_total": 0,
        "sent_bytes_total": 0,
        "resent_bytes_total": 0,
        "busy_s_total": 0.0,
        "receiver_limited_s_total": 0.0,
        "connections_up": 4,
        "connections": 4,
    } | changes


def arrived(**changes: Any) -> dict[str, Any]:
    """What one producer has sent, as a receiver tells it."""
    told = {
        "bytes_total": 0,
        "mss_bytes": 1000,
        "unread_bytes": 0,
        "rtt_s": 0.001,
        "connections": 4,
    } | changes
    return {"segments_total": told["bytes_total"] // 1000} | told
