"""Once a second: the state of things into the gauges."""

import asyncio

from prfaas.control.board import Clock
from prfaas.control.series import Series
from prfaas.control.state import Overview, state_of

PERIOD_S = 1.0


class Shown:
    """Writes the gauges of `series.Series`, so that a scrape finds them ready."""

    def __init__(self, plane: Overview, series: Series, *, clock: Clock) -> None:
        self._plane = plane
        self._series = series
        self._clock = clock
        self._failures = {"links": 0, "engines": 0}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(PERIOD_S)

    def write(self) -> None:
        """Everything, as it is now."""
        state, series = state_of(self._plane, self._clock()), self._series
        for cluster, facts in state["clusters"].items():
            series.waiting_prefills.labels(cluster).set(facts["waiting_prefills"])
            tokens = self._plane.board.view.threshold_tokens.get(cluster)
            if tokens is not None:
                series.threshold_tokens.labels(cluster).set(tokens)
            for name, instance in facts["instances"].items():
                series.instance_healthy.labels(name).set(instance["healthy"])
                series.instance_prefills.labels(name).set("prefill" in instance["role"])
                series.instance_decodes.labels(name).set("decode" in instance["role"])
                series.instance_draining.labels(name).set(instance["draining"])
                series.instance_in_flight.labels(name).set(instance["in_flight"])
                series.instance_wait_seconds.labels(name).set(instance["busy_s"])
                series.instance_age_seconds.labels(name).set(instance["age_s"])
                series.instance_blocks.labels(name).set(instance["blocks"])
                if instance["events"] is not None:
                    series.feed_gaps.labels(name).set(instance["events"]["gaps"])
                    series.feed_replays.labels(name).set(instance["events"]["replays"])
                    series.feed_resyncs.labels(name).set(instance["events"]["resyncs"])
        for name, link in state["links"].items():
            series.link_up.labels(name).set(link["up"])
            series.link_capacity.labels(name).set(link["capacity_bits_per_s"])
            series.link_egress.labels(name).set(link["egress_bits_per_s"])
            series.link_queued_bytes.labels(name).set(link["queued_bytes"])
            series.link_drain_seconds.labels(name).set(link["drain_s"])
            series.link_rtt_seconds.labels(name).set(link["rtt_s"])
            series.link_retransmit_ratio.labels(name).set(link["retransmit_ratio"])
            series.link_age_seconds.labels(name).set(link["age_s"])
        series.index_blocks.set(state["index"]["blocks"])
        self._count("links", self._plane.links.failures)
        self._count("engines", self._plane.engines.failures)

    def _count(self, kind: str, failures: int) -> None:
        self._series.telemetry_failures.labels(kind).inc(failures - self._failures[kind])
        self._failures[kind] = failures
