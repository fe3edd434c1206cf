"""`prfaas replay`: traffic against a running endpoint."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import AsJson, CliError, console, print_json
from prfaas.cli.option_groups import options_of_panel, with_groups
from prfaas.cli.replay_source import FittingRequests, Source, SourceOptions, shown_replay, source_of
from prfaas.cli.trace_options import TraceAsked

if TYPE_CHECKING:
    from prfaas.tools.replay import ReplayOptions, ReplayResult

_sending_option = options_of_panel("Sending")
# Files and sockets of the process besides the connections.
_OTHER_FILES = 64


@dataclass(frozen=True, slots=True)
class ReplayExtent:
    """How much is sent, and where the records go."""

    limit: Annotated[int | None, typer.Option(min=1, help="Send so many requests.")] = None
    duration_s: Annotated[float | None, typer.Option(help="Send for so many seconds.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other made-up traffic and jitter.")] = 0
    max_input_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line of JSON per request as it ends.")
    ] = None


@with_groups
def replay(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="An OpenAI-compatible server, for example http://127.0.0.1:8000."),
    ],
    asked: SourceOptions,
    asked_trace: TraceAsked,
    extent: ReplayExtent,
    model: Annotated[str | None, _sending_option(help="Default: the first that the server names.")] = None,
    stream: Annotated[bool, _sending_option(help="Take answers token by token, or whole.")] = True,
    ignore_eos: Annotated[bool, _sending_option(help="Ask for answers of exact length, as vLLM can.")] = True,
    vocabulary_size: Annotated[
        int, _sending_option(min=2, help="Token ids in prompts are below this.")
    ] = 256,
    max_connections: Annotated[
        int, _sending_option(min=1, help="More open requests than these wait.")
    ] = 4096,
    header: Annotated[
        list[str] | None,
        _sending_option(metavar="NAME:VALUE", help="Send it with every request; may be repeated."),
    ] = None,
    timeout_s: Annotated[
        float, _sending_option(min=0.001, help="A request without an answer by then is lost.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Send recorded or made-up requests at their times, and say how they fared.

    Prompts are made of token ids; where a trace says that prompts begin alike, they do. Nobody waits for an answer
    before the next request is sent. Ends with 1 if a request had no whole answer.

    Example: prfaas replay http://127.0.0.1:8000 --trace examples/traces/mooncake_burst.jsonl.gz --speed 2
    """
    import uvloop

    from prfaas.tools.replay import ReplayError, ReplayOptions

    source = source_of(asked, asked_trace)
    if source.total is None and extent.limit is None and extent.duration_s is None:
        raise CliError("made-up traffic has no end; give --limit or --duration-s")
    options = ReplayOptions(
        stream=stream,
        vocabulary_size=vocabulary_size,
        ignore_eos=ignore_eos,
        max_connections=_connections(max_connections),
        timeout_s=timeout_s,
        headers=dict(_header(text) for text in header or ()),
    )
    run = _Run(source, options, extent)
    try:
        result = uvloop.run(run.replayed(url, model))
    except ReplayError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_json() | {"left_out": run.left_out, "notes": [*source.notes]})
    else:
        _print(result)
    if result.lost:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Run:
    """One replay: what is sent, how, and how much of it."""

    source: "Source"
    options: "ReplayOptions"
    extent: ReplayExtent
    left_out: int = 0

    async def replayed(self, url: str, model: str | None) -> "ReplayResult":
        import aiohttp

        from prfaas.tools.replay import find_target, replay

        async with aiohttp.ClientSession() as session:
            target = await find_target(session, url, model)
        for note in self.source.notes:
            typer.echo(note, err=True)
        fitting = self._fitting(target.max_model_len)
        total = self.source.total if self.extent.limit is None else self.extent.limit
        if self.source.total is not None and total is not None:
            total = min(total, self.source.total)
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

        chunks = self.source.traffic.chunks(np.random.default_rng(self.extent.seed))
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
