"""The control plane's Prometheus metrics, `prfaas_control_*`. Every label takes values from a bounded set."""

from collections import defaultdict
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SLICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
TIERS = ("memory", "ssd")
"""Of a pool."""
POOL_BYTES = ("stored", "evicted", "promoted", "ssd_written", "ssd_read", "copied", "lent")
"""What became of a pool's bytes: `copied` came from other pools, `lent` went to them."""
POOL_LOSSES = ("refused", "evicted", "wrong")
"""Why pages are not there: no room, evicted, or their bytes were not what they should be."""
_SERVICE_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
Family = TypeVar("Family", Counter, Gauge, Histogram)


class ControlMetrics:
    """Gauges are written once a second, by the parts (`Part.write_gauges`); counters when something happens."""

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
        self.copies = counter("prefix_copies", "Prefixes found worth copying to another cluster.")
        self.copies_ended = counter("prefix_copies_ended", "What became of them.", "outcome")
        self.copied_bytes = counter("prefix_copied_bytes", "KV bytes of copies, of broken ones too.")
        self.copied_tokens = counter("prefix_copied_tokens", "Tokens of copies that were made.")
        self.copy_hits = counter("prefix_copy_hits", "Requests that found a copied prefix.")
        self.spared_tokens = counter("prefix_copy_spared_tokens", "What those need not compute.")
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
