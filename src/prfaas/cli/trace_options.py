"""`--trace`, `--format` and `--columns`: a recorded trace, for the commands that read one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.common import CliError
from prfaas.cli.completions import trace_formats
from prfaas.cli.option_groups import options_of_panel

if TYPE_CHECKING:
    from prfaas.core.workload.lengths import LengthDistribution
    from prfaas.core.workload.requests import RequestTrace

_option = options_of_panel("Recorded traffic")


@dataclass(frozen=True, slots=True)
class TraceAsked:
    """The options for a trace."""

    trace: Path | None = _option(
        None,
        "Recorded requests: Mooncake's, Qwen-Bailian's, Azure's, BurstGPT's, ServeGen's, of vLLM's benchmark "
        "or AIPerf, our own, or any CSV or JSON lines.",
        metavar="FILE",
    )
    format: str | None = _option(
        None,
        "mooncake, qwen, azure, burstgpt, servegen, vllm, aiperf or jsonl, if the file doesn't tell.",
        "--format",
        autocompletion=trace_formats,
    )
    columns: str | None = _option(
        None,
        "What the columns of another trace are called; arrival in seconds or as date and time, or arrival_ms.",
        "--columns",
        metavar="arrival=A,input=B,output=C",
    )

    def read(self) -> "RequestTrace | None":
        """The trace, if one is given.

        Raises:
            CliError: a format or columns, but no trace.
            WorkloadError: it can't be read, there is no such format, or columns have another form.
        """
        from prfaas.core.workload.requests import read_requests
        from prfaas.core.workload.trace_columns import TraceColumns

        if self.trace is None:
            if self.format or self.columns:
                raise CliError("--format and --columns are of a --trace; there is none")
            return None
        columns = None if self.columns is None else TraceColumns.parse(self.columns)
        return read_requests(self.trace, self.format, columns)


def beyond(lengths: "LengthDistribution", range_tokens: tuple[float, float]) -> list[str]:
    """A sentence about the prompts that profiles do not cover, where there are some."""
    import numpy as np

    low, high = range_tokens
    (covered, longer), _ = lengths.above(np.array([low * (1 - 1e-9), high]))
    shorter = 1 - float(covered)
    if shorter < 1e-9 and longer < 1e-9:
        return []
    return [
        f"{shorter:.2%} of the prompts are shorter and {longer:.2%} longer than the {low:,.0f} to {high:,.0f} tokens "
        "that profiles cover: the shorter ones take as long as the shortest of these, and above them times grow on as "
        "they did over the last octave."
    ]
