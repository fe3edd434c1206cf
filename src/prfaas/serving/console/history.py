"""The last quarter of an hour of a deployment: a sample each second, and what changed. Bounded in bytes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from prfaas.core.byte_ring import ByteRing, RingEntry
from prfaas.serving.console.alarms import Alarm, alarms_of
from prfaas.serving.console.changes import Change, changes_between
from prfaas.serving.console.samples import Json, sample_of

PERIOD_S = 1.0
KEPT_S = 900.0
# A sample has about 300 bytes per instance and link: 100 of them fit for the whole time.
KEPT_BYTES = 32 << 20
_KEPT_CHANGES = 4096
_KEPT_CHANGES_BYTES = 1 << 20


class StateHistory:
    """Samples of `state` and the changes between them, for the console. It belongs to one running event loop."""

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        *,
        wall_clock: Callable[[], float] = time.time,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`state`: the deployment as it is, see `LivePlane.state`. `wall_clock`: Unix time in seconds."""
        self._state = state
        self._wall_clock = wall_clock
        self._samples = ByteRing(most_entries=round(KEPT_S / PERIOD_S), most_bytes=kept_bytes)
        self._changes = ByteRing(most_entries=_KEPT_CHANGES, most_bytes=_KEPT_CHANGES_BYTES)
        self._before: Json | None = None
        self._since_s: dict[tuple[str, str], float] = {}
        self._news = asyncio.Event()

    async def run(self) -> None:
        """A sample every second, until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(PERIOD_S)

    def take(self) -> Json:
        """Add the sample of now; returns it."""
        sample = sample_of(self._state(), self._wall_clock())
        changes = [] if self._before is None else changes_between(self._before, sample)
        sample["alarms"] = self._alarms(sample, changes)
        # Before the changes are in it: the next comparison needs none.
        self._before = sample
        told = [asdict(change) for change in changes]
        for change in told:
            self._changes.append(orjson.dumps(change))
        self._samples.append(orjson.dumps(sample | {"number": self._samples.newest + 1, "changes": told}))
        self._news.set()
        self._news = asyncio.Event()
        return sample

    def document(self, *, after: int = 0, step: int = 1) -> bytes:
        """Samples after a number, every `step`-th and the newest, and all changes that are kept, as JSON."""
        entries = list(self._samples.after(after))
        # Counted from the newest: that one is always there.
        shown = entries[::-1][::step][::-1]
        samples = b",".join(entry.data for entry in shown)
        changes = b",".join(entry.data for entry in self._changes.after(0))
        head = b'{"period_s":%.1f,"kept_s":%.1f,' % (PERIOD_S, KEPT_S)
        return head + b'"frames":[' + samples + b'],"changes":[' + changes + b"]}"

    @property
    def newest(self) -> int:
        """The number of the newest sample; 0 before the first."""
        return self._samples.newest

    async def follow(self, after: int) -> AsyncIterator[RingEntry]:
        """Samples after a number as they come. Who is slow misses those that the ring has dropped meanwhile."""
        while True:
            news = self._news
            for entry in list(self._samples.after(after)):
                after = entry.number
                yield entry
            # Set already if a sample came while the others were given out.
            await news.wait()

    def _alarms(self, sample: Json, changes: list[Change]) -> list[Json]:
        """The sample's alarms, each with the time since which it has been there; new and ended ones become changes."""
        alarms = {(alarm.kind, alarm.about): alarm for alarm in alarms_of(sample)}
        at_s: float = sample["at_s"]
        changes += [_began(alarm, at_s) for key, alarm in alarms.items() if key not in self._since_s]
        changes += [_ended(*key, at_s) for key in self._since_s if key not in alarms]
        self._since_s = {key: self._since_s.get(key, at_s) for key in alarms}
        return [asdict(alarm) | {"since_s": self._since_s[key]} for key, alarm in alarms.items()]


def _began(alarm: Alarm, at_s: float) -> Change:
    return Change(at_s, "alarm", alarm.about, f"Alarm: {alarm.what}")


def _ended(kind: str, about: str, at_s: float) -> Change:
    return Change(at_s, "alarm", about, f"The alarm {kind}{f' of {about}' if about else ''} has ended.")
