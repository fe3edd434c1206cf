"""Callbacks of the control plane for events that cannot wait for the next decision."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from prfaas.core.deployment import Instance
from prfaas.serving.control.engine_reading import EngineReading

P = ParamSpec("P")


class Signal(list[Callable[P, None]]):
    """Callables that are called in the event loop, each at once; they must not raise."""

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all of them."""
        for listener in self:
            listener(*args, **kwargs)


class Listeners:
    """Lists of callbacks, one for each kind of event."""

    def __init__(self) -> None:
        self.frozen: Signal[[str, str | None]] = Signal()
        """With an instance and why it is frozen; None: not any more. Who waits for one must stop: it may never
        answer."""
        self.silent: Signal[[str, str, str]] = Signal()
        """With a producer, a consumer and a sentence: the producer has given up the path. What it was to send there
        will not come, and its engine may not know that yet."""
        self.noticed: Signal[[str, float]] = Signal()
        """With an instance and the seconds until it is gone: what it cannot end until then must go elsewhere."""
        self.drained: Signal[[str, bool]] = Signal()
        """With an instance, and whether an operator wants it drained, or to take part again."""
        self.healthy: Signal[[str, bool]] = Signal()
        """With an instance, and whether it is in routing now."""
        self.read: Signal[[Instance, EngineReading]] = Signal()
        """With an instance and what its engine has just said of itself."""
        self.told: Signal[[str, int, Mapping[str, Any]]] = Signal()
        """With an instance, one of its ranks, and what that has just answered at its KV port."""
        self.restarted: Signal[[str]] = Signal()
        """With an instance whose process is another one than at the last look."""
        self.lost_cache: Signal[[str]] = Signal()
        """With an instance that has died."""
        self.changed: Signal[[str]] = Signal()
        """With an instance that may be given other work than before."""
        self.observed: Signal[[int]] = Signal()
        """With the uncached tokens of a request that was decided."""
