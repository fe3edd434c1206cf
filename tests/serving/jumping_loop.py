"""An event loop for tests of what takes time."""

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer in place of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_s = 0.0

    def time(self) -> float:
        return self._ahead_s

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._ahead_s = max(self._ahead_s, min(timers))
        super()._run_once()  # type: ignore[misc]
