"""The control plane's Prometheus series, `prfaas_control_*`. Every label takes values from a bounded set."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SLICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_SERVICE_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


class Series:
    """Gauges are written once a second; counters when something happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prfaas_control_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"prfaas_control_{name}", text, labels, registry=registry)

        self.decisions = counter("decisions", "Routed requests, by decision.", "route", "reason")
        self.cache_transfers = counter("cache_transfers", "Decisions that move a cached prefix first.")
        self.threshold_tokens = gauge(
            "threshold_tokens", "Uncached tokens above which a PD cluster offloads (+Inf: never).", "cluster"
        )
        self.threshold_changes = counter("threshold_changes", "Moves of a threshold.", "cluster", "reason")
        self.conversions = counter(
            "conversions", "Role conversions that ended.", "cluster", "to_role", "outcome"
        )
        self.copies = counter("prefix_copies", "Prefixes found worth copying to another cluster.")
        self.waiting_prefills = gauge(
            "waiting_prefills", "Prefills that no instance of the cluster has been given yet.", "cluster"
        )
        self.instance_healthy = gauge("instance_healthy", "1 when the instance is in routing.", "instance")
        self.instance_prefills = gauge("instance_prefills", "1 when the instance prefills.", "instance")
        self.instance_decodes = gauge("instance_decodes", "1 when the instance decodes.", "instance")
        self.instance_draining = gauge("instance_draining", "1 while its role is being changed.", "instance")
        self.instance_in_flight = gauge("instance_in_flight", "Requests open there.", "instance")
        self.instance_wait_seconds = gauge(
            "instance_wait_seconds", "Until the accepted prefill work is done, as predicted.", "instance"
        )
        self.instance_age_seconds = gauge(
            "instance_age_seconds", "Since the engine was heard of.", "instance"
        )
        self.instance_blocks = gauge("instance_blocks", "KV blocks indexed (or recorded) there.", "instance")
        self.suspicions = counter("suspicions", "Times an instance left routing.", "instance")
        self.link_up = gauge("link_up", "1 when the link is used.", "link")
        self.link_capacity = gauge("link_capacity_bits_per_second", "What the link can carry now.", "link")
        self.link_egress = gauge("link_egress_bits_per_second", "What it carried in the last 2 s.", "link")
        self.link_queued_bytes = gauge("link_queued_bytes", "Produced and not acknowledged.", "link")
        self.link_drain_seconds = gauge(
            "link_drain_seconds", "Until the accepted bytes have left, as predicted.", "link"
        )
        self.link_rtt_seconds = gauge("link_rtt_seconds", "Least round trip.", "link")
        self.link_retransmit_ratio = gauge("link_retransmit_ratio", "Segments sent again.", "link")
        self.link_age_seconds = gauge("link_age_seconds", "Since the link was heard of.", "link")
        self.events = counter("kv_events", "KV cache events applied.", "instance")
        self.drops = counter(
            "holdings_dropped", "Times what an instance holds was forgotten.", "instance", "reason"
        )
        self.feed_gaps = gauge("feed_gaps", "Gaps in an instance's events so far.", "instance")
        self.feed_replays = gauge("feed_replays", "Replays of an instance's events so far.", "instance")
        self.feed_resyncs = gauge("feed_resyncs", "Gaps that nothing could fill so far.", "instance")
        self.index_blocks = gauge("index_blocks", "Blocks in the global index, per holder.")
        self.index_apply_seconds = Histogram(
            "prfaas_control_index_apply_seconds",
            "Applying one batch of events in the event loop.",
            buckets=_SLICE_SECONDS,
            registry=registry,
        )
        self.service_ratio = Histogram(
            "prfaas_control_service_ratio",
            "Measured service time of a prefill over the predicted one.",
            ("cluster",),
            buckets=_SERVICE_RATIOS,
            registry=registry,
        )
        self.telemetry_failures = counter("telemetry_failures", "Questions without an answer.", "kind")
