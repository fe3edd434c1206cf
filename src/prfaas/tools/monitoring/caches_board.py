"""The dashboard of cached prefixes: engines' own caches, the index, prefixes that move, and pools."""

from prfaas.tools.monitoring.board import (
    BITS_PER_S,
    BYTES,
    BYTES_PER_S,
    PER_S,
    RATE,
    SECONDS,
    SHARE,
    Board,
    Chart,
    ChartRow,
    PanelQuery,
    engine_rates,
    largest,
    quantiles,
    rates,
)
from prfaas.tools.monitoring.catalogue import OWN_INSTANCE


def caches_board() -> Board:
    """What is cached where, and what that spares."""
    return Board(
        "prfaas-caches",
        "prfaas: prefix caches and pools",
        "What engines and pools hold, how much of the prompts that spares, and whether the index knows of it.",
        (_hits(), _index(), _moves(), _pools(), _pool_traffic()),
        (OWN_INSTANCE, "pool"),
    )


def _hits() -> ChartRow:
    return ChartRow(
        "Engines' own caches",
        (
            Chart(
                "Hit rate",
                "Share of prompt tokens that an engine's own cache held lately.",
                largest("prfaas_control_instance_prefix_hit_ratio", OWN_INSTANCE),
                SHARE,
            ),
            Chart(
                "Indexed blocks",
                "KV blocks that the index knows at an instance.",
                largest("prfaas_control_instance_blocks", OWN_INSTANCE),
            ),
            Chart(
                "Uncached prompt tokens",
                "Prompt tokens per second that the PD cluster did not hold.",
                rates("prfaas_gateway_uncached_tokens_total", "route"),
                PER_S,
                "areas",
            ),
        ),
    )


def _index() -> ChartRow:
    return ChartRow(
        "The index",
        (
            Chart(
                "KV events",
                "Events applied per second, by instance or pool.",
                (
                    PanelQuery(
                        f"max by ({OWN_INSTANCE}) (rate(prfaas_control_kv_events_total[{RATE}]))",
                        f"{{{{{OWN_INSTANCE}}}}}",
                    ),
                ),
                PER_S,
            ),
            Chart(
                "Lost events",
                "Gaps in the events, replays of them, and gaps that nothing could fill, in the time of one point.",
                tuple(
                    PanelQuery(
                        f"sum(max by ({OWN_INSTANCE}) (increase(prfaas_control_feed_{what}[{RATE}])))", what
                    )
                    for what in ("gaps", "replays", "resyncs")
                ),
            ),
            Chart(
                "Holdings forgotten by reason",
                "Times what an instance holds was forgotten, in the time of one point.",
                (
                    PanelQuery(
                        f"sum by (reason) (increase(prfaas_control_holdings_dropped_total[{RATE}]))",
                        "{{reason}}",
                    ),
                ),
            ),
            Chart(
                "Applying a batch",
                "How long a batch of events keeps the gateway's event loop.",
                quantiles("prfaas_control_index_apply_seconds", "instance", 0.95),
                SECONDS,
            ),
            Chart(
                "Blocks in the index",
                "Over all holders.",
                largest("prfaas_control_index_blocks", "instance"),
            ),
        ),
    )


def _moves() -> ChartRow:
    return ChartRow(
        "Prefixes that move",
        (
            Chart(
                "Moved before a prefill",
                "Prefixes that were to move to a prefill instance first, by outcome.",
                rates("prfaas_gateway_cache_transfers_total", "outcome"),
                PER_S,
            ),
            Chart(
                "Copies to other clusters",
                "Hot prefixes: found worth a copy, and requests that found one.",
                (
                    PanelQuery(f"sum(rate(prfaas_control_prefix_copies_total[{RATE}]))", "found worth it"),
                    PanelQuery(f"sum(rate(prfaas_control_prefix_copy_hits_total[{RATE}]))", "used"),
                    *rates("prfaas_control_prefix_copies_ended_total", "outcome"),
                ),
                PER_S,
            ),
            Chart(
                "Bytes of both",
                "KV bytes moved to prefill instances, and those of copies.",
                (
                    PanelQuery(
                        f"sum(rate(prfaas_gateway_cache_transferred_bytes_total[{RATE}]))", "before a prefill"
                    ),
                    PanelQuery(f"sum(rate(prfaas_control_prefix_copied_bytes_total[{RATE}]))", "copies"),
                ),
                BYTES_PER_S,
            ),
            Chart(
                "Tokens of copies",
                "Tokens that were copied, and tokens that copies spared.",
                (
                    PanelQuery(f"sum(rate(prfaas_control_prefix_copied_tokens_total[{RATE}]))", "copied"),
                    PanelQuery(
                        f"sum(rate(prfaas_control_prefix_copy_spared_tokens_total[{RATE}]))", "spared"
                    ),
                ),
                PER_S,
            ),
        ),
    )


def _pools() -> ChartRow:
    return ChartRow(
        "Pools",
        (
            Chart(
                "Answering",
                "Green while a pool's daemon answers.",
                largest("prfaas_control_pool_up", "pool"),
                form="states",
            ),
            Chart(
                "Room in use",
                "Bytes of the pages held as a share of those that may be held, by tier.",
                (
                    PanelQuery(
                        "max by (pool, tier) (prfaas_control_pool_bytes) / "
                        "(max by (pool, tier) (prfaas_control_pool_capacity_bytes) > 0)",
                        "{{pool}} {{tier}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "Pages",
                "Pages held, by tier and KV group.",
                (
                    PanelQuery(
                        "max by (pool, tier, group) (prfaas_control_pool_pages)",
                        "{{pool}} {{tier}} {{group}}",
                    ),
                ),
            ),
            Chart(
                "Tokens from pools",
                "Prompt tokens per second that engines loaded, by tier.",
                (
                    PanelQuery(
                        f"max by (pool, tier) (rate(prfaas_control_pool_hit_tokens[{RATE}]))",
                        "{{pool}} {{tier}}",
                    ),
                ),
                PER_S,
                "areas",
            ),
            Chart(
                "Lost pages by reason",
                "refused: no room; evicted: others took the room; wrong: bytes were not what they should be.",
                (
                    PanelQuery(
                        f"max by (pool, why) (increase(prfaas_control_pool_lost_pages[{RATE}]))",
                        "{{pool}} {{why}}",
                    ),
                ),
            ),
            Chart(
                "Engines and pins",
                "Connections of engines, and pages that loads are reading.",
                (
                    PanelQuery("max by (pool) (prfaas_control_pool_sessions)", "{{pool}} engines"),
                    PanelQuery("max by (pool) (prfaas_control_pool_pinned_pages)", "{{pool}} pinned pages"),
                ),
            ),
        ),
    )


def _pool_traffic() -> ChartRow:
    return ChartRow(
        "Traffic of pools",
        (
            Chart(
                "What becomes of bytes",
                "Stored by engines, evicted, moved between memory and SSD, copied from other pools and lent to them.",
                (
                    PanelQuery(
                        f"sum by (what) (max by (pool, what) (rate(prfaas_control_pool_moved_bytes[{RATE}])))",
                        "{{what}}",
                    ),
                ),
                BYTES_PER_S,
            ),
            Chart(
                "Speed of loads",
                "How fast the engines of a pool load from its memory, as they measured in the last minute.",
                largest("prfaas_control_pool_load_bits_per_second", "pool"),
                BITS_PER_S,
            ),
            Chart(
                "Waiting for SSD",
                "Bytes in memory that wait to be written.",
                largest("prfaas_control_pool_ssd_queued_bytes", "pool"),
                BYTES,
            ),
            Chart(
                "Loads of engines",
                "Prefixes that engines loaded from their pool, and could not load. Needs the engines' own metrics.",
                engine_rates("pool_loads_", "completed", "failed"),
                PER_S,
            ),
            Chart(
                "Bytes between engines and pools",
                "Loaded from pools and stored into them. Needs the engines' own metrics.",
                engine_rates("pool_bytes_", "loaded", "stored"),
                BYTES_PER_S,
            ),
            Chart(
                "Indexed blocks of pools",
                "Blocks and states of a pool that the index knows: all, and those in memory.",
                (PanelQuery("max by (pool, tier) (prfaas_control_pool_blocks)", "{{pool}} {{tier}}"),),
            ),
        ),
    )
