"""A gateway's state as tables for people."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prfaas.core.units import format_bits_per_s, format_bytes, format_s

Json = dict[str, Any]

# How many of the latest changes are shown.
_LATEST = 5


def tables(state: Json) -> RenderableType:
    """All of `GET /prfaas/state`: the deployment, its clusters, pools, links, routes and latest changes."""
    parts: list[RenderableType] = [_headline(state), *_fleet(state.get("fleet"))]
    parts += [_instances(name, cluster) for name, cluster in state["clusters"].items()]
    if state["pools"]:
        parts.append(_pools(state["pools"]))
    if state["links"]:
        parts.append(_links(state))
    parts += [_routes(state), *_copies(state), *_suspicions(state), *_incompatible(state), *_changes(state)]
    return Group(*parts)


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


def _table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _instances(name: str, cluster: Json) -> Table:
    title = f"{name} ({cluster['kind']})"
    if cluster["kind"] == "pd":
        title += f", threshold: {_tokens(cluster['threshold_tokens'])}"
    numbers = ("open", "prefills", "wait", "decoding", "KV used", "hit rate", "blocks", "heard of")
    table = _table(title, ("instance", "role", "state"), numbers)
    for instance_name, instance in cluster["instances"].items():
        table.add_row(instance_name, *_instance(instance))
    return table


def _instance(instance: Json) -> Iterable[RenderableType]:
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
    if instance["drain"]:
        return Text(instance["drain"], style="yellow")
    if instance["draining"]:
        return Text("draining", style="yellow")
    return Text("up", style="green")


def _suspicions(state: Json) -> Iterable[RenderableType]:
    """Why instances are out of routing."""
    for cluster in state["clusters"].values():
        for name, instance in cluster["instances"].items():
            if not instance["healthy"]:
                yield Text(f"{name} is out of routing: {instance['suspicion']}", style="red")


def _incompatible(state: Json) -> Iterable[RenderableType]:
    """Which instances send nothing to which, and why."""
    for pair in state.get("incompatible", ()):
        text = f"{pair['producer']} sends nothing to {pair['consumer']} until one of them restarts: {pair['reason']}"
        yield Text(text, style="red")


def _links(state: Json) -> Table:
    numbers = ["carries", "of", "use", "queued", "done in", "transfers", "RTT", "sent again", "heard of"]
    has_prices = any(link.get("egress_per_gb") for link in state["links"].values())
    table = _table("links", ("link", "state"), [*numbers, "cost so far"] if has_prices else numbers)
    for name, link in state["links"].items():
        capacity = format_bits_per_s(link["capacity_bits_per_s"])
        if link["capacity_bits_per_s"] < link["configured_bits_per_s"]:
            capacity += f" (file: {format_bits_per_s(link['configured_bits_per_s'])})"
        table.add_row(
            name,
            _condition(link),
            format_bits_per_s(link["egress_bits_per_s"]),
            capacity,
            _share(link["utilisation"]),
            format_bytes(link["queued_bytes"]),
            format_s(link["drain_s"]) if link["drain_s"] else "–",
            str(link["transfers"]),
            format_s(link["rtt_s"]) if link["rtt_s"] else "–",
            f"{link['retransmit_ratio']:.2%}",
            f"{format_s(link['age_s'])} ago",
            *([f"{link['egress_cost']:,.4g}"] if has_prices else []),
        )
    return table


def _pools(pools: Json) -> Table:
    numbers = (
        "memory", "of", "SSD", "of", "to write", "pins", "engines",
        "hits memory", "hits SSD", "evicted", "from pools", "heard of",
    )  # fmt: skip
    table = _table("pools", ("pool", "state"), numbers)
    for name, pool in pools.items():
        state = Text("up", style="green") if pool["up"] else Text("down", style="bold red")
        table.add_row(name, state, *_pool(pool))
    return table


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


def _routes(state: Json) -> Table:
    table = _table("routes", ("route", "reason"), ("requests", "share"))
    counted = [
        (count, route, reason)
        for route, reasons in state["routes"].items()
        for reason, count in reasons.items()
    ]
    total = sum(count for count, _, _ in counted)
    for count, route, reason in sorted(counted, reverse=True):
        table.add_row(route, reason, f"{count:,}", _share(count / total))
    if not counted:
        table.add_row("none yet", "", "", "")
    return table


def _copies(state: Json) -> Iterable[RenderableType]:
    told = state["rebalancing"]
    if told["copied"]:
        yield Text(
            f"hot prefixes: {told['copied']:,} copied between pools, {format_bytes(told['copied_bytes'])}; "
            f"{told['hits']:,} requests found them and did not compute {told['spared_tokens']:,} tokens"
        )


def _changes(state: Json) -> Iterable[RenderableType]:
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
