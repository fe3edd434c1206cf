"""The first dashboard: requests, their times, where they went, and how the gateway itself is."""

from prfaas.tools.monitoring.board import (
    BYTES,
    PER_S,
    RATE,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    Board,
    Chart,
    ChartRow,
    PanelQuery,
    largest,
    quantiles,
    rates,
)

REQUESTS = "prfaas_gateway_requests_total"


def overview_board() -> Board:
    """Where to look first."""
    return Board(
        "prfaas-overview",
        "prfaas: overview",
        "Requests, their times and their routes; and whether the gateways are well.",
        (_now(), _requests(), _times(), _routes(), _gateways()),
    )


def _now() -> ChartRow:
    answered = f"sum(rate({REQUESTS}[{RATE}]))"

    def number(title: str, meaning: str, expression: str, unit: str) -> Chart:
        return Chart(title, meaning, (PanelQuery(expression, title),), unit, "number", 4)

    return ChartRow(
        "Now",
        (
            number("Gateways", "Gateways that Prometheus reaches.", "count(prfaas_build_info)", "short"),
            number(
                "Instances in routing",
                "Engines that may get work, as a share of all that the deployment has.",
                "avg(max by (exported_instance) (prfaas_control_instance_healthy))",
                SHARE,
            ),
            number("Requests", "Requests that ended, per second.", answered, REQUESTS_PER_S),
            number(
                "Errors",
                "Share of requests that ended with an engine's error.",
                f'sum(rate({REQUESTS}{{outcome="engine_error"}}[{RATE}])) / {answered}',
                SHARE,
            ),
            number(
                "Offloaded",
                "Share of requests whose prompt another cluster prefilled.",
                f'sum(rate({REQUESTS}{{route="offload"}}[{RATE}])) / {answered}',
                SHARE,
            ),
            number(
                "TTFT, 95 %",
                "What 95 of 100 requests wait at most for their first byte, over all routes.",
                f"histogram_quantile(0.95, sum by (le) (rate(prfaas_gateway_ttft_seconds_bucket[{RATE}])))",
                SECONDS,
            ),
        ),
    )


def _requests() -> ChartRow:
    return ChartRow(
        "Requests",
        (
            Chart(
                "Requests by outcome",
                "ok; client_error: a refusal; engine_error: also a stream that broke; cancelled: the client left.",
                rates(REQUESTS, "outcome"),
                REQUESTS_PER_S,
                "areas",
            ),
            Chart(
                "Refused requests by reason",
                "Generating requests that got a refusal in place of an answer. queue, requests, bodies and share "
                "are 429s for load; unavailable is a 503.",
                rates("prfaas_gateway_refused_total", "reason"),
                REQUESTS_PER_S,
                "areas",
            ),
            Chart(
                "What open requests wait for",
                "Requests without a first byte so far. Many at prefill_instance: prefill is short of engines.",
                (PanelQuery("sum by (step) (prfaas_gateway_waiting_requests)", "{{step}}"),),
                form="areas",
            ),
            Chart(
                "Open requests",
                "Requests being served, KV transfers being waited for, and transfers being abandoned.",
                (
                    PanelQuery("sum(prfaas_gateway_in_flight_requests)", "requests"),
                    PanelQuery("sum(prfaas_gateway_in_flight_transfers)", "transfers"),
                    PanelQuery("sum(prfaas_gateway_background_tasks)", "abandoned transfers"),
                ),
            ),
            Chart(
                "Wait of a new request",
                "The least that any new request would wait, as predicted, and the wait beyond which it is refused.",
                (
                    *largest("prfaas_gateway_queue_wait_seconds", "instance"),
                    PanelQuery("min(prfaas_gateway_queue_limit_seconds)", "limit"),
                ),
                SECONDS,
            ),
            Chart(
                "Generated tokens",
                "Tokens of answers per second, by route.",
                rates("prfaas_gateway_answer_tokens_total", "route"),
                PER_S,
                "areas",
            ),
        ),
    )


def _times() -> ChartRow:
    return ChartRow(
        "Times",
        (
            Chart(
                "TTFT by route",
                "From a request's arrival to its answer's first byte: the median, and what 95 of 100 do not exceed.",
                quantiles("prfaas_gateway_ttft_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Time per further token by route",
                "Mean time between tokens of a stream.",
                quantiles("prfaas_gateway_tpot_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Whole request by route",
                "From a request's arrival to its answer's end.",
                quantiles("prfaas_gateway_request_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Prefill by route",
                "From a prefill's start to the producer's answer.",
                quantiles("prfaas_gateway_prefill_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Prefill and transfer by route",
                "From a prefill's start to the last byte at the decode instance.",
                quantiles("prfaas_gateway_transfer_seconds", "route", 0.5, 0.95),
                SECONDS,
            ),
            Chart(
                "Uncached prompt tokens",
                "Prompt tokens per second that the PD cluster did not hold, by route.",
                rates("prfaas_gateway_uncached_tokens_total", "route"),
                PER_S,
                "areas",
            ),
        ),
    )


def _routes() -> ChartRow:
    return ChartRow(
        "Routes and what failed on the way",
        (
            Chart(
                "Decisions by reason",
                "Routed requests, by the reason of the decision.",
                (
                    PanelQuery(
                        f"sum by (route, reason) (rate(prfaas_control_decisions_total[{RATE}]))",
                        "{{route}}: {{reason}}",
                    ),
                ),
                REQUESTS_PER_S,
                "areas",
            ),
            Chart(
                "Fallbacks by reason",
                "Prefills elsewhere that failed. Their requests were prefilled again, and have a slower first token.",
                rates("prfaas_gateway_fallbacks_total", "reason"),
                REQUESTS_PER_S,
                "areas",
            ),
            Chart(
                "Threshold",
                "Uncached tokens above which a PD cluster offloads.",
                largest("prfaas_control_threshold_tokens", "cluster"),
            ),
            Chart(
                "Prefilled by the decode instance",
                "Requests without a prefill of their own, by reason.",
                rates("prfaas_gateway_direct_total", "reason"),
                REQUESTS_PER_S,
            ),
            Chart(
                "Decode failures by reason",
                "Decode instances that failed a request.",
                rates("prfaas_gateway_decode_failures_total", "reason"),
                REQUESTS_PER_S,
            ),
            Chart(
                "Streams that went on elsewhere",
                "Streams whose decode instance failed after the first byte, by what became of them.",
                rates("prfaas_gateway_continuations_total", "outcome"),
                REQUESTS_PER_S,
            ),
        ),
    )


def _gateways() -> ChartRow:
    return ChartRow(
        "Gateways",
        (
            Chart(
                "Lag of the event loop",
                "What 99 of 100 turns of the loop are late at most. Over 0.1 s the gateway's machine is too busy.",
                quantiles("prfaas_gateway_loop_lag_seconds", "instance", 0.99),
                SECONDS,
            ),
            Chart(
                "Processor",
                "Share of one core that each gateway uses.",
                (
                    PanelQuery(
                        f"sum by (instance) (rate(process_cpu_seconds_total[{RATE}]) and on (job, instance) "
                        "prfaas_build_info)",
                        "{{instance}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "Memory",
                "Resident memory of each gateway.",
                (
                    PanelQuery(
                        "max by (instance) (process_resident_memory_bytes and on (job, instance) "
                        "prfaas_build_info)",
                        "{{instance}}",
                    ),
                ),
                BYTES,
            ),
            Chart(
                "File descriptors in use",
                "Open descriptors as a share of those that may be open. Each client takes one.",
                (
                    PanelQuery(
                        "max by (instance) (process_open_fds / process_max_fds and on (job, instance) "
                        "prfaas_build_info)",
                        "{{instance}}",
                    ),
                ),
                SHARE,
            ),
            Chart(
                "Time until certificates end",
                "By file on the gateway's machine. `prfaas certs` makes new ones.",
                (
                    PanelQuery(
                        "min by (certificate) (prfaas_gateway_certificate_expires_timestamp_seconds) - time()",
                        "{{certificate}}",
                    ),
                ),
                SECONDS,
            ),
            Chart(
                "Gateways of the fleet",
                "Members as each gateway sees them, and who leads. Empty with one gateway alone.",
                (
                    PanelQuery("max by (instance) (prfaas_control_fleet_members)", "{{instance}} sees"),
                    PanelQuery("max by (instance) (prfaas_control_fleet_leads)", "{{instance}} leads"),
                ),
            ),
            Chart(
                "Spans of traces",
                "Spans by what became of them. failed: the collector did not take them; dropped: there was no room.",
                rates("prfaas_gateway_trace_spans_total", "outcome"),
                PER_S,
            ),
            Chart(
                "Compared answers",
                "Answers compared with the plain path's. A mismatch is an answer that KV transfer changed.",
                rates("prfaas_gateway_shadows_total", "outcome"),
                REQUESTS_PER_S,
            ),
        ),
    )
