"""For each alert: series for which it is told, with its labels and its sentence, and series for which it is not.

One sample a minute, in promtool's notation: `1x9 0x5` is ten times 1 and six times 0, `0+2x9` grows by 2.
"""

from dataclasses import dataclass, field

GATEWAY = {"deployment": "d", "job": "prfaas-gateway", "instance": "gateway:8001"}
OTHER_GATEWAY = {**GATEWAY, "instance": "other:8001"}
ENGINE = {"deployment": "d", "job": "prfaas-engines", "instance": "home-0", "model_name": "m", "engine": "0"}


@dataclass(frozen=True, slots=True)
class Case:
    """Series at a minute, and what is told then."""

    series: dict[str, str]
    at_min: int
    told: dict[str, str] = field(default_factory=dict)
    """Labels beside `severity`; empty with `sentence` empty: nothing is told."""
    sentence: str = ""


def series(name: str, target: dict[str, str] = GATEWAY, **labels: str) -> str:
    """A series as a scrape would store it."""
    told = ", ".join(f'{label}="{value}"' for label, value in {**target, **labels}.items())
    return f"{name}{{{told}}}"


def instance(name: str, cluster: str = "home", **gauges: str) -> dict[str, str]:
    """What one gateway tells of an instance."""
    found = {
        series(f"prfaas_control_instance_{gauge}", exported_instance=name): values
        for gauge, values in gauges.items()
    }
    where = {"exported_instance": name, "cluster": cluster, "kind": "pd"}
    return found | {series("prfaas_control_instance_info", **where): "1x60"}


def requests(outcome: str, values: str, route: str = "offload") -> dict[str, str]:
    named = {"endpoint": "chat", "route": route, "outcome": outcome}
    return {series("prfaas_gateway_requests_total", **named): values}


def link(gauge: str, values: str, target: dict[str, str] = GATEWAY) -> dict[str, str]:
    return {series(f"prfaas_control_link_{gauge}", target, link="far->home"): values}


def service_ratio(total: str) -> dict[str, str]:
    """Of ten prefills a minute."""
    name = "prfaas_control_service_ratio"
    return {series(f"{name}_sum", cluster="far"): total, series(f"{name}_count", cluster="far"): "0+10x90"}


PROFILE_WRONG = "Prefills of the cluster far take less than half or more than twice of what its profile says."
BUILD = series("prfaas_build_info", version="1", python="3.11")
D = {"deployment": "d"}
LINK = D | {"link": "far->home"}
GBIT = "1000000000x30"

CASES: dict[str, tuple[Case, ...]] = {
    "PrfaasGatewayDown": (
        Case(
            {series("up"): "1x9 0x9", BUILD: "1x9 _x9"},
            12,
            GATEWAY,
            "The gateway gateway:8001 does not answer.",
        ),
        Case({series("up"): "1x9 0 1x9", BUILD: "1x20"}, 11),
        # Something else is down.
        Case({series("up", ENGINE): "0x20", series("up"): "1x20", BUILD: "1x20"}, 12),
    ),
    "PrfaasNoGateway": (
        Case({series("up"): "0x20"}, 5, {}, "Prometheus reaches no gateway."),
        Case({BUILD: "1x20"}, 5),
    ),
    "PrfaasNoDecodeInstance": (
        Case(
            instance("p", healthy="1x20", decodes="0x20", draining="0x20")
            | instance("d0", healthy="1x5 0x20", decodes="1x30", draining="0x30"),
            10,
            D,
            "No instance can decode, so every request gets a 503.",
        ),
        Case(
            instance("d0", healthy="1x20", decodes="1x20", draining="1x20"),
            10,
            D,
            "No instance can decode, so every request gets a 503.",
        ),
        Case(
            instance("d0", healthy="0x20", decodes="1x20", draining="0x20")
            | instance("d1", healthy="1x20", decodes="1x20", draining="0x20"),
            10,
        ),
    ),
    "PrfaasClusterOut": (
        Case(
            instance("f0", "far", healthy="0x20") | instance("h0", healthy="1x20"),
            10,
            D | {"cluster": "far"},
            "No instance of the cluster far is in routing.",
        ),
        Case(instance("f0", "far", healthy="0x20") | instance("f1", "far", healthy="1x20"), 10),
    ),
    "PrfaasInstanceOut": (
        Case(
            instance("h0", healthy="0x20") | instance("h1", healthy="1x20"),
            10,
            D | {"exported_instance": "h0"},
            "The instance h0 is out of routing.",
        ),
        # One of two gateways still reaches it.
        Case(
            instance("h0", healthy="0x20")
            | {series("prfaas_control_instance_healthy", OTHER_GATEWAY, exported_instance="h0"): "1x20"},
            10,
        ),
    ),
    "PrfaasLinkDown": (
        Case(
            link("up", "1x5 0x20"),
            10,
            LINK,
            "The link far->home is not used; what it carried is prefilled locally.",
        ),
        Case(link("up", "1x5 0x20") | link("up", "1x30", OTHER_GATEWAY), 10),
        Case(link("up", "1x5 0 1x20"), 7),
    ),
    "PrfaasLinkNarrow": (
        Case(
            link("capacity_bits_per_second", "400000000x30") | link("configured_bits_per_second", GBIT),
            10,
            LINK,
            "The link far->home carries 400Mbit/s, less than half of what the file says.",
        ),
        Case(link("capacity_bits_per_second", "600000000x30") | link("configured_bits_per_second", GBIT), 10),
    ),
    "PrfaasLinkLossy": (
        Case(
            link("retransmit_ratio", "0.05x30"), 10, LINK, "The link far->home sends 5% of its bytes again."
        ),
        Case(link("retransmit_ratio", "0.01x30"), 10),
        Case(link("retransmit_ratio", "0x8 0.5x2 0x20"), 10),
    ),
    "PrfaasLinkBacklog": (
        Case(
            link("drain_seconds", "90x30"),
            10,
            LINK,
            "The link far->home needs 1m 30s for the bytes that wait.",
        ),
        Case(link("drain_seconds", "9x30"), 10),
    ),
    "PrfaasQueueLong": (
        Case(
            {
                series("prfaas_gateway_queue_wait_seconds"): "45x30",
                series("prfaas_gateway_queue_limit_seconds"): "60x30",
            },
            10,
            D,
            "A new request waits 45s, more than half of the limit.",
        ),
        Case(
            {
                series("prfaas_gateway_queue_wait_seconds"): "20x30",
                series("prfaas_gateway_queue_limit_seconds"): "60x30",
            },
            10,
        ),
        # One of two gateways has room.
        Case(
            {
                series("prfaas_gateway_queue_wait_seconds"): "45x30",
                series("prfaas_gateway_queue_wait_seconds", OTHER_GATEWAY): "1x30",
                series("prfaas_gateway_queue_limit_seconds"): "60x30",
            },
            10,
        ),
    ),
    "PrfaasRefusing": (
        Case(
            {series("prfaas_gateway_refused_total", reason="queue"): "0+5x30"},
            10,
            D | {"reason": "queue"},
            "Requests are refused: queue.",
        ),
        # A client's own mistake.
        Case({series("prfaas_gateway_refused_total", reason="invalid"): "0+5x30"}, 10),
        Case({series("prfaas_gateway_refused_total", reason="queue"): "5x30"}, 10),
    ),
    "PrfaasErrors": (
        Case(
            requests("ok", "0+95x30") | requests("engine_error", "0+5x30"),
            15,
            D,
            "5% of the requests end with an engine's error.",
        ),
        Case(requests("ok", "0+999x30") | requests("engine_error", "0+1x30"), 15),
        Case(requests("ok", "0+1x30") | requests("client_error", "0+50x30"), 15),
    ),
    "PrfaasFallbacks": (
        Case(
            requests("ok", "0+80x40") | {series("prfaas_gateway_fallbacks_total", reason="died"): "0+20x40"},
            20,
            D,
            "20% of the prefills elsewhere fail and are done again.",
        ),
        # All of them fail, so that there is no request of that route.
        Case(
            {series("prfaas_gateway_fallbacks_total", reason="died"): "0+20x40"},
            20,
            D,
            "100% of the prefills elsewhere fail and are done again.",
        ),
        Case(
            requests("ok", "0+99x40")
            | requests("ok", "0+1x40", "local")
            | {series("prfaas_gateway_fallbacks_total", reason="died"): "0+1x40"},
            20,
        ),
    ),
    "PrfaasCertificateEnds": (
        Case(
            {
                series(
                    "prfaas_gateway_certificate_expires_timestamp_seconds", certificate="gateway.pem"
                ): f"{20 * 60 + 5 * 86400}x30"
            },
            20,
            D | {"certificate": "gateway.pem"},
            "The certificate gateway.pem ends in 5d 0h 0m 0s.",
        ),
        Case(
            {
                series(
                    "prfaas_gateway_certificate_expires_timestamp_seconds", certificate="gateway.pem"
                ): f"{30 * 86400}x30"
            },
            20,
        ),
    ),
    "PrfaasCertificateEnded": (
        Case(
            {series("prfaas_gateway_certificate_expires_timestamp_seconds", certificate="ca.crt"): "600x30"},
            20,
            D | {"certificate": "ca.crt"},
            "The certificate ca.crt ends within a day, or has ended.",
        ),
        Case(
            {
                series(
                    "prfaas_gateway_certificate_expires_timestamp_seconds", certificate="ca.crt"
                ): f"{5 * 86400}x30"
            },
            20,
        ),
    ),
    "PrfaasKvEventsLost": (
        Case(
            {series("prfaas_control_feed_resyncs", exported_instance="h0"): "0x5 1x20"},
            10,
            D | {"exported_instance": "h0"},
            "KV events of h0 are lost, so the index knows too little of its cache.",
        ),
        Case({series("prfaas_control_feed_resyncs", exported_instance="h0"): "3x30"}, 10),
    ),
    "PrfaasPoolDown": (
        Case(
            {series("prfaas_control_pool_up", pool="home-pool"): "0x30"},
            10,
            D | {"pool": "home-pool"},
            "The pool home-pool does not answer; its engines prefill what it held.",
        ),
        Case({series("prfaas_control_pool_up", pool="home-pool"): "1x30"}, 10),
    ),
    "PrfaasPoolWrongPages": (
        Case(
            {series("prfaas_control_pool_lost_pages", pool="home-pool", why="wrong"): "0x5 2x20"},
            10,
            D | {"pool": "home-pool"},
            "Pages of the pool home-pool had wrong bytes. They were thrown away.",
        ),
        Case({series("prfaas_control_pool_lost_pages", pool="home-pool", why="evicted"): "0+9x20"}, 10),
    ),
    "PrfaasDigestMismatch": (
        Case(
            {series("vllm:prfaas_digest_mismatches_total", ENGINE): "0x5 1x20"},
            10,
            {"deployment": "d", "job": "prfaas-engines", "instance": "home-0"},
            "The engine home-0 got KV that is not what was computed. It was not used.",
        ),
        Case({series("vllm:prfaas_digest_mismatches_total", ENGINE): "0x30"}, 10),
    ),
    "PrfaasAnswersDiffer": (
        Case(
            {series("prfaas_gateway_shadows_total", outcome="mismatch"): "0x5 1x20"},
            10,
            D,
            "An answer differs from that of the plain path.",
        ),
        Case({series("prfaas_gateway_shadows_total", outcome="tie"): "0+1x30"}, 10),
    ),
    "PrfaasGatewayBusy": (
        Case(
            {
                series("prfaas_gateway_loop_lag_seconds_bucket", le="0.1"): "0x40",
                series("prfaas_gateway_loop_lag_seconds_bucket", le="0.25"): "0+300x40",
                series("prfaas_gateway_loop_lag_seconds_bucket", le="+Inf"): "0+300x40",
            },
            30,
            GATEWAY,
            "The event loop of the gateway gateway:8001 is 248.5ms late.",
        ),
        Case(
            {
                series("prfaas_gateway_loop_lag_seconds_bucket", le="0.1"): "0+300x40",
                series("prfaas_gateway_loop_lag_seconds_bucket", le="0.25"): "0+300x40",
                series("prfaas_gateway_loop_lag_seconds_bucket", le="+Inf"): "0+300x40",
            },
            30,
        ),
    ),
    "PrfaasDescriptorsShort": (
        Case(
            {series("process_open_fds"): "900x30", series("process_max_fds"): "1000x30", BUILD: "1x30"},
            10,
            GATEWAY,
            "The gateway gateway:8001 uses 90% of its file descriptors.",
        ),
        # An engine's are its own matter.
        Case(
            {
                series("process_open_fds", ENGINE): "900x30",
                series("process_max_fds", ENGINE): "1000x30",
                BUILD: "1x30",
            },
            10,
        ),
        Case({series("process_open_fds"): "500x30", series("process_max_fds"): "1000x30", BUILD: "1x30"}, 10),
    ),
    "PrfaasFleetCut": (
        Case(
            {
                series("prfaas_control_fleet_connected"): "1x5 0x20",
                series("prfaas_control_fleet_connected", OTHER_GATEWAY): "1x30",
            },
            10,
            GATEWAY,
            "The gateway gateway:8001 is cut off from etcd and goes on with what it knows.",
        ),
        Case({series("prfaas_control_fleet_connected"): "1x30"}, 10),
    ),
    "PrfaasNoLeader": (
        Case(
            {
                series("prfaas_control_fleet_leads"): "1x5 0x20",
                series("prfaas_control_fleet_leads", OTHER_GATEWAY): "0x30",
            },
            10,
            D,
            "No gateway leads, so thresholds and roles stay as they are.",
        ),
        # The next one took over.
        Case(
            {
                series("prfaas_control_fleet_leads"): "1x5 0x20",
                series("prfaas_control_fleet_leads", OTHER_GATEWAY): "0x5 1x20",
            },
            10,
        ),
    ),
    "PrfaasBlind": (
        Case(
            {series("prfaas_control_telemetry_failures_total", kind="links"): "0+60x30"},
            15,
            GATEWAY | {"kind": "links"},
            "The gateway gateway:8001 gets no answer to questions about links.",
        ),
        Case({series("prfaas_control_telemetry_failures_total", kind="links"): "0+1x30"}, 15),
    ),
    "PrfaasStagingFull": (
        Case(
            {
                series("prfaas_gateway_staging_used_bytes", exported_instance="h0"): "99x30",
                series("prfaas_gateway_staging_bytes", exported_instance="h0"): "100x30",
            },
            10,
            D | {"exported_instance": "h0"},
            "The staging of h0 is full, so transfers to it fail.",
        ),
        Case(
            {
                series("prfaas_gateway_staging_used_bytes", exported_instance="h0"): "50x30",
                series("prfaas_gateway_staging_bytes", exported_instance="h0"): "100x30",
            },
            10,
        ),
    ),
    "PrfaasProfileWrong": (
        Case(service_ratio("0+30x90"), 80, D | {"cluster": "far"}, PROFILE_WRONG),
        Case(service_ratio("0+4x90"), 80, D | {"cluster": "far"}, PROFILE_WRONG),
        Case(service_ratio("0+12x90"), 80),
    ),
    "PrfaasIncompatible": (
        Case(
            {series("prfaas_control_incompatible_pairs"): "2x30"},
            10,
            D,
            "2 pairs of engines exchange no KV, since their set-ups differ.",
        ),
        Case({series("prfaas_control_incompatible_pairs"): "0x30"}, 10),
    ),
    "PrfaasSpansLost": (
        Case(
            {series("prfaas_gateway_trace_spans_total", outcome="failed"): "0+5x30"},
            20,
            GATEWAY,
            "Spans of traces of the gateway gateway:8001 do not reach the collector.",
        ),
        Case({series("prfaas_gateway_trace_spans_total", outcome="sent"): "0+5x30"}, 20),
        Case({series("prfaas_gateway_trace_spans_total", outcome="failed"): "0x8 3x22"}, 20),
    ),
    "PrfaasPolicyFails": (
        Case(
            {series("prfaas_control_policy_failures_total"): "0x5 4x20"},
            10,
            D,
            "The routing policy fails, and the default one decides in its place.",
        ),
        Case({series("prfaas_control_policy_failures_total"): "4x30"}, 10),
    ),
}
