"""The dashboard of links: what they carry and could carry, how well, and what that costs."""

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

EGRESS = "prfaas_control_link_egress_bits_per_second"
CAPACITY = "prfaas_control_link_capacity_bits_per_second"
MOVED = "prfaas_gateway_transferred_bytes_total"
HIDDEN = "prfaas_gateway_hidden_bytes_total"


def links_board() -> Board:
    """KV between clusters."""
    return Board(
        "prfaas-links",
        "prfaas: links",
        "What each link carries against what it can carry, how well it does, and what that costs.",
        (_load(), _quality(), _transfers(), _cost()),
        ("link",),
    )


def _load() -> ChartRow:
    return ChartRow(
        "Load",
        (
            Chart(
                "Egress and capacity",
                "What each link carried in the last 2 s, and what it can carry now.",
                (
                    PanelQuery(f"max by (link) ({EGRESS})", "{{link}} egress"),
                    PanelQuery(f"max by (link) ({CAPACITY})", "{{link}} capacity"),
                ),
                BITS_PER_S,
                width=12,
            ),
            Chart(
                "Utilisation",
                "Egress as a share of capacity.",
                (PanelQuery(f"max by (link) ({EGRESS}) / max by (link) ({CAPACITY})", "{{link}}"),),
                SHARE,
                width=12,
            ),
            Chart(
                "Capacity against the deployment file",
                "What the link can carry, as a share of the bandwidth that the file names.",
                (
                    PanelQuery(
                        f"max by (link) ({CAPACITY}) / max by (link) (prfaas_control_link_configured_bits_per_second)",
                        "{{link}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "Time until it is empty",
                "Until the accepted bytes have left, as predicted. Growing: more is offloaded than it carries.",
                largest("prfaas_control_link_drain_seconds", "link"),
                SECONDS,
            ),
            Chart(
                "Waiting bytes",
                "Produced and not acknowledged.",
                largest("prfaas_control_link_queued_bytes", "link"),
                BYTES,
            ),
        ),
    )


def _quality() -> ChartRow:
    return ChartRow(
        "Quality",
        (
            Chart(
                "In use",
                "Green while decisions may use the link.",
                largest("prfaas_control_link_up", "link"),
                form="states",
                width=12,
            ),
            Chart(
                "Bytes sent again",
                "Share of the bytes that TCP had to send again: loss on the way.",
                largest("prfaas_control_link_retransmit_ratio", "link"),
                SHARE,
                width=12,
            ),
            Chart(
                "Congestion",
                "0: none; up to 1. It makes decisions prefer the PD cluster.",
                largest("prfaas_control_link_congestion", "link"),
                SHARE,
            ),
            Chart(
                "Round trip",
                "The least one, and that of what is in flight. A gap between them is a queue on the way.",
                (
                    PanelQuery("max by (link) (prfaas_control_link_rtt_seconds)", "{{link}} least"),
                    PanelQuery("max by (link) (prfaas_control_link_queue_rtt_seconds)", "{{link}} in flight"),
                ),
                SECONDS,
            ),
            Chart(
                "Age of what is known",
                "Since a link's engines were heard of. It is asked ten times a second.",
                largest("prfaas_control_link_age_seconds", "link"),
                SECONDS,
            ),
        ),
    )


def _transfers() -> ChartRow:
    return ChartRow(
        "Transfers of all links",
        (
            Chart(
                "KV moved to decode instances",
                "By route: local is within a PD cluster, offload comes over a link.",
                rates(MOVED, "route"),
                BYTES_PER_S,
                "areas",
            ),
            Chart(
                "Overlapped share",
                "Share of the KV bytes that had arrived when the prefill ended. These cost no time.",
                (
                    PanelQuery(
                        f"sum by (route) (rate({HIDDEN}[{RATE}])) / sum by (route) (rate({MOVED}[{RATE}]))",
                        "{{route}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "Prefill and transfer",
                "From a prefill's start to its last byte.",
                quantiles("prfaas_gateway_transfer_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Transfers that failed",
                "As the engines count them, per second. Their requests are prefilled locally.",
                engine_rates("", "sends_failed", "leases_expired", "loads_failed", "digest_mismatches"),
                PER_S,
            ),
            Chart(
                "Transfers that were completed",
                "As the engines count them, per second.",
                engine_rates("", "sends_completed", "loads_completed"),
                PER_S,
            ),
            Chart(
                "Bytes at the engines",
                "KV bytes that engines sent, and that they loaded into their blocks.",
                engine_rates("", "bytes_sent", "bytes_loaded"),
                BYTES_PER_S,
            ),
        ),
    )


def _cost() -> ChartRow:
    return ChartRow(
        "Cost",
        (
            Chart(
                "Cost per hour",
                "What KV bytes over a link cost, in the currency of the deployment file. Empty without prices.",
                (
                    PanelQuery(
                        f"3600 * sum by (link) (rate(prfaas_gateway_egress_cost_total[{RATE}]))",
                        "{{link}}",
                    ),
                ),
                form="areas",
                width=12,
            ),
            Chart(
                "Cost in the time shown",
                "The same, added up.",
                (
                    PanelQuery(
                        "sum by (link) (increase(prfaas_gateway_egress_cost_total[$__range]))",
                        "{{link}}",
                    ),
                ),
                form="number",
                width=12,
            ),
        ),
    )
