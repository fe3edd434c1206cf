"""An index that hears engines themselves: their events are digested on the way, as their own machines do it."""

from collections.abc import Sequence

from prfaas.core.prefix.digests import EventDigests, HeldEvent, decode_events, encode_events
from prfaas.core.prefix.events import Event
from prfaas.core.prefix.index import GlobalIndex


class Digested:
    """What comes of each engine's events."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._digests: dict[str, EventDigests] = {}

    def of(self, name: str, events: Sequence[Event]) -> list[HeldEvent]:
        digests = self._digests.setdefault(name, EventDigests(self._seed))
        return decode_events(encode_events(digests.of(events)))

    def forget(self, name: str) -> None:
        self._digests.pop(name, None)


class HearingIndex(GlobalIndex):
    """Takes what engines publish."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._digested = Digested(settings.get("seed", 0))

    def apply(self, instance: str, events: Sequence[Event]) -> None:  # type: ignore[override]
        super().apply(instance, self._digested.of(instance, events))

    def drop(self, instance: str) -> None:
        super().drop(instance)
        self._digested.forget(instance)
