"""The control plane's Prometheus metrics, `prfaas_control_*`. Every label takes values from a bounded set.

Once a second: the state of things into the gauges.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.pool_monitor import TIERS
from prfaas.serving.control.state import Json, Overview, state_of
from prfaas.serving.departed_series import DepartedSeries
from prfaas.serving.transport.requests import CopyResult

_SLICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
POOL_BYTES = ("stored", "evicted", "promoted", "ssd_written", "ssd_read", "copied", "lent")
"""What became of a pool's bytes: `copied` came from other pools, `lent` went to them."""
POOL_LOSSES = ("refused", "evicted", "wrong")
"""Why pages are not there: no room, evicted, or their bytes were not what they should be."""
_SERVICE_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
Family = TypeVar("Family", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class HotCopyCounters:
    """Implements `hot_prefixes.CopyMetrics`."""

    decided_copies: Counter
    ended_copies: Counter
    copied_bytes: Counter
    copied_tokens: Counter
    used_copies: Counter
    spared_tokens: Counter

    def decided(self) -> None:
        """See `CopyMetrics`."""
        self.decided_copies.inc()

    def ended(self, outcome: str, result: CopyResult, tokens: int) -> None:
        """See `CopyMetrics`."""
        self.ended_copies.labels(outcome).inc()
        self.copied_bytes.inc(result.copied_bytes)
        self.copied_tokens.inc(tokens)

    def spared(self, tokens: int) -> None:
        """See `CopyMetrics`."""
        self.used_copies.inc()
        self.spared_tokens.inc(tokens)


class ControlMetrics:
    """Gauges are written once a second; counters when something happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.labelled: dict[str, list[Counter | Gauge | Histogram]] = defaultdict(list)
        """Label → the families that have it."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return self._listed(Counter(f"prfaas_control_{name}", text, labels, registry=registry), labels)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return self._listed(Gauge(f"prfaas_control_{name}", text, labels, registry=registry), labels)

        self.decisions = counter("decisions", "Routed requests, by decision.", "route", "reason")
        self.policy_failures = counter(
            "policy_failures", "Decisions that a policy of one's own failed to make."
        )
        self.cache_transfers = counter("cache_transfers", "Decisions that move a cached prefix first.")
        self.threshold_tokens = gauge(
            "threshold_tokens", "Uncached tokens above which a PD cluster offloads (+Inf: never).", "cluster"
        )
        self.threshold_changes = counter("threshold_changes", "Moves of a threshold.", "cluster", "reason")
        self.conversions = counter(
            "conversions", "Role conversions that ended.", "cluster", "to_role", "outcome"
        )
        self.predicted_ttft_seconds = gauge(
            "predicted_ttft_seconds", "Mean, by the last evaluation of the roles (+Inf: overload).", "roles"
        )
        self.predicted_prefill_instances = gauge(
            "predicted_prefill_instances", "Of a PD cluster, with these roles.", "cluster", "roles"
        )
        self.expected_requests_per_s = gauge(
            "expected_requests_per_second", "What roles were last evaluated for.", "source"
        )
        self.copies = HotCopyCounters(
            decided_copies=counter("prefix_copies", "Prefixes found worth copying to another cluster."),
            ended_copies=counter("prefix_copies_ended", "What became of them.", "outcome"),
            copied_bytes=counter("prefix_copied_bytes", "KV bytes of copies, of broken ones too."),
            copied_tokens=counter("prefix_copied_tokens", "Tokens of copies that were made."),
            used_copies=counter("prefix_copy_hits", "Requests that found a copied prefix."),
            spared_tokens=counter("prefix_copy_spared_tokens", "What those need not compute."),
        )
        self.waiting_prefills = gauge(
            "waiting_prefills", "Prefills that no instance of the cluster has been given yet.", "cluster"
        )
        self.instance_info = gauge(
            "instance_info", "1; the labels say where the instance is.", "instance", "cluster", "kind"
        )
        self.instance_healthy = gauge("instance_healthy", "1 when the instance is in routing.", "instance")
        self.instance_prefills = gauge("instance_prefills", "1 when the instance prefills.", "instance")
        self.instance_decodes = gauge("instance_decodes", "1 when the instance decodes.", "instance")
        self.instance_draining = gauge("instance_draining", "1 while it is to get nothing new.", "instance")
        self.instance_in_flight = gauge("instance_in_flight", "Requests open there.", "instance")
        self.instance_wait_seconds = gauge(
            "instance_wait_seconds", "Until the accepted prefill work is done, as predicted.", "instance"
        )
        self.instance_age_seconds = gauge(
            "instance_age_seconds", "Since the engine was heard of.", "instance"
        )
        self.instance_blocks = gauge("instance_blocks", "KV blocks indexed (or recorded) there.", "instance")
        self.instance_queued_prefills = gauge(
            "instance_queued_prefills", "Prefills given to it that have not ended.", "instance"
        )
        self.instance_decoding_requests = gauge(
            "instance_decoding_requests", "Requests that it decodes, or will.", "instance"
        )
        self.instance_decode_slots = gauge(
            "instance_decode_slots", "Requests that it decodes at a time.", "instance"
        )
        self.instance_kv_usage_ratio = gauge(
            "instance_kv_usage_ratio", "Share of its KV cache in use, as the engine says.", "instance"
        )
        self.instance_prefix_hit_ratio = gauge(
            "instance_prefix_hit_ratio", "Share of prompt tokens that its own cache held lately.", "instance"
        )
        self.notices = counter("notices", "Times that an instance was to be taken away.", "instance")
        self.suspicions = counter("suspicions", "Times an instance left routing.", "instance")
        self.incompatible = gauge("incompatible_pairs", "Pairs of engines that exchange no KV.")
        self.link_up = gauge("link_up", "1 when the link is used.", "link")
        self.link_configured = gauge(
            "link_configured_bits_per_second", "What the deployment file says that it carries.", "link"
        )
        self.link_capacity = gauge("link_capacity_bits_per_second", "What the link can carry now.", "link")
        self.link_egress = gauge("link_egress_bits_per_second", "What it carried in the last 2 s.", "link")
        self.link_queued_bytes = gauge("link_queued_bytes", "Produced and not acknowledged.", "link")
        self.link_drain_seconds = gauge(
            "link_drain_seconds", "Until the accepted bytes have left, as predicted.", "link"
        )
        self.link_rtt_seconds = gauge("link_rtt_seconds", "Least round trip.", "link")
        self.link_queue_rtt_seconds = gauge(
            "link_queue_rtt_seconds", "Round trip of what is in flight.", "link"
        )
        self.link_retransmit_ratio = gauge("link_retransmit_ratio", "Share of the bytes sent again.", "link")
        self.link_congestion = gauge("link_congestion", "0: none; up to 1.", "link")
        self.link_age_seconds = gauge("link_age_seconds", "Since the link was heard of.", "link")
        self.events = counter("kv_events", "KV cache events applied.", "instance")
        self.drops = counter(
            "holdings_dropped", "Times what an instance holds was forgotten.", "instance", "reason"
        )
        self.feed_gaps = gauge("feed_gaps", "Gaps in an instance's events so far.", "instance")
        self.feed_replays = gauge("feed_replays", "Replays of an instance's events so far.", "instance")
        self.feed_resyncs = gauge("feed_resyncs", "Gaps that nothing could fill so far.", "instance")
        self.pool_up = gauge("pool_up", "1 while the pool's daemon answers.", "pool")
        self.pool_epoch = gauge(
            "pool_epoch", "Of the daemon's start: another one is another process.", "pool"
        )
        self.pool_sessions = gauge("pool_sessions", "Connections of engines.", "pool")
        self.pool_pages = gauge("pool_pages", "Pages held.", "pool", "tier", "group")
        self.pool_bytes = gauge("pool_bytes", "Bytes of the pages held.", "pool", "tier")
        self.pool_capacity_bytes = gauge("pool_capacity_bytes", "Bytes that it may hold.", "pool", "tier")
        self.pool_blocks = gauge("pool_blocks", "Its blocks and states in the global index.", "pool", "tier")
        self.pool_pinned_pages = gauge("pool_pinned_pages", "Pages that loads are reading.", "pool")
        self.pool_hit_tokens = gauge(
            "pool_hit_tokens", "Prompt tokens that its engines loaded, so far.", "pool", "tier"
        )
        self.pool_load_bits_per_s = gauge(
            "pool_load_bits_per_second", "How fast its engines load from its memory.", "pool"
        )
        self.pool_moved_bytes = gauge(
            "pool_moved_bytes", "Bytes since the daemon's start, by what became of them.", "pool", "what"
        )
        self.pool_lost_pages = gauge(
            "pool_lost_pages",
            "Pages since the daemon's start that went or never came, by why.",
            "pool",
            "why",
        )
        self.pool_ssd_queued_bytes = gauge(
            "pool_ssd_queued_bytes", "Bytes in memory that wait to be written to SSD.", "pool"
        )
        self.index_blocks = gauge("index_blocks", "Blocks in the global index, per holder.")
        self.index_apply_seconds = Histogram(
            "prfaas_control_index_apply_seconds",
            "Applying one batch of events in the event loop.",
            buckets=_SLICE_SECONDS,
            registry=registry,
        )
        self.service_ratio = self._listed(
            Histogram(
                "prfaas_control_service_ratio",
                "Measured service time of a prefill over the predicted one.",
                ("cluster",),
                buckets=_SERVICE_RATIOS,
                registry=registry,
            ),
            ("cluster",),
        )
        self.telemetry_failures = counter("telemetry_failures", "Questions without an answer.", "kind")

    def _listed(self, family: Family, labels: tuple[str, ...]) -> Family:
        for label in labels:
            self.labelled[label].append(family)
        return family


PERIOD_S = 1.0


class GaugeWriter:
    """Writes the gauges of `metrics.Series`, so that a scrape finds them ready."""

    def __init__(self, plane: Overview, metrics: ControlMetrics, *, clock: Clock) -> None:
        self._plane = plane
        self._metrics = metrics
        self._clock = clock
        self._failures = {"links": 0, "engines": 0, "pools": 0}
        self._departed = DepartedSeries(metrics.labelled)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(PERIOD_S)

    def write(self) -> None:
        """Everything, as it is now."""
        state, metrics = state_of(self._plane, self._clock()), self._metrics
        for cluster, facts in state["clusters"].items():
            metrics.waiting_prefills.labels(cluster).set(facts["waiting_prefills"])
            tokens = self._plane.cluster_state.view.threshold_tokens.get(cluster)
            if tokens is not None:
                metrics.threshold_tokens.labels(cluster).set(tokens)
            for name, instance in facts["instances"].items():
                metrics.instance_info.labels(name, cluster, facts["kind"]).set(1)
                metrics.instance_healthy.labels(name).set(instance["healthy"])
                metrics.instance_prefills.labels(name).set("prefill" in instance["role"])
                metrics.instance_decodes.labels(name).set("decode" in instance["role"])
                metrics.instance_draining.labels(name).set(
                    instance["draining"] or instance["drain"] is not None
                )
                metrics.instance_in_flight.labels(name).set(instance["in_flight"])
                metrics.instance_wait_seconds.labels(name).set(instance["busy_s"])
                metrics.instance_age_seconds.labels(name).set(instance["age_s"])
                metrics.instance_blocks.labels(name).set(instance["blocks"])
                metrics.instance_queued_prefills.labels(name).set(instance["queue"])
                metrics.instance_decoding_requests.labels(name).set(instance["decoding"])
                metrics.instance_decode_slots.labels(name).set(instance["decode_slots"])
                self._write_engine(name, instance["engine"])
                if instance["events"] is not None:
                    self._write_feed(name, instance["events"])
        self._write_pools(state["pools"])
        metrics.incompatible.set(len(state["incompatible"]))
        for name, link in state["links"].items():
            metrics.link_up.labels(name).set(link["up"])
            metrics.link_configured.labels(name).set(link["configured_bits_per_s"])
            metrics.link_capacity.labels(name).set(link["capacity_bits_per_s"])
            metrics.link_egress.labels(name).set(link["egress_bits_per_s"])
            metrics.link_queued_bytes.labels(name).set(link["queued_bytes"])
            metrics.link_drain_seconds.labels(name).set(link["drain_s"])
            metrics.link_rtt_seconds.labels(name).set(link["rtt_s"])
            metrics.link_queue_rtt_seconds.labels(name).set(link["queue_rtt_s"])
            metrics.link_retransmit_ratio.labels(name).set(link["retransmit_ratio"])
            metrics.link_congestion.labels(name).set(link["congestion"])
            metrics.link_age_seconds.labels(name).set(link["age_s"])
        self._write_roles(state["roles"]["last_evaluation"])
        metrics.index_blocks.set(state["index"]["blocks"])
        self._count("links", self._plane.links.failures)
        self._count("engines", self._plane.engines.failures)
        self._count("pools", self._plane.pools.failures)
        holders = {name for facts in state["clusters"].values() for name in facts["instances"]}
        self._departed.keep("cluster", state["clusters"])
        # Pools have KV events too, in series with this label.
        self._departed.keep("instance", holders | state["pools"].keys())
        self._departed.keep("pool", state["pools"])
        self._departed.keep("link", state["links"])

    def _write_engine(self, name: str, engine: Json | None) -> None:
        if engine is None:
            return
        self._metrics.instance_kv_usage_ratio.labels(name).set(engine["kv_usage"])
        if engine["hit_rate"] is not None:
            self._metrics.instance_prefix_hit_ratio.labels(name).set(engine["hit_rate"])

    def _write_roles(self, evaluation: Json) -> None:
        metrics, predicted = self._metrics, evaluation.get("predicted")
        if predicted is None:
            return
        # What there is no prediction of any more must not stay.
        metrics.predicted_ttft_seconds.clear()
        metrics.predicted_prefill_instances.clear()
        metrics.expected_requests_per_s.clear()
        expected = evaluation["expected"]
        source = "forecast" if expected["is_forecast"] else "measured"
        metrics.expected_requests_per_s.labels(source).set(expected["requests_per_s"])
        for roles in ("now", "best"):
            told = predicted[roles]
            if told is None:
                continue
            ttft_s = told["ttft_s"]
            metrics.predicted_ttft_seconds.labels(roles).set(math.inf if ttft_s is None else ttft_s)
            for cluster, count in told["prefill_instances"].items():
                metrics.predicted_prefill_instances.labels(cluster, roles).set(count)

    def _write_feed(self, holder: str, events: Json) -> None:
        self._metrics.feed_gaps.labels(holder).set(events["gaps"])
        self._metrics.feed_replays.labels(holder).set(events["replays"])
        self._metrics.feed_resyncs.labels(holder).set(events["resyncs"])

    def _write_pools(self, pools: Mapping[str, Json]) -> None:
        metrics = self._metrics
        for name, pool in pools.items():
            metrics.pool_up.labels(name).set(pool["up"])
            metrics.pool_load_bits_per_s.labels(name).set(pool["memory_bits_per_s"])
            metrics.pool_blocks.labels(name, "memory").set(pool["memory_blocks"])
            metrics.pool_blocks.labels(name, "all").set(pool["blocks"])
            if pool["events"] is not None:
                self._write_feed(name, pool["events"])
            for tier, tokens in pool["hit_tokens"].items():
                metrics.pool_hit_tokens.labels(name, tier).set(tokens)
            daemon = pool["daemon"]
            if daemon is None:
                continue
            metrics.pool_epoch.labels(name).set(daemon["epoch"])
            metrics.pool_sessions.labels(name).set(daemon["sessions"])
            metrics.pool_pinned_pages.labels(name).set(daemon["pinned_pages"])
            metrics.pool_ssd_queued_bytes.labels(name).set(daemon["ssd_queued_bytes"])
            for tier in TIERS:
                metrics.pool_bytes.labels(name, tier).set(daemon["bytes"][tier])
                metrics.pool_capacity_bytes.labels(name, tier).set(daemon["capacity_bytes"][tier])
                for group, pages in daemon["pages"][tier].items():
                    metrics.pool_pages.labels(name, tier, group).set(pages)
            for what in POOL_BYTES:
                metrics.pool_moved_bytes.labels(name, what).set(daemon[f"{what}_bytes"])
            for why in POOL_LOSSES:
                metrics.pool_lost_pages.labels(name, why).set(daemon[f"{why}_pages"])

    def _count(self, kind: str, failures: int) -> None:
        self._metrics.telemetry_failures.labels(kind).inc(failures - self._failures[kind])
        self._failures[kind] = failures
