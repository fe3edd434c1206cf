"""The control plane's Prometheus metrics, `prfaas_control_*`. Every label takes values from a bounded set."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SLICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
TIERS = ("memory", "ssd")
"""Of a pool."""
POOL_BYTES = ("stored", "evicted", "promoted", "ssd_written", "ssd_read", "copied", "lent")
"""What became of a pool's bytes: `copied` came from other pools, `lent` went to them."""
POOL_LOSSES = ("refused", "evicted", "wrong")
"""Why pages are not there: no room, evicted, or their bytes were not what they should be."""
_SERVICE_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
Family = TypeVar("Family", bound=Counter | Gauge | Histogram)


class _Declared(Generic[Family]):
    """A family of metrics as the table below declares it: an attribute of `ControlMetrics`."""

    def __init__(self, kind: Callable[..., Family], name: str, text: str, *labels: str) -> None:
        self.labels = labels
        self._kind = kind
        self._name = name
        self._text = text

    def __get__(self, metrics: "ControlMetrics", _owner: object) -> Family:
        family: Family = metrics.families[self]
        return family

    def made(self, registry: CollectorRegistry) -> Family:
        """The family in a registry."""
        return self._kind(f"prfaas_control_{self._name}", self._text, self.labels, registry=registry)


_counter, _gauge = partial(_Declared, Counter), partial(_Declared, Gauge)


class ControlMetrics:
    """Gauges are written once a second, by the parts (`Part.write_gauges`); counters when something happens."""

    decisions = _counter("decisions", "Routed requests, by decision.", "route", "reason")
    policy_failures = _counter("policy_failures", "Decisions that a policy of one's own failed to make.")
    cache_transfers = _counter("cache_transfers", "Decisions that move a cached prefix first.")
    threshold_tokens = _gauge(
        "threshold_tokens", "Uncached tokens above which a PD cluster offloads (+Inf: never).", "cluster"
    )
    threshold_changes = _counter("threshold_changes", "Moves of a threshold.", "cluster", "reason")
    conversions = _counter("conversions", "Role conversions that ended.", "cluster", "to_role", "outcome")
    predicted_ttft_seconds = _gauge(
        "predicted_ttft_seconds", "Mean, by the last evaluation of the roles (+Inf: overload).", "roles"
    )
    predicted_prefill_instances = _gauge(
        "predicted_prefill_instances", "Of a PD cluster, with these roles.", "cluster", "roles"
    )
    expected_requests_per_s = _gauge(
        "expected_requests_per_second", "What roles were last evaluated for.", "source"
    )
    copies = _counter("prefix_copies", "Prefixes found worth copying to another cluster.")
    copies_ended = _counter("prefix_copies_ended", "What became of them.", "outcome")
    copied_bytes = _counter("prefix_copied_bytes", "KV bytes of copies, of broken ones too.")
    copied_tokens = _counter("prefix_copied_tokens", "Tokens of copies that were made.")
    waiting_prefills = _gauge(
        "waiting_prefills", "Prefills that no instance of the cluster has been given yet.", "cluster"
    )
    instance_info = _gauge(
        "instance_info", "1; the labels say where the instance is.", "instance", "cluster", "kind"
    )
    instance_healthy = _gauge("instance_healthy", "1 when the instance is in routing.", "instance")
    instance_prefills = _gauge("instance_prefills", "1 when the instance prefills.", "instance")
    instance_decodes = _gauge("instance_decodes", "1 when the instance decodes.", "instance")
    instance_draining = _gauge("instance_draining", "1 while it is to get nothing new.", "instance")
    instance_in_flight = _gauge("instance_in_flight", "Requests open there.", "instance")
    instance_wait_seconds = _gauge(
        "instance_wait_seconds", "Until the accepted prefill work is done, as predicted.", "instance"
    )
    instance_age_seconds = _gauge("instance_age_seconds", "Since the engine was heard of.", "instance")
    instance_blocks = _gauge("instance_blocks", "KV blocks indexed (or recorded) there.", "instance")
    instance_queued_prefills = _gauge(
        "instance_queued_prefills", "Prefills given to it that have not ended.", "instance"
    )
    instance_decoding_requests = _gauge(
        "instance_decoding_requests", "Requests that it decodes, or will.", "instance"
    )
    instance_decode_slots = _gauge("instance_decode_slots", "Requests that it decodes at a time.", "instance")
    instance_kv_usage_ratio = _gauge(
        "instance_kv_usage_ratio", "Share of its KV cache in use, as the engine says.", "instance"
    )
    instance_prefix_hit_ratio = _gauge(
        "instance_prefix_hit_ratio", "Share of prompt tokens that its own cache held lately.", "instance"
    )
    notices = _counter("notices", "Times that an instance was to be taken away.", "instance")
    suspicions = _counter("suspicions", "Times an instance left routing.", "instance")
    incompatible = _gauge("incompatible_pairs", "Pairs of engines that exchange no KV.")
    link_up = _gauge("link_up", "1 when the link is used.", "link")
    link_configured = _gauge(
        "link_configured_bits_per_second", "What the deployment file says that it carries.", "link"
    )
    link_capacity = _gauge("link_capacity_bits_per_second", "What the link can carry now.", "link")
    link_egress = _gauge("link_egress_bits_per_second", "What it carried in the last 2 s.", "link")
    link_queued_bytes = _gauge("link_queued_bytes", "Produced and not acknowledged.", "link")
    link_drain_seconds = _gauge(
        "link_drain_seconds", "Until the accepted bytes have left, as predicted.", "link"
    )
    link_rtt_seconds = _gauge("link_rtt_seconds", "Least round trip.", "link")
    link_queue_rtt_seconds = _gauge("link_queue_rtt_seconds", "Round trip of what is in flight.", "link")
    link_retransmit_ratio = _gauge("link_retransmit_ratio", "Share of the bytes sent again.", "link")
    link_congestion = _gauge("link_congestion", "0: none; up to 1.", "link")
    link_age_seconds = _gauge("link_age_seconds", "Since the link was heard of.", "link")
    events = _counter("kv_events", "KV cache events applied.", "instance")
    drops = _counter("holdings_dropped", "Times what an instance holds was forgotten.", "instance", "reason")
    feed_gaps = _gauge("feed_gaps", "Gaps in an instance's events so far.", "instance")
    feed_replays = _gauge("feed_replays", "Replays of an instance's events so far.", "instance")
    feed_resyncs = _gauge("feed_resyncs", "Gaps that nothing could fill so far.", "instance")
    pool_up = _gauge("pool_up", "1 while the pool's daemon answers.", "pool")
    pool_epoch = _gauge("pool_epoch", "Of the daemon's start: another one is another process.", "pool")
    pool_sessions = _gauge("pool_sessions", "Connections of engines.", "pool")
    pool_pages = _gauge("pool_pages", "Pages held.", "pool", "tier", "group")
    pool_bytes = _gauge("pool_bytes", "Bytes of the pages held.", "pool", "tier")
    pool_capacity_bytes = _gauge("pool_capacity_bytes", "Bytes that it may hold.", "pool", "tier")
    pool_blocks = _gauge("pool_blocks", "Its blocks and states in the global index.", "pool", "tier")
    pool_pinned_pages = _gauge("pool_pinned_pages", "Pages that loads are reading.", "pool")
    pool_hit_tokens = _gauge(
        "pool_hit_tokens", "Prompt tokens that its engines loaded, so far.", "pool", "tier"
    )
    pool_load_bits_per_s = _gauge(
        "pool_load_bits_per_second", "How fast its engines load from its memory.", "pool"
    )
    pool_moved_bytes = _gauge(
        "pool_moved_bytes", "Bytes since the daemon's start, by what became of them.", "pool", "what"
    )
    pool_lost_pages = _gauge(
        "pool_lost_pages",
        "Pages since the daemon's start that went or never came, by why.",
        "pool",
        "why",
    )
    pool_ssd_queued_bytes = _gauge(
        "pool_ssd_queued_bytes", "Bytes in memory that wait to be written to SSD.", "pool"
    )
    index_blocks = _gauge("index_blocks", "Blocks in the global index, per holder.")
    index_apply_seconds = _Declared(
        partial(Histogram, buckets=_SLICE_SECONDS),
        "index_apply_seconds",
        "Applying one batch of events in the event loop.",
    )
    service_ratio = _Declared(
        partial(Histogram, buckets=_SERVICE_RATIOS),
        "service_ratio",
        "Measured service time of a prefill over the predicted one.",
        "cluster",
    )
    telemetry_failures = _counter("telemetry_failures", "Questions without an answer.", "kind")
    loop_failures = _counter("loop_failures", "Unexpected failures that a loop survived.", "loop")

    def __init__(self, registry: CollectorRegistry) -> None:
        declared = [each for each in vars(type(self)).values() if isinstance(each, _Declared)]
        self.families: dict[_Declared[Any], Any] = {each: each.made(registry) for each in declared}
        self.labelled: dict[str, list[Counter | Gauge | Histogram]] = defaultdict(list)
        """Label → the families that have it."""
        for each, family in self.families.items():
            for label in each.labels:
                self.labelled[label].append(family)
