"""The dashboard of engines: roles, queues, slots, KV in use, and what the scheduler makes of them."""

from prfaas.tools.monitoring.board import (
    BYTES_PER_S,
    PER_S,
    RATE,
    SECONDS,
    SHARE,
    Board,
    Chart,
    ChartRow,
    Form,
    PanelQuery,
    largest,
    rates,
)
from prfaas.tools.monitoring.catalogue import OWN_INSTANCE


def engines_board() -> Board:
    """Instances, chosen by cluster or by name."""
    return Board(
        "prfaas-engines",
        "prfaas: engines",
        "Which engines take part and in which role, what waits at them, and how the scheduler sees them.",
        (_states(), _load(), _memory(), _scheduling()),
        ("cluster", OWN_INSTANCE),
    )


def _of_instances(series: str) -> tuple[PanelQuery, ...]:
    """A gauge by instance, of the clusters that are chosen."""
    expression = (
        f"max by ({OWN_INSTANCE}) ({series} * on (job, instance, {OWN_INSTANCE}) group_left (cluster) "
        "prfaas_control_instance_info)"
    )
    return (PanelQuery(expression, f"{{{{{OWN_INSTANCE}}}}}"),)


def _chart(
    title: str, meaning: str, gauge: str, unit: str = "short", form: Form = "lines", width: int = 8
) -> Chart:
    return Chart(title, meaning, _of_instances(f"prfaas_control_instance_{gauge}"), unit, form, width)


def _states() -> ChartRow:
    return ChartRow(
        "States and roles",
        (
            _chart(
                "In routing", "Green while the instance may get work.", "healthy", form="states", width=12
            ),
            _chart(
                "Draining",
                "Green while the instance is to get nothing new.",
                "draining",
                form="states",
                width=12,
            ),
            _chart(
                "Role prefill",
                "Green while the instance has the role prefill.",
                "prefills",
                form="states",
                width=12,
            ),
            _chart(
                "Role decode",
                "Green while the instance has the role decode.",
                "decodes",
                form="states",
                width=12,
            ),
        ),
    )


def _load() -> ChartRow:
    return ChartRow(
        "Queues and slots",
        (
            _chart("Open prefills", "Prefills given to an instance that have not ended.", "queued_prefills"),
            _chart(
                "Predicted wait",
                "Until the prefill work that an instance accepted is done.",
                "wait_seconds",
                SECONDS,
            ),
            _chart(
                "Open requests", "Requests that are open at an instance, prefills and decodes.", "in_flight"
            ),
            Chart(
                "Slots in use",
                "Requests that an instance decodes, as a share of those that it decodes at a time. Over 100 %: some "
                "wait inside of the engine.",
                _of_instances(
                    "prfaas_control_instance_decoding_requests / (prfaas_control_instance_decode_slots > 0)"
                ),
                SHARE,
            ),
            Chart(
                "Prefills without an instance",
                "Prefills that no instance of the cluster has been given yet.",
                largest("prfaas_control_waiting_prefills", "cluster"),
            ),
            Chart(
                "Times out of routing",
                "How often an instance left routing, per second.",
                rates("prfaas_control_suspicions_total", OWN_INSTANCE),
                PER_S,
            ),
        ),
    )


def _memory() -> ChartRow:
    return ChartRow(
        "KV",
        (
            _chart(
                "KV cache in use",
                "Share of an engine's KV cache, as it says itself.",
                "kv_usage_ratio",
                SHARE,
            ),
            Chart(
                "Staging in use",
                "Share of the memory in which KV waits for its request. Full: transfers are dropped.",
                (
                    PanelQuery(
                        f"max by ({OWN_INSTANCE}) (prfaas_gateway_staging_used_bytes / prfaas_gateway_staging_bytes)",
                        f"{{{{{OWN_INSTANCE}}}}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "KV bytes at the engines",
                "Bytes that an engine sent, and that it loaded. Needs the engines' own metrics.",
                tuple(
                    PanelQuery(
                        f"sum by (instance) (rate(vllm:prfaas_bytes_{what}_total[{RATE}]))",
                        f"{{{{instance}}}} {what}",
                    )
                    for what in ("sent", "loaded")
                ),
                BYTES_PER_S,
            ),
        ),
    )


def _scheduling() -> ChartRow:
    return ChartRow(
        "Scheduling",
        (
            Chart(
                "Measured over predicted service time",
                "Mean over prefills. Far from 1: the profile does not fit the engine.",
                (
                    PanelQuery(
                        f"sum by (cluster) (rate(prfaas_control_service_ratio_sum[{RATE}])) / "
                        f"sum by (cluster) (rate(prfaas_control_service_ratio_count[{RATE}]))",
                        "{{cluster}}",
                    ),
                ),
            ),
            Chart(
                "Predicted TTFT by roles",
                "Mean, by the last evaluation of the roles: with the roles as they are, and with the best ones.",
                largest("prfaas_control_predicted_ttft_seconds", "roles"),
                SECONDS,
            ),
            Chart(
                "Prefill instances by roles",
                "Of a PD cluster, with the roles as they are and with the best ones.",
                (
                    PanelQuery(
                        "max by (cluster, roles) (prfaas_control_predicted_prefill_instances)",
                        "{{cluster}} {{roles}}",
                    ),
                ),
            ),
            Chart(
                "Role changes",
                "Conversions that ended, in the time of one point.",
                (
                    PanelQuery(
                        "sum by (cluster, to_role, outcome) "
                        f"(increase(prfaas_control_conversions_total[{RATE}]))",
                        "{{cluster}} to {{to_role}}: {{outcome}}",
                    ),
                ),
            ),
            Chart(
                "Threshold changes by reason",
                "Moves of the threshold, in the time of one point.",
                (
                    PanelQuery(
                        f"sum by (reason) (increase(prfaas_control_threshold_changes_total[{RATE}]))",
                        "{{reason}}",
                    ),
                ),
            ),
            Chart(
                "Not known",
                "Questions without an answer, per second; and pairs of engines that exchange no KV.",
                (
                    *rates("prfaas_control_telemetry_failures_total", "kind"),
                    PanelQuery("max(prfaas_control_incompatible_pairs)", "incompatible pairs"),
                ),
            ),
        ),
    )
