"""Outcome of the burst on both sides, live and simulated."""

from dataclasses import asdict, dataclass
from typing import Any

from prfaas.lab.simulator.result import Result
from prfaas.tools.demo.gateway import DemoError
from prfaas.tools.demo.pays.burst import Burst, Side
from prfaas.tools.demo.pays.limits import PayLimits
from prfaas.tools.demo.pays.live import LiveRun
from prfaas.tools.replay.result import Percentiles, route_bytes


@dataclass(frozen=True, slots=True)
class SideOutcome:
    """One side under the burst."""

    side: Side
    live_run: LiveRun
    simulation: Result

    @property
    def live_s(self) -> tuple[float | None, ...]:
        """TTFTs that the client measured, in the order of arrival; None without an answer."""
        return tuple(record.ttft_s for record in self.live_run.result.records)

    @property
    def simulated_s(self) -> tuple[float | None, ...]:
        """Of the same requests."""
        return tuple(self.simulation.ttft_s.tolist())

    @property
    def live(self) -> Percentiles:
        """Of the TTFTs that the client measured."""
        return _known(self.live_s)

    @property
    def simulated(self) -> Percentiles:
        """Of the same requests."""
        return _known(self.simulated_s)

    @property
    def offloaded(self) -> float:
        """Share of the requests that were prefilled in the PrfaaS cluster."""
        routes = [record.route for record in self.live_run.result.records]
        return routes.count("offload") / len(routes)

    @property
    def link_used(self) -> float | None:
        """Share of the link's bandwidth that KVCache took, from the first arrival to the last; None without a link."""
        links = self.side.deployment.links
        if not links:
            return None
        records = self.live_run.result.records
        crossed = [record for record in records if record.route == "offload"]
        lasted_s = max(records[-1].arrival_s, 1e-9)
        return (route_bytes(crossed) or 0) * 8 / lasted_s / links[0].bandwidth_bits_per_s

    def to_json(self) -> dict[str, Any]:
        """Seconds and shares; one TTFT per request, live and simulated."""
        return {
            "fleet": self.side.fleet,
            "live": _json(self.live_s),
            "simulated": _json(self.simulated_s),
            "live_to_simulated_mean": self.live.mean / self.simulated.mean,
            "live_to_simulated_p90": self.live.p90 / self.simulated.p90,
            "overhead_s": self.live_run.overhead_s,
            "behind_s": self.live_run.result.max_behind_s,
            "offloaded": self.offloaded,
            "simulated_offloaded": float(self.simulation.offloaded.mean()),
            "link_used": self.link_used,
            "lost": self.live_run.result.lost,
        }


def _known(ttfts_s: tuple[float | None, ...]) -> Percentiles:
    found = Percentiles.of(ttfts_s)
    if found is None:
        raise DemoError("no request of the burst got an answer")
    return found


def _json(ttfts_s: tuple[float | None, ...]) -> dict[str, Any]:
    known = _known(ttfts_s)
    each_s = [None if each is None else round(each, 6) for each in ttfts_s]
    return {"ttft_mean_s": known.mean, "ttft_p90_s": known.p90, "ttft_s": each_s}


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
            "live_mean": other.live.mean / one.live.mean,
            "simulated_mean": other.simulated.mean / one.simulated.mean,
            "live_p90": other.live.p90 / one.live.p90,
            "simulated_p90": other.simulated.p90 / one.simulated.p90,
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
            "limits": asdict(self.limits),
        }
