"""The traffic of `prfaas replay`, from the command's options; and its progress, with a record per request."""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from prfaas.cli.common import CliError, counted_progress
from prfaas.cli.option_groups import options_of_panel
from prfaas.cli.trace_options import TraceAsked

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from prfaas.core.workload.arrivals import Arrivals
    from prfaas.core.workload.lengths import LengthDistribution
    from prfaas.core.workload.requests import RequestTrace, TracedRequest
    from prfaas.core.workload.traffic import Traffic
    from prfaas.tools.replay import ReplayedRequest


_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def shown_replay(total: int | None, records: Path | None) -> "Iterator[ShownReplay]":
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
_made_up_option = options_of_panel("Made-up traffic")
_TRACE_ONLY = ("speed", "jitter_s", "rounds", "scale_lengths", "scale_answers")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options as they were given, None for those that were not."""

    speed: float | None = _recorded_option(None, "So many times as fast as recorded.")
    jitter_s: float | None = _recorded_option(
        None, "Spread arrivals over so many seconds, for traces with a coarse clock."
    )
    rounds: int | None = _recorded_option(None, "Replay it so many times, each time with other prefixes.")
    scale_lengths: float | None = _recorded_option(
        None, "Multiply the lengths of prompts, shared prefixes too."
    )
    scale_answers: float | None = _recorded_option(None, "Multiply the lengths of answers.")
    poisson: float | None = _made_up_option(None, "Requests per second.", metavar="RATE")
    bursts: str | None = _made_up_option(
        None, "Phases by turns, each with a rate and its mean seconds: 2/60,20/5.", metavar="RATE/S,RATE/S"
    )
    diurnal: str | None = _made_up_option(
        None, "A sine: mean rate, swing from 0 to 1, period in seconds.", metavar="RATE/SWING/S"
    )
    sessions: str | None = _made_up_option(
        None, "Conversations per second, their mean turns, and seconds between turns.", metavar="RATE/TURNS/S"
    )
    input_tokens: str = _made_up_option("1000", "Lengths of prompts, or of a turn's.", metavar="N|LOW:HIGH")
    output_tokens: str = _made_up_option("100", "Lengths of answers.", metavar="N|LOW:HIGH")
    shared_tokens: int = _made_up_option(0, "Beginning that all conversations share.")


@dataclass(frozen=True, slots=True)
class Source:
    """`total`: requests of the traffic if it has an end. `notes`: what the user should know about it."""

    traffic: "Traffic"
    total: int | None = None
    notes: tuple[str, ...] = ()


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


def source_of(options: SourceOptions, asked: TraceAsked) -> Source:
    """Raises CliError or WorkloadError for options that make no traffic."""
    names = ("trace", "poisson", "bursts", "diurnal", "sessions")
    given = [
        f"--{name}" for name in names if getattr(asked if name == "trace" else options, name) is not None
    ]
    if len(given) != 1:
        which = f", not {' and '.join(given)}" if given else ""
        raise CliError(f"give one of {', '.join(f'--{name}' for name in names)}{which}")
    trace = asked.read()
    if trace is not None:
        return _recorded(options, trace)
    for name in _TRACE_ONLY:
        if getattr(options, name) is not None:
            raise CliError(f"--{name.replace('_', '-')} changes a recorded trace; {given[0]} has none")
    return Source(_made_up(options))


def _recorded(options: SourceOptions, trace: "RequestTrace") -> Source:
    from prfaas.core.workload.traffic import ReplayedTraffic

    traffic = ReplayedTraffic(
        trace,
        speed=1.0 if options.speed is None else options.speed,
        jitter_s=options.jitter_s or 0.0,
        rounds=1 if options.rounds is None else options.rounds,
        input_factor=1.0 if options.scale_lengths is None else options.scale_lengths,
        output_factor=1.0 if options.scale_answers is None else options.scale_answers,
    )
    notes = [f"{Path(trace.name).name}: {len(trace)} requests in {trace.span_s:.0f} s; units: {trace.units}"]
    if trace.empty:
        notes.append(f"{trace.empty} requests without a prompt are left out")
    if trace.quantum_s and options.jitter_s is None:
        notes.append(
            f"its clock has steps of {trace.quantum_s:g} s, so requests come in clumps; "
            f"--jitter-s {trace.quantum_s:g} spreads them evenly, --jitter-s 0 says that clumps are meant"
        )
    if traffic.block_tokens != trace.block_tokens:
        factor = traffic.block_tokens / trace.block_tokens
        notes.append(f"prompts are scaled by {factor:.4g}: {traffic.block_tokens} tokens per block")
    return Source(traffic, len(trace) * (traffic.rounds or 1), tuple(notes))


def _made_up(options: SourceOptions) -> "Traffic":
    from prfaas.core.workload.arrivals import Poisson
    from prfaas.core.workload.sessions import SessionTraffic
    from prfaas.core.workload.traffic import IndependentTraffic

    inputs = _lengths("--input-tokens", options.input_tokens)
    outputs = _lengths("--output-tokens", options.output_tokens)
    if options.sessions is not None:
        rate, turns, think_s = _numbers("--sessions", options.sessions, "RATE/TURNS/THINK_S", 3)
        return SessionTraffic(
            Poisson(rate), turns, think_s, inputs, outputs, shared_tokens=options.shared_tokens
        )
    return IndependentTraffic(_arrivals(options), inputs, outputs)


def _arrivals(options: SourceOptions) -> "Arrivals":
    from prfaas.core.workload.arrivals import Diurnal, Mmpp, Phase, Poisson

    if options.bursts is not None:
        phases = (
            _numbers("--bursts", part, "RATE/SECONDS,RATE/SECONDS", 2) for part in options.bursts.split(",")
        )
        return Mmpp(tuple(Phase(rate, dwell_s) for rate, dwell_s in phases))
    if options.diurnal is not None:
        rate, swing, period_s = _numbers("--diurnal", options.diurnal, "RATE/SWING/PERIOD_S", 3)
        return Diurnal(rate, swing, period_s)
    assert options.poisson is not None
    return Poisson(options.poisson)


def _numbers(option: str, text: str, form: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise CliError(f"{option} {text}: must be {form}")
    return numbers


def _lengths(option: str, text: str) -> "LengthDistribution":
    from prfaas.core.workload.empirical import fixed
    from prfaas.core.workload.lengths import Uniform

    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    if match is None:
        raise CliError(f"{option} {text}: must be a number of tokens, or LOW:HIGH")
    return fixed(int(match[1])) if match[2] is None else Uniform(int(match[1]), int(match[2]))
