"""A gateway's state as tables for people. Columns that a terminal has no room for are left out; a hint names them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from prfaas.core.units import format_bits_per_s, format_bytes, format_s

Json = dict[str, Any]

# How many of the latest changes are shown.
_LATEST = 5
# From here on columns stand two cells apart, below one.
_WIDE = 100


@dataclass(frozen=True, slots=True)
class StatusColumn:
    """A heading, and how much the column matters."""

    heading: str
    is_number: bool = True
    rank: int = 0
    """0: always shown. Of the others the highest is left out first."""
    what: str = ""
    """Its name in the hint, where the heading alone says too little."""


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table with a title; the first column names what a row is about, and folds rather than being cut."""

    title: str
    columns: tuple[StatusColumn, ...]
    rows: tuple[tuple[Text, ...], ...]
    hidden_columns: tuple[str, ...] = ()

    def within(self, width: int) -> "StatusTable":
        """The table without the columns that have no room."""
        widths = [
            max(cell_len(column.heading), *(row[place].cell_len for row in self.rows), 0)
            for place, column in enumerate(self.columns)
        ]
        kept = list(range(len(self.columns)))
        while sum(widths[place] for place in kept) + _gap(width) * (len(kept) - 1) > width:
            optional = [place for place in kept if self.columns[place].rank]
            if not optional:
                break
            kept.remove(max(optional, key=lambda place: self.columns[place].rank))
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
            hidden_columns=tuple(
                column.what or column.heading
                for place, column in enumerate(self.columns)
                if place not in kept
            ),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        yield Text(self.title, style="bold")
        padding = (0, _gap(options.max_width) - 1, 0, 0)
        table = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False)
        for place, column in enumerate(self.columns):
            table.add_column(
                column.heading,
                justify="right" if column.is_number else "left",
                no_wrap=place > 0,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*row)
        yield table


def _gap(width: int) -> int:
    return 2 if width >= _WIDE else 1


@dataclass(frozen=True, slots=True)
class StatusPage:
    """A screen: lines above the tables, the tables, and lines below them."""

    above: tuple[Text, ...]
    tables: tuple[StatusTable, ...]
    below: tuple[Text, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = [table.within(options.max_width) for table in self.tables]
        yield from self.above
        yield from tables
        if self.below:
            yield Text()
            yield from self.below
        hidden = dict.fromkeys(heading for table in tables for heading in table.hidden_columns)
        if hidden:
            hint = f"Not shown here: columns {', '.join(hidden)}. A larger window or --json has it."
            yield Text(hint, style="dim")


def tables(state: Json, note: str = "") -> StatusPage:
    """All of `GET /prfaas/state`: the deployment, what is wrong, clusters, pools, links, routes and latest changes.

    Args:
        state: The document.
        note: Stands above everything.
    """
    above = [Text(note, style="bold yellow")] if note else []
    above += [_headline(state), *_fleet(state.get("fleet"))]
    above += [*_suspicions(state), *_incompatible(state), *_narrowed(state)]
    found = [_instances(name, cluster) for name, cluster in state["clusters"].items()]
    if state["pools"]:
        found.append(_pools(state["pools"]))
    if state["links"]:
        found.append(_links(state))
    return StatusPage(tuple(above), (*found, _routes(state)), (*_copies(state), *_changes(state)))


def _headline(state: Json) -> Text:
    requests, index = state["requests"], state["index"]
    text = Text(f"{state['deployment']} ", style="bold")
    told = (
        f"{state['model']}, policy {state['policy']}, up {format_s(state['up_s'])}; "
        f"{requests['routed']:,} requests, {requests['per_s']:.3g}/s lately; "
        f"{index['blocks']:,} KV blocks indexed"
    )
    return text.append(told, style="not bold")


def _fleet(fleet: Json | None) -> Iterable[Text]:
    """Which gateway this is, who leads, and what is wrong between them."""
    if fleet is None:
        return
    yield Text(
        f"gateway {fleet['name']} of {', '.join(fleet['members'])}; {fleet['leader'] or 'nobody'} leads"
    )
    if not fleet["connected"]:
        silent = f"for {format_s(fleet['silent_s'])} " if fleet["silent_s"] else ""
        yield Text(
            f"no member of the fleet {silent}(goes on by what it knows): {fleet['problem']}", style="red"
        )
    for name, member in fleet["members"].items():
        if not member["same_file"]:
            yield Text(f"gateway {name} runs another deployment file than {fleet['name']}", style="yellow")
    for name in fleet["unwritten_drains"]:
        yield Text(f"the other gateways do not know yet whether {name} drains", style="yellow")


def _words(*headings: str) -> tuple[StatusColumn, ...]:
    return tuple(StatusColumn(heading, is_number=False) for heading in headings)


def _numbers(**ranks: int) -> tuple[StatusColumn, ...]:
    """Headings, with _ for a space, and their ranks."""
    return tuple(StatusColumn(heading.replace("_", " "), rank=rank) for heading, rank in ranks.items())


def _row(cells: Iterable[str | Text]) -> tuple[Text, ...]:
    return tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells)


_INSTANCE = (
    *_words("instance", "role", "state"),
    *_numbers(open=0, prefills=0, wait=0, decoding=0, KV_used=0, hit_rate=1, blocks=3, heard_of=2),
)


def _instances(name: str, cluster: Json) -> StatusTable:
    title = f"{name} ({cluster['kind']})"
    if cluster["kind"] == "pd":
        title += f", threshold: {_tokens(cluster['threshold_tokens'])}"
    rows = tuple(
        _row((instance_name, *_instance(instance)))
        for instance_name, instance in cluster["instances"].items()
    )
    return StatusTable(title, _INSTANCE, rows)


def _instance(instance: Json) -> Iterable[str | Text]:
    engine = instance["engine"] or {}
    slots = instance["decode_slots"]
    yield instance["role"]
    yield _health(instance)
    yield str(instance["in_flight"])
    yield str(instance["queue"])
    yield format_s(instance["busy_s"]) if instance["busy_s"] else "–"
    wait = f", {format_s(instance['decode_wait_s'])}" if instance["decode_wait_s"] else ""
    yield f"{instance['decoding']}/{slots}{wait}" if slots else "–"
    yield _share(engine.get("kv_usage"))
    yield _share(engine.get("hit_rate"))
    yield f"{instance['blocks']:,}"
    yield f"{format_s(instance['age_s'])} ago"


def _health(instance: Json) -> Text:
    if not instance["healthy"]:
        return Text("down", style="bold red")
    if instance.get("leaves_in_s") is not None:
        return Text(f"leaves in {format_s(instance['leaves_in_s'])}", style="yellow")
    if instance["drain"]:
        return Text(instance["drain"], style="yellow")
    if instance["draining"]:
        return Text("draining", style="yellow")
    return Text("up", style="green")


def _suspicions(state: Json) -> Iterable[Text]:
    """Why instances are out of routing."""
    for cluster in state["clusters"].values():
        for name, instance in cluster["instances"].items():
            if not instance["healthy"]:
                yield Text(f"{name} is out of routing: {instance['suspicion']}", style="red")


def _incompatible(state: Json) -> Iterable[Text]:
    """Which instances send nothing to which, and why."""
    for pair in state.get("incompatible", ()):
        text = f"{pair['producer']} sends nothing to {pair['consumer']} until one of them restarts: {pair['reason']}"
        yield Text(text, style="red")


_LINK = (
    *_words("link", "state"),
    *_numbers(
        carries=0,
        of=0,
        use=3,
        queued=0,
        done_in=0,
        cost=0,
        transfers=5,
        RTT=4,
        sent_again=2,
        heard_of=6,
    ),
)


def _links(state: Json) -> StatusTable:
    has_prices = any(link.get("egress_per_gb") for link in state["links"].values())
    columns = tuple(column for column in _LINK if has_prices or column.heading != "cost")
    rows = []
    for name, link in state["links"].items():
        cells = (
            name,
            _condition(link),
            format_bits_per_s(link["egress_bits_per_s"]),
            format_bits_per_s(link["capacity_bits_per_s"]),
            _share(link["utilisation"]),
            format_bytes(link["queued_bytes"]),
            format_s(link["drain_s"]) if link["drain_s"] else "–",
            *([f"{link['egress_cost']:,.4g}"] if has_prices else []),
            str(link["transfers"]),
            format_s(link["rtt_s"]) if link["rtt_s"] else "–",
            f"{link['retransmit_ratio']:.2%}",
            f"{format_s(link['age_s'])} ago",
        )
        rows.append(_row(cells))
    return StatusTable("links", columns, tuple(rows))


def _narrowed(state: Json) -> Iterable[Text]:
    """Links that carry less than their file says."""
    for name, link in state["links"].items():
        capacity, configured = link["capacity_bits_per_s"], link["configured_bits_per_s"]
        if capacity < configured:
            told = f"{name} carries {format_bits_per_s(capacity)} at most"
            yield Text(f"{told}; the file says {format_bits_per_s(configured)}", style="yellow")


_POOL = (
    *_words("pool", "state"),
    *_numbers(memory=0),
    StatusColumn("of", rank=2, what="size of memory"),
    *_numbers(SSD=0),
    StatusColumn("of", rank=1, what="size of SSD"),
    *_numbers(to_write=5, pins=9, engines=8, hits_memory=0, hits_SSD=0, evicted=6, from_pools=4, heard_of=7),
)


def _pools(pools: Json) -> StatusTable:
    rows = []
    for name, pool in pools.items():
        state = Text("up", style="green") if pool["up"] else Text("down", style="bold red")
        rows.append(_row((name, state, *_pool(pool))))
    return StatusTable("pools", _POOL, tuple(rows))


def _pool(pool: Json) -> Iterable[str]:
    daemon, hits = pool["daemon"], pool["hit_tokens"]
    if daemon is None:
        yield from ("–",) * 7
    else:
        for tier in ("memory", "ssd"):
            yield format_bytes(daemon["bytes"][tier])
            yield format_bytes(daemon["capacity_bytes"][tier])
        yield format_bytes(daemon["ssd_queued_bytes"])
        yield str(daemon["pinned_pages"])
        yield str(daemon["sessions"])
    yield f"{hits['memory']:,}"
    yield f"{hits['ssd']:,}"
    for what in ("evicted", "copied"):
        yield "–" if daemon is None else format_bytes(daemon[f"{what}_bytes"])
    yield "–" if pool["age_s"] is None else f"{format_s(pool['age_s'])} ago"


def _condition(link: Json) -> Text:
    """Up or down, and what is unusual about it."""
    state = "up" if link["up"] else "down"
    unusual = link["condition"] not in ("clear", "busy", state)
    style = "bold red" if not link["up"] else "yellow" if unusual else "green"
    return Text(f"{state}, {link['condition']}" if unusual else state, style=style)


def _routes(state: Json) -> StatusTable:
    counted = [
        (count, route, reason)
        for route, reasons in state["routes"].items()
        for reason, count in reasons.items()
    ]
    total = sum(count for count, _, _ in counted)
    rows = tuple(
        _row((route, reason, f"{count:,}", _share(count / total)))
        for count, route, reason in sorted(counted, reverse=True)
    )
    columns = (*_words("route", "reason"), *_numbers(requests=0, share=0))
    return StatusTable("routes", columns, rows or (_row(("none yet", "", "", "")),))


def _copies(state: Json) -> Iterable[Text]:
    told = state["rebalancing"]
    if told["copied"]:
        yield Text(
            f"hot prefixes: {told['copied']:,} copied between pools, {format_bytes(told['copied_bytes'])}"
        )


def _changes(state: Json) -> Iterable[Text]:
    """The latest moves of thresholds and roles, newest first."""
    for change in reversed(state["thresholds"]["history"][-_LATEST:]):
        text = f"threshold of {change['cluster']}: {_tokens(change['tokens'])}, {change['reason']}"
        if change["rate_after"] is not None:
            text += f" ({change['rate_before']:.3g} → {change['rate_after']:.3g} requests/s possible)"
        yield Text(f"{format_s(change['age_s'])} ago  {text}")
    for change in reversed(state["roles"]["conversions"][-_LATEST:]):
        text = f"{change['instance']} of {change['cluster']} to {change['to_role']}: {change['outcome']}"
        text += f" ({change['reason']})"
        yield Text(f"{format_s(change['age_s'])} ago  {text}")


def _tokens(tokens: float | None) -> str:
    return "never offloads" if tokens is None else f"{tokens:,.0f} tokens"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
