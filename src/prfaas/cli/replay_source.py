"""The traffic of `prfaas replay`, from the command's options; and its progress, with a record per request."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from prfaas.cli.common import CliError, counted_progress
from prfaas.cli.option_groups import options_of_panel

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from prfaas.core.workload.requests import RequestTrace, TracedRequest
    from prfaas.core.workload.traffic import ReplayedTraffic
    from prfaas.tools.replay import ReplayedRequest


_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def shown_replay(total: int, records: Path | None) -> "Iterator[ShownReplay]":
    """Shows on stderr; `records` gets a line per request."""
    with (
        records.open("w") if records else contextlib.nullcontext() as file,
        counted_progress(transient=True) as progress,
    ):
        yield ShownReplay(file, progress, progress.add_task("sent", total=total))


class ShownReplay:
    """Told of every request when it is due, and when it has ended."""

    def __init__(self, file: IO[str] | None, progress: "Progress", task: "TaskID") -> None:
        self._file = file
        self._progress = progress
        self._task = task
        self._due = self._ended = self._lost = 0
        self._said_s = time.monotonic()

    def due(self) -> None:
        self._due += 1

    def ended(self, record: "ReplayedRequest") -> None:
        self._ended += 1
        self._lost += record.is_lost
        line = f"{self._due} sent, {self._due - self._ended} open, {self._lost} lost"
        self._progress.update(self._task, completed=self._ended, description=line)
        if time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            if not self._progress.console.is_terminal:
                self._progress.console.print(line)
        if self._file is not None:
            self._file.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")


_recorded_option = options_of_panel("Recorded traffic")


@dataclass(frozen=True, slots=True)
class TrafficAsked:
    """How a trace is replayed."""

    speed: float = _recorded_option(1.0, "So many times as fast as recorded.")
    jitter_s: float | None = _recorded_option(
        None, "Spread arrivals over so many seconds, for traces with a coarse clock."
    )
    rounds: int = _recorded_option(1, "Replay it so many times, each time with other prefixes.")
    scale_lengths: float = _recorded_option(1.0, "Multiply the lengths of prompts, shared prefixes too.")
    scale_answers: float = _recorded_option(1.0, "Multiply the lengths of answers.")

    def traffic(self, trace: "RequestTrace | None") -> "ReplayedTraffic":
        """The requests to send. Raises CliError where there is no trace, and WorkloadError."""
        from prfaas.core.workload.traffic import ReplayedTraffic

        if trace is None:
            raise CliError("give what to send as --trace FILE")
        return ReplayedTraffic(
            trace,
            speed=self.speed,
            jitter_s=self.jitter_s or 0.0,
            rounds=self.rounds,
            input_factor=self.scale_lengths,
            output_factor=self.scale_answers,
        )

    def notes(self, traffic: "ReplayedTraffic") -> "Iterator[str]":
        """What the user should know about it."""
        trace = traffic.trace
        yield f"{Path(trace.name).name}: {len(trace)} requests in {trace.span_s:.0f} s; units: {trace.units}"
        if trace.empty:
            yield f"{trace.empty} requests without a prompt are left out"
        if trace.quantum_s and self.jitter_s is None:
            yield (
                f"its clock has steps of {trace.quantum_s:g} s, so requests come in clumps; "
                f"--jitter-s {trace.quantum_s:g} spreads them evenly, --jitter-s 0 says that clumps are meant"
            )
        if traffic.block_tokens != trace.block_tokens:
            factor = traffic.block_tokens / trace.block_tokens
            yield f"prompts are scaled by {factor:.4g}: {traffic.block_tokens} tokens per block"


@dataclass(slots=True)
class FittingRequests:
    """Requests that the endpoint takes; those whose prompt is longer than `max_input_tokens`, or that are longer
    than `max_tokens` with their answer, are left out and counted.
    """

    requests: "Iterable[TracedRequest]"
    max_input_tokens: int | None
    max_tokens: int | None
    left_out: int = field(default=0, init=False)

    def __iter__(self) -> "Iterator[TracedRequest]":
        for request in self.requests:
            whole = request.input_tokens + max(request.output_tokens, 1)
            if (self.max_input_tokens is not None and request.input_tokens > self.max_input_tokens) or (
                self.max_tokens is not None and whole > self.max_tokens
            ):
                self.left_out += 1
            else:
                yield request
