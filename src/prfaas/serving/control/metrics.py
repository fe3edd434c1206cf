"""The control plane's Prometheus metrics, `prfaas_control_*`."""

from collections import defaultdict
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prfaas.serving.declared_metrics import Declared, DeclaredMetrics, cached_counter, counter, gauge

_SLICE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
TIERS = ("memory", "ssd")
"""Of a pool."""
POOL_BYTES = ("stored", "evicted", "promoted", "ssd_written", "ssd_read", "copied", "lent")
"""What became of a pool's bytes: `copied` came from other pools, `lent` went to them."""
POOL_LOSSES = ("refused", "evicted", "wrong")
"""Why pages are not there: no room, evicted, or their bytes were not what they should be."""
_SERVICE_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


class ControlMetrics(DeclaredMetrics):
    """Gauges are written once a second, by the parts (`Part.write_gauges`); counters when something happens."""

    prefix = "prfaas_control_"

    decisions = cached_counter("Routed requests, by decision.", "route", "reason")
    policy_failures = counter("Decisions that a policy of one's own failed to make.")
    experiment_other = gauge("1 while requests are routed as the experiment's other way.")
    experiment_ended = gauge("1 once the experiment has ended by itself, since the other way hurt.")
    cache_transfers = counter("Decisions that move a cached prefix first.")
    threshold_tokens = gauge("Uncached tokens above which a PD cluster offloads (+Inf: never).", "cluster")
    threshold_changes = counter("Moves of a threshold.", "cluster", "reason")
    conversions = counter("Role conversions that ended.", "cluster", "to_role", "outcome")
    copies = counter("Prefixes found worth copying to another cluster.", name="prefix_copies")
    copies_ended = counter("What became of them.", "outcome", name="prefix_copies_ended")
    copied_bytes = counter("KV bytes of copies, of broken ones too.", name="prefix_copied_bytes")
    copied_tokens = counter("Tokens of copies that were made.", name="prefix_copied_tokens")
    waiting_prefills = gauge("Prefills that no instance of the cluster has been given yet.", "cluster")
    instance_info = gauge("1; the labels say where the instance is.", "instance", "cluster", "kind")
    instance_healthy = gauge("1 when the instance is in routing.", "instance")
    instance_prefills = gauge("1 when the instance prefills.", "instance")
    instance_decodes = gauge("1 when the instance decodes.", "instance")
    instance_draining = gauge("1 while it is to get nothing new.", "instance")
    instance_in_flight = gauge("Requests open there.", "instance")
    instance_wait_seconds = gauge("Until the accepted prefill work is done, as predicted.", "instance")
    instance_age_seconds = gauge("Since the engine was heard of.", "instance")
    instance_blocks = gauge("KV blocks indexed (or recorded) there.", "instance")
    instance_queued_prefills = gauge("Prefills given to it that have not ended.", "instance")
    instance_decoding_requests = gauge("Requests that it decodes, or will.", "instance")
    instance_decode_slots = gauge("Requests that it decodes at a time.", "instance")
    instance_kv_usage_ratio = gauge("Share of its KV cache in use, as the engine says.", "instance")
    instance_prefix_hit_ratio = gauge("Share of prompt tokens that its own cache held lately.", "instance")
    notices = counter("Times that an instance was to be taken away.", "instance")
    suspicions = counter("Times an instance left routing.", "instance")
    incompatible = gauge("Pairs of engines that exchange no KV.", name="incompatible_pairs")
    link_up = gauge("1 when the link is used.", "link")
    link_configured = gauge(
        "What the deployment file says that it carries.", "link", name="link_configured_bits_per_second"
    )
    link_capacity = gauge("What the link can carry now.", "link", name="link_capacity_bits_per_second")
    link_egress = gauge("What it carried in the last 2 s.", "link", name="link_egress_bits_per_second")
    link_queued_bytes = gauge("Produced and not acknowledged.", "link")
    link_drain_seconds = gauge("Until the accepted bytes have left, as predicted.", "link")
    link_rtt_seconds = gauge("Least round trip.", "link")
    link_queue_rtt_seconds = gauge("Round trip of what is in flight.", "link")
    link_retransmit_ratio = gauge("Share of the bytes sent again.", "link")
    link_congestion = gauge("0: none; up to 1.", "link")
    link_age_seconds = gauge("Since the link was heard of.", "link")
    events = counter("KV cache events applied.", "instance", name="kv_events")
    drops = counter(
        "Times what an instance holds was forgotten.", "instance", "reason", name="holdings_dropped"
    )
    feed_gaps = gauge("Gaps in an instance's events so far.", "instance")
    feed_replays = gauge("Replays of an instance's events so far.", "instance")
    feed_resyncs = gauge("Gaps that nothing could fill so far.", "instance")
    pool_up = gauge("1 while the pool's daemon answers.", "pool")
    pool_epoch = gauge("Of the daemon's start: another one is another process.", "pool")
    pool_sessions = gauge("Connections of engines.", "pool")
    pool_pages = gauge("Pages held.", "pool", "tier", "group")
    pool_bytes = gauge("Bytes of the pages held.", "pool", "tier")
    pool_capacity_bytes = gauge("Bytes that it may hold.", "pool", "tier")
    pool_blocks = gauge("Its blocks and states in the global index.", "pool", "tier")
    pool_pinned_pages = gauge("Pages that loads are reading.", "pool")
    pool_hit_tokens = gauge("Prompt tokens that its engines loaded, so far.", "pool", "tier")
    pool_load_bits_per_s = gauge(
        "How fast its engines load from its memory.", "pool", name="pool_load_bits_per_second"
    )
    pool_moved_bytes = gauge("Bytes since the daemon's start, by what became of them.", "pool", "what")
    pool_lost_pages = gauge("Pages since the daemon's start that went or never came, by why.", "pool", "why")
    pool_ssd_queued_bytes = gauge("Bytes in memory that wait to be written to SSD.", "pool")
    index_blocks = gauge("Blocks in the global index, per holder.")
    index_apply_seconds = Declared(
        partial(Histogram, buckets=_SLICE_SECONDS),
        "Applying one batch of events in the event loop.",
    )
    service_ratio = Declared(
        partial(Histogram, buckets=_SERVICE_RATIOS),
        "Measured service time of a prefill over the predicted one.",
        "cluster",
    )
    telemetry_failures = counter("Questions without an answer.", "kind")
    loop_failures = counter("Unexpected failures that a loop survived.", "loop")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.labelled: dict[str, list[Counter | Gauge | Histogram]] = defaultdict(list)
        """Label → the families that have it."""
        for each, family in self.families.items():
            for label in each.labels:
                self.labelled[label].append(family)
