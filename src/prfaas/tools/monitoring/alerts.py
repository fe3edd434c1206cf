"""Alert rules: their conditions, their texts, and what to do about each."""

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from prfaas import __version__

RUNBOOKS = "docs/guides/alerts.md"
"""Where the documentation has a section for each alert, in the repository."""

_HEAD = f"# Alert rules of prfaas {__version__}, by `prfaas monitoring alerts`.\n"
_MINUTE_S, _DAY_S = 60, 86_400


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    """PromQL; every series that it gives is one alert."""
    hold_s: int
    """For how long that must be so."""
    severity: Literal["critical", "warning"]
    """critical: answers are missing, wrong or about to be; warning: they are slower, or about to be."""
    summary: str
    """A sentence about the alert's labels, in Prometheus' templates."""
    action: str
    """What to do first."""


def _rate(series: str, *by: str, window: str = "5m") -> str:
    return f"sum by ({', '.join(('deployment', *by))}) (rate({series}[{window}]))"


def _most(series: str, *by: str) -> str:
    """By what most gateways know: while one of them sees it well, it is well."""
    return f"max by ({', '.join(('deployment', *by))}) ({series})"


_HEALTHY = "prfaas_control_instance_healthy"
_REQUESTS = "prfaas_gateway_requests_total"
_FAILED = 'prfaas_gateway_requests_total{outcome="engine_error"}'
_CERTIFICATE_LEFT = (
    "min by (deployment, certificate) (prfaas_gateway_certificate_expires_timestamp_seconds) - time()"
)
_BY_GATEWAY = ("job", "instance")

ALERTS = (
    Alert(
        name="PrfaasGatewayDown",
        expression="up == 0 and on (job, instance) last_over_time(prfaas_build_info[1d])",
        hold_s=_MINUTE_S,
        severity="critical",
        summary="The gateway {{ $labels.instance }} does not answer.",
        action="Look at its log and start it again.",
    ),
    Alert(
        name="PrfaasNoGateway",
        expression="absent(prfaas_build_info)",
        hold_s=2 * _MINUTE_S,
        severity="critical",
        summary="Prometheus reaches no gateway.",
        action="Start a gateway, or mend the scrape configuration.",
    ),
    Alert(
        name="PrfaasNoDecodeInstance",
        expression=_most(
            f"sum by (deployment, job, instance) ({_HEALTHY} * prfaas_control_instance_decodes "
            "* (1 - prfaas_control_instance_draining))"
        )
        + " == 0",
        hold_s=_MINUTE_S,
        severity="critical",
        summary="No instance can decode, so every request gets a 503.",
        action="Start decode engines again; `prfaas status` says why each is out.",
    ),
    Alert(
        name="PrfaasClusterOut",
        expression=_most(
            f"sum by (deployment, cluster, job, instance) ({_HEALTHY} "
            "* on (job, instance, exported_instance) group_left (cluster) prfaas_control_instance_info)",
            "cluster",
        )
        + " == 0",
        hold_s=2 * _MINUTE_S,
        severity="warning",
        summary="No instance of the cluster {{ $labels.cluster }} is in routing.",
        action="Look at the cluster's machines and at the network to them.",
    ),
    Alert(
        name="PrfaasInstanceOut",
        expression=_most(_HEALTHY, "exported_instance") + " == 0",
        hold_s=2 * _MINUTE_S,
        severity="warning",
        summary="The instance {{ $labels.exported_instance }} is out of routing.",
        action="`prfaas status` says why; look at the engine's log.",
    ),
    Alert(
        name="PrfaasLinkDown",
        expression=_most("prfaas_control_link_up", "link") + " == 0",
        hold_s=_MINUTE_S,
        severity="warning",
        summary="The link {{ $labels.link }} is not used; what it carried is prefilled locally.",
        action="Check the network and the firewall between the two clusters: `prfaas doctor`.",
    ),
    Alert(
        name="PrfaasLinkNarrow",
        expression=_most("prfaas_control_link_capacity_bits_per_second", "link")
        + " < 0.5 * "
        + _most("prfaas_control_link_configured_bits_per_second", "link"),
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The link {{ $labels.link }} carries {{ $value | humanize }}bit/s, less than half of what the file "
        "says.",
        action="Look for other traffic and for loss; or correct the bandwidth in the deployment file.",
    ),
    Alert(
        name="PrfaasLinkLossy",
        expression=_most("prfaas_control_link_retransmit_ratio", "link") + " > 0.02",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The link {{ $labels.link }} sends {{ $value | humanizePercentage }} of its bytes again.",
        action="Look for loss on the way: a bad line, or a queue that overflows.",
    ),
    Alert(
        name="PrfaasLinkBacklog",
        expression=_most("prfaas_control_link_drain_seconds", "link") + " > 10",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The link {{ $labels.link }} needs {{ $value | humanizeDuration }} for the bytes that wait.",
        action="Look at its capacity; offload less with a higher threshold.",
    ),
    Alert(
        name="PrfaasQueueLong",
        expression=f"min by (deployment) (prfaas_gateway_queue_wait_seconds) > 0.5 * "
        f"{_most('prfaas_gateway_queue_limit_seconds')}",
        hold_s=2 * _MINUTE_S,
        severity="warning",
        summary="A new request waits {{ $value | humanizeDuration }}, more than half of the limit.",
        action="Add prefill or decode instances, or send less.",
    ),
    Alert(
        name="PrfaasRefusing",
        expression=_rate(
            'prfaas_gateway_refused_total{reason=~"queue|requests|bodies|share|unavailable"}', "reason"
        )
        + " > 0",
        hold_s=5 * _MINUTE_S,
        severity="critical",
        summary="Requests are refused: {{ $labels.reason }}.",
        action="Look at what the reason means; add instances, or send less.",
    ),
    Alert(
        name="PrfaasErrors",
        expression=f"{_rate(_FAILED)} / {_rate(_REQUESTS)} > 0.01",
        hold_s=5 * _MINUTE_S,
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the requests end with an engine's error.",
        action="Look at decode failures by reason, and at the decode engines' logs.",
    ),
    Alert(
        name="PrfaasFallbacks",
        expression=f"{_rate('prfaas_gateway_fallbacks_total', window='10m')} / on (deployment) "
        "sum by (deployment) ("
        'rate(prfaas_gateway_requests_total{route="offload"}[10m]) or rate(prfaas_gateway_fallbacks_total[10m])) '
        "> 0.05",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the prefills elsewhere fail and are done again.",
        action="Look at fallbacks by reason: they name the engine, the link or the deadline.",
    ),
    Alert(
        name="PrfaasCertificateEnds",
        expression=f"{_CERTIFICATE_LEFT} < {14 * _DAY_S}",
        hold_s=10 * _MINUTE_S,
        severity="warning",
        summary="The certificate {{ $labels.certificate }} ends in {{ $value | humanizeDuration }}.",
        action="Run `prfaas certs` and copy the new files; nothing need be restarted.",
    ),
    Alert(
        name="PrfaasCertificateEnded",
        expression=f"{_CERTIFICATE_LEFT} < {_DAY_S}",
        hold_s=10 * _MINUTE_S,
        severity="critical",
        summary="The certificate {{ $labels.certificate }} ends within a day, or has ended.",
        action="Run `prfaas certs` now and copy the new files; nothing need be restarted.",
    ),
    Alert(
        name="PrfaasKvEventsLost",
        expression=_most("increase(prfaas_control_feed_resyncs[15m])", "exported_instance") + " > 0",
        hold_s=0,
        severity="warning",
        summary="KV events of {{ $labels.exported_instance }} are lost, so the index knows too little of its cache.",
        action="Look at the network to its events port, and at the load of the gateway.",
    ),
    Alert(
        name="PrfaasPoolDown",
        expression=_most("prfaas_control_pool_up", "pool") + " == 0",
        hold_s=2 * _MINUTE_S,
        severity="warning",
        summary="The pool {{ $labels.pool }} does not answer; its engines prefill what it held.",
        action="Look at the pool's log and start it again.",
    ),
    Alert(
        name="PrfaasPoolWrongPages",
        expression=_most('increase(prfaas_control_pool_lost_pages{why="wrong"}[15m])', "pool") + " > 0",
        hold_s=0,
        severity="warning",
        summary="Pages of the pool {{ $labels.pool }} had wrong bytes. They were thrown away.",
        action="Check the memory and the SSD of its machine.",
    ),
    Alert(
        name="PrfaasDigestMismatch",
        expression="sum by (deployment, job, instance) (increase(vllm:prfaas_digest_mismatches_total[15m])) > 0",
        hold_s=0,
        severity="critical",
        summary="The engine {{ $labels.instance }} got KV that is not what was computed. It was not used.",
        action="Check the memory of both machines; take the producer out with `prfaas drain`.",
    ),
    Alert(
        name="PrfaasAnswersDiffer",
        expression='sum by (deployment) (increase(prfaas_gateway_shadows_total{outcome="mismatch"}[1h])) > 0',
        hold_s=0,
        severity="critical",
        summary="An answer differs from that of the plain path.",
        action="Find both in the gateway's log; take the engines out that made it.",
    ),
    Alert(
        name="PrfaasGatewayBusy",
        expression="histogram_quantile(0.99, sum by (deployment, job, instance, le) "
        "(rate(prfaas_gateway_loop_lag_seconds_bucket[5m]))) > 0.1",
        hold_s=10 * _MINUTE_S,
        severity="warning",
        summary="The event loop of the gateway {{ $labels.instance }} is {{ $value | humanizeDuration }} late.",
        action="Give the gateway more of a core, or run another one.",
    ),
    Alert(
        name="PrfaasDescriptorsShort",
        expression="process_open_fds / process_max_fds > 0.8 and on (job, instance) prfaas_build_info",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The gateway {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its file descriptors.",
        action="Raise its limit of open files, or run another gateway.",
    ),
    Alert(
        name="PrfaasFleetCut",
        expression=_most("prfaas_control_fleet_connected", *_BY_GATEWAY) + " == 0",
        hold_s=_MINUTE_S,
        severity="warning",
        summary="The gateway {{ $labels.instance }} is cut off from etcd and goes on with what it knows.",
        action="Look at etcd, and at the network to it.",
    ),
    Alert(
        name="PrfaasNoLeader",
        expression="sum by (deployment) (prfaas_control_fleet_leads) == 0",
        hold_s=_MINUTE_S,
        severity="warning",
        summary="No gateway leads, so thresholds and roles stay as they are.",
        action="Look at etcd, and at the gateways' logs.",
    ),
    Alert(
        name="PrfaasBlind",
        expression=_rate("prfaas_control_telemetry_failures_total", *_BY_GATEWAY, "kind") + " > 0.2",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The gateway {{ $labels.instance }} gets no answer to questions about {{ $labels.kind }}.",
        action="Look for engines or pools that do not answer, and at the network to them.",
    ),
    Alert(
        name="PrfaasStagingFull",
        expression=_most(
            "prfaas_gateway_staging_used_bytes / prfaas_gateway_staging_bytes", "exported_instance"
        )
        + " > 0.95",
        hold_s=5 * _MINUTE_S,
        severity="warning",
        summary="The staging of {{ $labels.exported_instance }} is full, so transfers to it fail.",
        action="Raise engine.staging in the deployment file, or add decode instances.",
    ),
    Alert(
        name="PrfaasProfileWrong",
        expression=f"abs(log2({_rate('prfaas_control_service_ratio_sum', 'cluster', window='30m')} / "
        f"{_rate('prfaas_control_service_ratio_count', 'cluster', window='30m')})) > 1",
        hold_s=30 * _MINUTE_S,
        severity="warning",
        summary="Prefills of the cluster {{ $labels.cluster }} take less than half or more than twice of what its "
        "profile says.",
        action="Measure a profile of these engines: `prfaas profile`.",
    ),
    Alert(
        name="PrfaasIncompatible",
        expression=_most("prfaas_control_incompatible_pairs") + " > 0",
        hold_s=2 * _MINUTE_S,
        severity="warning",
        summary="{{ $value }} pairs of engines exchange no KV, since their set-ups differ.",
        action="`prfaas status` names them; give both the same version and the same engine options.",
    ),
    Alert(
        name="PrfaasSpansLost",
        expression=_rate('prfaas_gateway_trace_spans_total{outcome=~"failed|dropped"}', *_BY_GATEWAY)
        + " > 0",
        hold_s=10 * _MINUTE_S,
        severity="warning",
        summary="Spans of traces of the gateway {{ $labels.instance }} do not reach the collector.",
        action="Look at the collector, and at the network to it. Requests are served as before.",
    ),
    Alert(
        name="PrfaasPolicyFails",
        expression="sum by (deployment) (increase(prfaas_control_policy_failures_total[15m])) > 0",
        hold_s=0,
        severity="warning",
        summary="The routing policy fails, and the default one decides in its place.",
        action="The gateway's log has the error of the policy.",
    ),
)
"""All alerts, in the order of their section in the guide."""


def rules(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """A document of Prometheus' rules.

    Args:
        runbooks: address of the guide of alerts, to which each alert's heading is added.
    """
    return {"groups": [{"name": "prfaas", "rules": [_rule(alert, runbooks) for alert in ALERTS]}]}


def rules_yaml(runbooks: str = RUNBOOKS) -> str:
    """The same as a file for `rule_files` of Prometheus."""
    return _HEAD + yaml.safe_dump(rules(runbooks), sort_keys=False, width=110)


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.hold_s:
        rule["for"] = f"{alert.hold_s // _MINUTE_S}m"
    return rule | {
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.action,
            "runbook_url": f"{runbooks}#{alert.name.lower()}",
        },
    }
