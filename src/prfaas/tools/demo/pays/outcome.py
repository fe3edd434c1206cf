"""Outcome of the burst on both sides, live and simulated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas.lab.simulator.result import Result
from prfaas.tools.demo.pays.burst import Burst, Side
from prfaas.tools.demo.pays.limits import PayLimits
from prfaas.tools.demo.pays.live import LiveRun
from prfaas.tools.replay.result import route_bytes


@dataclass(frozen=True, slots=True)
class Ttfts:
    """Times to the first token of a burst, in seconds, in the order of arrival; None without an answer."""

    each_s: tuple[float | None, ...]

    @property
    def mean_s(self) -> float:
        """Of those that were answered."""
        return float(np.mean(self._known))

    @property
    def p90_s(self) -> float:
        """Of those that were answered."""
        return float(np.quantile(self._known, 0.9))

    @property
    def _known(self) -> Sequence[float]:
        return [each for each in self.each_s if each is not None]

    def to_json(self) -> dict[str, Any]:
        """Mean, P90 and all of them."""
        each_s = [None if each is None else round(each, 6) for each in self.each_s]
        return {"ttft_mean_s": self.mean_s, "ttft_p90_s": self.p90_s, "ttft_s": each_s}


@dataclass(frozen=True, slots=True)
class SideOutcome:
    """One side under the burst."""

    side: Side
    live_run: LiveRun
    simulation: Result

    @property
    def live(self) -> Ttfts:
        """TTFTs that the client measured."""
        return Ttfts(tuple(record.ttft_s for record in self.live_run.records))

    @property
    def simulated(self) -> Ttfts:
        """Of the same requests."""
        return Ttfts(tuple(float(each) for each in self.simulation.ttft_s))

    @property
    def lost(self) -> int:
        """Requests without a whole answer."""
        return sum(record.is_lost for record in self.live_run.records)

    @property
    def offloaded(self) -> float:
        """Share of the requests that were prefilled in the PrfaaS cluster."""
        records = self.live_run.records
        return sum(record.route == "offload" for record in records) / len(records)

    @property
    def link_used(self) -> float | None:
        """Share of the link's bandwidth that KVCache took, from the first arrival to the last; None without a link."""
        links = self.side.deployment.links
        if not links:
            return None
        crossed = [record for record in self.live_run.records if record.route == "offload"]
        lasted_s = max(self.live_run.records[-1].arrival_s, 1e-9)
        return (route_bytes(crossed) or 0) * 8 / lasted_s / links[0].bandwidth_bits_per_s

    def to_json(self) -> dict[str, Any]:
        """Seconds and shares; one TTFT per request, live and simulated."""
        return {
            "fleet": self.side.fleet,
            "live": self.live.to_json(),
            "simulated": self.simulated.to_json(),
            "live_to_simulated_mean": self.live.mean_s / self.simulated.mean_s,
            "live_to_simulated_p90": self.live.p90_s / self.simulated.p90_s,
            "overhead_s": self.live_run.overhead_s,
            "behind_s": self.live_run.behind_s,
            "offloaded": self.offloaded,
            "simulated_offloaded": float(self.simulation.offloaded.mean()),
            "link_used": self.link_used,
            "lost": self.lost,
        }


@dataclass(frozen=True, slots=True)
class BurstOutcome:
    """Both sides."""

    burst: Burst
    paying: SideOutcome
    """With PrfaaS."""
    without: SideOutcome
    limits: PayLimits

    @property
    def ahead(self) -> dict[str, float]:
        """How many times as long a first token takes without PrfaaS: live and simulated, mean and P90."""
        one, other = self.paying, self.without
        return {
            "live_mean": other.live.mean_s / one.live.mean_s,
            "simulated_mean": other.simulated.mean_s / one.simulated.mean_s,
            "live_p90": other.live.p90_s / one.live.p90_s,
            "simulated_p90": other.simulated.p90_s / one.simulated.p90_s,
        }

    @property
    def is_ahead(self) -> bool:
        """True if PrfaaS was ahead live, in mean and P90."""
        return self.ahead["live_mean"] > 1 and self.ahead["live_p90"] > 1

    def to_json(self) -> dict[str, Any]:
        """Its part of the document that `prfaas demo --json` writes."""
        return {
            "requests": 2 * self.burst.count,
            "requests_per_side": self.burst.count,
            "requests_per_s_per_side": self.burst.traffic.mean_per_s,
            "load_without_prfaas": self.burst.load,
            "speedup": self.paying.side.speedup,
            "with_prfaas": self.paying.to_json(),
            "without_prfaas": self.without.to_json(),
            "ahead": self.ahead,
            "is_ahead": self.is_ahead,
            "limits": self.limits.to_json(),
        }
