"""What a replay found, for people."""

from collections.abc import Iterator

from rich.table import Table

from prfaas.replay.result import Percentiles, ReplayResult, fallbacks, route_bytes
from prfaas.units import format_bytes, format_s


def times_table(result: ReplayResult) -> Table:
    """TTFT, time per token and whole answers of all requests, and TTFT by route."""
    whole = [record for record in result.records if not record.is_lost]
    table = Table(title=f"{len(result.records)} requests to {result.target.url}", title_justify="left")
    table.add_column("")
    table.add_column("requests", justify="right")
    for name in ("mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="right")
    table.add_column("KV moved", justify="right")
    for name, values in (
        ("time to first token", [record.ttft_s for record in whole]),
        ("time per further token", [record.tpot_s for record in whole]),
        ("whole answer", [record.e2e_s for record in whole]),
    ):
        table.add_row(name, str(len(whole)), *_cells(Percentiles.of(values)), "")
    for route, records in result.by_route().items():
        ttft = Percentiles.of(record.ttft_s for record in records if not record.is_lost)
        moved = format_bytes(route_bytes(records))
        table.add_row(f"first token, {route}", str(len(records)), *_cells(ttft), moved)
    return table


def closing(result: ReplayResult) -> Iterator[str]:
    """Sentences under the table."""
    whole = [record for record in result.records if not record.is_lost]
    answered = result.per_s(sum(record.answered_tokens or 0 for record in whole))
    yield (
        f"{result.duration_s:.1f} s: {result.offered_per_s:.2f} requests/s offered, "
        f"{result.per_s(len(whole)):.2f} answered, "
        f"{result.per_s(sum(record.input_tokens for record in whole)):,.0f} prompt tokens/s, "
        f"{answered:,.0f} tokens/s"
    )
    if (failed := fallbacks(result.records)) > 0:
        yield f"{failed} prefills elsewhere failed and were done by the decode instance"
    if result.behind:
        cause = "too many requests were open" if result.waited else "this machine was too busy"
        yield (
            f"the replay fell behind: {result.behind} requests were sent late, by up to "
            f"{format_s(result.max_behind_s)}; {cause}"
        )
    for reason, count in result.errors.most_common(5):
        yield f"{count} x {reason}"
    yield (
        f"{result.lost} of {len(result.records)} requests were lost" if result.lost else "no request was lost"
    )


def _cells(percentiles: Percentiles | None) -> list[str]:
    if percentiles is None:
        return ["-"] * 5
    return [format_s(value) for value in percentiles.to_json().values()]
