"""The meter on recorded telemetry of real senders and receivers; tests/data/links/README.md says how it was made."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.core.link.announced import AnnouncedLink
from prfaas.core.link.meter import LinkMeter
from prfaas.core.link.samples import ArrivalSample, SenderSample

RECORDED = Path(__file__).parents[2] / "data" / "links"
CONFIGURED = 186e6
FULL, TENTH = 188.3e6, 18.83e6


@dataclass(frozen=True)
class Seen:
    """What the meter made of one look."""

    now_s: float
    bits_per_s: float
    up: bool
    condition: str
    congestion: float


@dataclass(frozen=True)
class Replay:
    looks: list[Seen]
    told_s: list[float]
    """When thresholds would have been searched again."""

    def between(self, since_s: float, until_s: float) -> list[Seen]:
        return [look for look in self.looks if since_s <= look.now_s <= until_s]

    def believed_s(self, truth: float, since_s: float, until_s: float) -> float:
        """From when on, after `since_s`, the capacity is within a quarter of the truth until `until_s`."""
        outside = [
            look.now_s
            for look in self.between(since_s, until_s)
            if not 0.75 * truth <= look.bits_per_s <= 1.25 * truth
        ]
        return max(outside, default=since_s) - since_s + 0.1


def replayed(name: str) -> Replay:
    meter, announced = LinkMeter(CONFIGURED, 0.0, 2.5), AnnouncedLink(CONFIGURED)
    looks, told_s = [], []
    with gzip.open(RECORDED / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            now_s = row["now_s"]
            meter.observe(
                {name: SenderSample(**fields) for name, fields in row["senders"].items()},
                {name: ArrivalSample(**fields) for name, fields in row["arrivals"].items()},
                now_s,
            )
            up = meter.is_up(now_s)
            looks.append(Seen(now_s, meter.capacity_bits_per_s, up, meter.condition(now_s), meter.congestion))
            if announced.is_due(meter.capacity_bits_per_s, up, now_s):
                told_s.append(now_s)
    return Replay(looks, told_s)


@pytest.mark.parametrize("name", ["drop-2mb", "drop-10mb", "drop-40mb", "drop-made", "drop-then-idle"])
def test_a_tenfold_drop_is_believed_within_three_seconds_and_told_at_most_twice(name: str) -> None:
    replay = replayed(name)
    assert all(look.bits_per_s >= 0.75 * FULL for look in replay.between(1.0, 5.9))
    assert replay.believed_s(TENTH, 6.0, 17.9) <= 3.0
    told = [at_s for at_s in replay.told_s if 6.0 < at_s <= 18.0]
    assert 1 <= len(told) <= 2
    assert told[0] <= 9.0
    assert any(look.congestion for look in replay.between(6.0, 9.0))


@pytest.mark.parametrize("name", ["drop-2mb", "drop-10mb", "drop-40mb", "drop-made"])
def test_a_recovery_under_load_is_believed_within_five_seconds(name: str) -> None:
    replay = replayed(name)
    assert replay.looks[-1].bits_per_s >= 0.7 * FULL
    back = [look for look in replay.looks if look.now_s >= 18.0 and look.bits_per_s >= 0.7 * FULL]
    assert back[0].now_s - 18.0 <= 5.0
    assert len([at_s for at_s in replay.told_s if at_s > 18.0]) <= 2


def test_a_recovery_without_load_is_found_by_probes() -> None:
    replay = replayed("drop-then-idle")
    back = [look for look in replay.looks if look.now_s >= 18.0 and look.bits_per_s >= 0.75 * FULL]
    # A probe is sent within 3 s, and believed within 5.
    assert back[0].now_s - 18.0 <= 8.0
    assert all(look.bits_per_s <= 1.5 * TENTH for look in replay.between(12.0, 17.9))


@pytest.mark.parametrize(("name", "until_s"), [("freeze-5s", 11.0), ("freeze-20s", 26.0)])
def test_a_frozen_link_is_down_within_three_and_a_half_seconds_and_keeps_its_capacity(
    name: str, until_s: float
) -> None:
    replay = replayed(name)
    dark = replay.between(6.0, until_s)
    down = [look for look in dark if not look.up]
    assert down[0].now_s - 6.0 <= 3.5
    assert all(not look.up for look in replay.between(down[0].now_s, until_s))
    assert {look.bits_per_s for look in dark} == {replay.between(5.0, 6.0)[-1].bits_per_s}
    up = [look for look in replay.looks if look.now_s > until_s and look.up]
    assert up[0].now_s - until_s <= 3.0
    assert all(look.bits_per_s >= 0.75 * FULL for look in replay.looks if look.now_s > 1.0)


@pytest.mark.parametrize("name", ["stall", "slow-sender", "loss"])
def test_a_slow_end_and_loss_that_is_repaired_are_no_slow_link(name: str) -> None:
    replay = replayed(name)
    assert all(look.bits_per_s >= 0.75 * FULL for look in replay.looks)
    assert all(look.up for look in replay.looks if not 9.0 <= look.now_s <= 12.0 or name != "stall")
    assert replay.told_s == []


def test_loss_of_three_percent_is_congestion_and_of_a_thousandth_is_not() -> None:
    replay = replayed("loss")
    assert not any(look.congestion for look in replay.between(1.0, 12.0))
    assert all(look.congestion for look in replay.between(15.0, 17.9))
    assert not any(look.congestion for look in replay.between(22.0, 26.0))
