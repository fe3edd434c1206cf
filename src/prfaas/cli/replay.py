"""`prfaas replay`: traffic against a running endpoint."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import AsJson, CliError, console, print_json
from prfaas.cli.option_groups import argument, option, options_of_panel, with_options
from prfaas.cli.replay_source import FittingRequests, TrafficAsked, shown_replay
from prfaas.cli.trace_options import TraceAsked

if TYPE_CHECKING:
    from prfaas.core.workload.traffic import ReplayedTraffic
    from prfaas.tools.replay import ReplayOptions, ReplayResult

_sending_option = options_of_panel("Sending")
# Files and sockets of the process besides the connections.
_OTHER_FILES = 64


@dataclass(frozen=True, slots=True)
class ReplayExtent:
    """How much is sent, and where the records go."""

    limit: int | None = option(None, "Send so many requests.", min=1)
    duration_s: float | None = option(None, "Send for so many seconds.")
    seed: int = option(0, "Another seed, other jitter.", min=0)
    max_input_tokens: int | None = option(None, "Leave out longer prompts.")
    records: Path | None = option(None, "Write a line of JSON per request as it ends.", metavar="FILE")


@dataclass(frozen=True, slots=True)
class SendingAsked:
    """How requests are sent."""

    model: str | None = _sending_option(None, "Default: the first that the server names.")
    stream: bool = _sending_option(True, "Take answers token by token, or whole.")
    ignore_eos: bool = _sending_option(True, "Ask for answers of exact length, as vLLM can.")
    vocabulary_size: int = _sending_option(256, "Token ids in prompts are below this.", min=2)
    max_connections: int = _sending_option(4096, "More open requests than these wait.", min=1)
    header: list[str] | None = _sending_option(
        None, "Send it with every request; may be repeated.", metavar="NAME:VALUE"
    )
    timeout_s: float = _sending_option(600.0, "A request without an answer by then is lost.", min=0.001)

    def options(self) -> "ReplayOptions":
        """The same for what sends them. Raises CliError for a header that is none."""
        from prfaas.tools.replay import ReplayOptions

        return ReplayOptions(
            stream=self.stream,
            vocabulary_size=self.vocabulary_size,
            ignore_eos=self.ignore_eos,
            max_connections=_connections(self.max_connections),
            timeout_s=self.timeout_s,
            headers=dict(_header(text) for text in self.header or ()),
        )


@with_options
def replay(
    url: str = argument(
        ..., "An OpenAI-compatible server, for example http://127.0.0.1:8000.", metavar="URL"
    ),
    *,
    asked: TrafficAsked,
    asked_trace: TraceAsked,
    extent: ReplayExtent,
    sending: SendingAsked,
    as_json: AsJson = False,
) -> None:
    """Send recorded requests at their times, and say how they fared.

    Prompts are made of token ids; where a trace says that prompts begin alike, they do. Nobody waits for an answer
    before the next request is sent. Ends with 1 if a request had no whole answer.

    Example: prfaas replay http://127.0.0.1:8000 --trace examples/traces/mooncake_burst.jsonl.gz --speed 2
    """
    import uvloop

    from prfaas.tools.replay import ReplayError

    traffic = asked.traffic(asked_trace.read())
    notes = tuple(asked.notes(traffic))
    run = _Run(traffic, notes, sending.options(), extent)
    try:
        result = uvloop.run(run.replayed(url, sending.model))
    except ReplayError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_json() | {"left_out": run.left_out, "notes": [*notes]})
    else:
        _print(result)
    if result.lost:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Run:
    """One replay: what is sent, how, and how much of it."""

    traffic: "ReplayedTraffic"
    notes: tuple[str, ...]
    options: "ReplayOptions"
    extent: ReplayExtent
    left_out: int = 0

    async def replayed(self, url: str, model: str | None) -> "ReplayResult":
        import aiohttp

        from prfaas.tools.replay import find_target, replay

        async with aiohttp.ClientSession() as session:
            target = await find_target(session, url, model)
        for note in self.notes:
            typer.echo(note, err=True)
        fitting = self._fitting(target.max_model_len)
        total = len(self.traffic.trace) * (self.traffic.rounds or 1)
        if self.extent.limit is not None:
            total = min(total, self.extent.limit)
        with shown_replay(total, self.extent.records) as shown:
            result = await replay(
                target, islice(fitting, self.extent.limit), self.options, shown.ended, shown.due
            )
        self.left_out = fitting.left_out
        if self.left_out:
            typer.echo(f"{self.left_out} requests were too long and were left out", err=True)
        return result

    def _fitting(self, max_model_len: int | None) -> "FittingRequests":
        import numpy as np

        from prfaas.core.workload.traffic import take

        chunks = self.traffic.chunks(np.random.default_rng(self.extent.seed))
        fitting = take(chunks, until_s=self.extent.duration_s)
        return FittingRequests(fitting, self.extent.max_input_tokens, max_model_len)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and name.isascii() and "\n" not in text):
        raise CliError(f"--header {text!r}: must be NAME:VALUE")
    return name.strip(), value.strip()


def _connections(wanted: int) -> int:
    """What the process may open, if that is less than wanted."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if soft == resource.RLIM_INFINITY else max(soft - _OTHER_FILES, 1)
    if allowed < wanted:
        typer.echo(
            f"at most {allowed} requests can be open at once: the limit of open files is {soft}", err=True
        )
    return min(allowed, wanted)


def _print(result: "ReplayResult") -> None:
    from prfaas.tools.replay.result import closing, times_table

    out = console()
    out.print(times_table(result))
    for sentence in closing(result):
        out.print(sentence)
