"""Who the control plane tells of what cannot wait for the next decision."""

from collections.abc import Callable


class Listeners:
    """Callables that are called in the event loop, each at once; they must not raise."""

    def __init__(self) -> None:
        self.frozen: list[Callable[[str, str | None], None]] = []
        """With an instance and why it is frozen; None: not any more. Who waits for one must stop: it may never
        answer."""
        self.silent: list[Callable[[str, str, str], None]] = []
        """With a producer, a consumer and a sentence: the producer has given up the path. What it was to send there
        will not come, and its engine may not know that yet."""
        self.noticed: list[Callable[[str, float], None]] = []
        """With an instance and the seconds until it is gone: what it cannot end until then must go elsewhere."""

    def tell_frozen(self, name: str, reason: str | None) -> None:
        for listener in self.frozen:
            listener(name, reason)

    def tell_silent(self, producer: str, consumer: str, sentence: str) -> None:
        for listener in self.silent:
            listener(producer, consumer, sentence)

    def tell_noticed(self, name: str, notice_s: float) -> None:
        for listener in self.noticed:
            listener(name, notice_s)
