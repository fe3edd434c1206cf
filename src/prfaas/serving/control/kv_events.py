"""KV events of all engines and pools, which their KV ports tell: applied in the event loop in small slices."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prfaas.core.backoff import Backoff
from prfaas.core.deployment import Instance
from prfaas.core.prefix.digests import HeldEvent, decode_events
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.tasks import end_all
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.requests import FollowedEvents, FollowOrder
from prfaas.serving.transport.protocol.wire import read_body

logger = logging.getLogger(__name__)

SLICE_S = 0.001
_ANSWER_S = 30.0
_BACKOFF = Backoff(0.1, 5.0)


@dataclass(slots=True)
class _Followed:
    """How far one holder has been followed."""

    session: str = ""
    next: int = 0
    gaps: int = 0
    """Lost connections."""
    replays: int = 0
    """Of these, those after which all was told again that had been missed."""
    resyncs: int = 0
    """Gaps that nothing could fill."""
    restarts: int = 0
    malformed: int = 0
    task: asyncio.Task[None] | None = None


class EventFeed(Part):
    """Calls `apply(holder, events)` and `drop(holder, reason)`, in each holder's order.

    A holder is asked for what comes next, and answers when there is something. Its numbers show whether anything was
    lost on the way, and its session whether what was told still holds. After every millisecond of applying, other tasks
    of the loop run; one batch (an engine's step) is not divided.
    """

    def __init__(
        self,
        names: Iterable[str],
        port_of: Callable[[str], Observer | None],
        *,
        apply: Callable[[str, Sequence[HeldEvent]], None],
        drop: Callable[[str, str], None],
    ) -> None:
        """`names`: of instances and pools. `port_of`: the KV port of one; None where there is none any more."""
        self._port_of = port_of
        self._apply = apply
        self._drop = drop
        self._followed = {name: _Followed() for name in names}
        self._is_running = False
        self.waiting_batches = 0
        """Received and not applied yet."""
        self.refused_batches = 0

    def join(self, instance: Instance) -> None:
        """Follow an instance."""
        self._follow(instance.name, _Followed())

    def leave(self, name: str) -> None:
        """Follow it no longer."""
        self._end(self._followed.pop(name, None))

    def lost(self, name: str, reason: str = "died") -> None:
        """An engine has lost its cache: forget all at once, and ask it what it holds."""
        self._drop(name, reason)
        followed = self._followed.get(name)
        if followed is not None:
            self._end(followed)
            followed.session, followed.next = "", 0
            self._follow(name, followed)

    async def run(self) -> None:
        """Until cancelled."""
        self._is_running = True
        try:
            for name, followed in self._followed.items():
                self._follow(name, followed)
            await asyncio.Event().wait()
        finally:
            self._is_running = False
            await end_all(*(each.task for each in self._followed.values() if each.task is not None))

    def state(self, _now_s: float) -> Json:
        """Waiting batches, and failures, of all holders."""
        return {
            "index": {"pending_batches": self.waiting_batches, "refused_batches": self.refused_batches},
        }

    def state_of(self, name: str, _now_s: float) -> Json:
        """The last batch applied, and what was missed, told again, given up and started again."""
        followed = self._followed.get(name)
        if followed is None or not followed.session:
            return {"events": None}
        return {
            "events": {
                "sequence": followed.next - 1,
                "gaps": followed.gaps,
                "replays": followed.replays,
                "resyncs": followed.resyncs,
                "restarts": followed.restarts,
                "malformed": followed.malformed,
            }
        }

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the gauges of gaps."""
        for name, followed in self._followed.items():
            metrics.feed_gaps.labels(name).set(followed.gaps)
            metrics.feed_replays.labels(name).set(followed.replays)
            metrics.feed_resyncs.labels(name).set(followed.resyncs)

    def _follow(self, name: str, followed: _Followed) -> None:
        self._followed[name] = followed
        if self._is_running:
            loop = self.loop_failures.keep("EventFeed", lambda: self._stay(name, followed))
            followed.task = asyncio.get_running_loop().create_task(loop, name=f"prfaas-events-{name}")

    def _end(self, followed: _Followed | None) -> None:
        if followed is not None and followed.task is not None:
            followed.task.cancel()

    async def _stay(self, name: str, followed: _Followed) -> None:
        """Ask for what comes next, again and again."""
        failures = voids = 0
        while (port := self._port_of(name)) is not None:
            try:
                order = FollowOrder(followed.session, followed.next)
                answer = read_body(
                    FollowedEvents, await port.request(secrets.token_bytes(16), order, _ANSWER_S)
                )
                if answer.session:
                    followed.replays += bool(failures)
                    failures = 0
                    told = await self._take(name, followed, answer)
                    # One that answers at once with nothing new, or with what is void again, is asked less often.
                    voids = 0 if told else voids + 1
                    await asyncio.sleep(_BACKOFF.pause_s(voids))
                    continue
            except TimeoutError:
                # Nothing has happened there.
                continue
            except (OSError, ValueError) as error:
                logger.log(
                    logging.DEBUG if failures else logging.INFO,
                    "KV events of %s can't be followed: %s",
                    name,
                    error,
                )
                if followed.session and not failures:
                    followed.gaps += 1
                elif followed.session:
                    # It is gone. What it holds when it is back, it will tell.
                    self._drop(name, "disconnected")
                    followed.session, followed.next = "", 0
            failures += 1
            await asyncio.sleep(_BACKOFF.pause_s(failures))

    async def _take(self, name: str, followed: _Followed, answer: FollowedEvents) -> bool:
        """Apply an answer, up to a batch that can't be read. Returns whether it goes on from what was told before."""
        goes_on = not followed.session or (answer.session, answer.first) == (followed.session, followed.next)
        if answer.session != followed.session:
            if followed.session:
                followed.restarts += answer.reason != "gap"
                followed.resyncs += answer.reason == "gap"
                self._drop(name, answer.reason)
        elif answer.first != followed.next:
            followed.resyncs += 1
            self._drop(name, "gap")
        followed.session, followed.next = answer.session, answer.first
        self.waiting_batches += len(answer.batches)
        end_s = time.perf_counter() + SLICE_S
        for place, payload in enumerate(answer.batches):
            if time.perf_counter() > end_s:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self.waiting_batches -= len(answer.batches) - place
                    raise
                end_s = time.perf_counter() + SLICE_S
            self.waiting_batches -= 1
            followed.next += 1
            if not self._is_applied(name, followed, payload):
                self.waiting_batches -= len(answer.batches) - place - 1
                return False
        return goes_on and bool(answer.batches)

    def _is_applied(self, name: str, followed: _Followed, payload: bytes) -> bool:
        try:
            self._apply(name, decode_events(payload))
            return True
        except Exception:
            # A mistake of one engine must not stop the others or the gateway.
            self.refused_batches += 1
            followed.malformed += 1
            logger.exception("%s publishes events that can't be applied", name)
            self._drop(name, "unreadable")
            return False
