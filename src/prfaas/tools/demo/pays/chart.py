"""The burst for people: bars in the terminal, and what they say."""

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.core.units import format_bits_per_s, format_s
from prfaas.tools.demo.display import demo_table
from prfaas.tools.demo.pays.limits import PayLimits
from prfaas.tools.demo.pays.outcome import BurstOutcome, SideOutcome

_BAR_COLUMNS = 22


def burst_table(outcome: BurstOutcome) -> Table:
    """TTFT mean and P90 with and without PrfaaS, live and simulated."""
    table = demo_table(
        f"TTFT of {outcome.burst.count} requests to each side, {outcome.burst.traffic.mean_per_s:.0f} per second"
    )
    for _ in ("side", "how"):
        table.add_column("", no_wrap=True)
    for heading in ("mean", "P90"):
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", width=_BAR_COLUMNS)
    sides = (("with PrfaaS", "green", outcome.paying), ("without", "yellow", outcome.without))
    shown = [(name, style, side, how) for name, style, side in sides for how in ("live", "simulated")]
    largest = [max(_measure(side, how)[place] for _, _, side, how in shown) for place in range(2)]
    for name, style, side, how in shown:
        cells: list[Text | Bar] = [
            Text(f"{name if how == 'live' else side.side.fleet} "),
            Text(f"{how} "),
        ]
        for value, most in zip(_measure(side, how), largest, strict=True):
            color = style if how == "live" else "bright_black"
            cells += [Text(f" {format_s(value)} "), Bar(most, 0, value, width=_BAR_COLUMNS, color=color)]
        table.add_row(*cells)
    return table


def _measure(side: SideOutcome, how: str) -> tuple[float, float]:
    ttfts = side.live if how == "live" else side.simulated
    return ttfts.mean, ttfts.p90


def burst_notes(outcome: BurstOutcome) -> list[str]:
    """Sentences on the setup: both sides, the link and the burst."""
    paying, without = outcome.paying, outcome.without
    (link,) = paying.side.deployment.links
    (planned,) = paying.side.operation.links
    notes = [
        f"The paper's case as stand-ins that run no model, {paying.side.speedup:g} times as fast as in life; gateway, "
        f"scheduler and KV transport are real. Both sides have {len(paying.side.deployment.instances)} instances and "
        f"get the same requests at the same time, {outcome.burst.load:.0%} of what those without PrfaaS can carry. "
        f"Their files are {' and '.join(side.side.deployment.path.name for side in (paying, without))} in examples/.",
        f"The line has {format_bits_per_s(link.bandwidth_bits_per_s)}; KVCache took {paying.link_used or 0:.0%} of it "
        f"in this burst. At full load it is used to {planned.utilisation:.0%}, as the paper's.",
        f"Simulated: the same requests and policy, and {format_s(paying.live_run.overhead_s)} (without: "
        f"{format_s(without.live_run.overhead_s)}) of HTTP per request, as measured before the burst.",
    ]
    notes += [
        f"{lost} requests {name} got no whole answer."
        for name, side in (("with PrfaaS", paying), ("without", without))
        if (lost := side.live_run.result.lost)
    ]
    return notes


def burst_closing(outcome: BurstOutcome) -> str:
    """The conclusion in one sentence."""
    ahead = outcome.ahead
    live, simulated = (
        f"{ahead[f'{how}_mean']:.1f} times in the mean and {ahead[f'{how}_p90']:.1f} times at P90"
        for how in ("live", "simulated")
    )
    shown = f"Without PrfaaS a first token takes {live} as long; the simulator says {simulated}."
    return shown if outcome.is_ahead else f"PrfaaS was NOT ahead in this run. {shown}"


def when_not(limits: PayLimits) -> str:
    """When it would not pay, by the planner, in one line; empty where nothing can be said."""
    cases = []
    if limits.dense_ratio is not None:
        cases.append(f"{limits.dense_ratio:.2f} x with a dense model ({limits.dense_title})")
    if limits.short_ratio is not None:
        cases.append(f"{limits.short_ratio:.2f} x if all prompts have {limits.short_tokens:,} tokens")
    if limits.break_even_per_gb is not None:
        cases.append(f"1 x where a GB of egress costs {limits.break_even_per_gb:.2g} of an H20's GPU-hour")
    if limits.equal_cost_ratio is None or not cases:
        return ""
    return (
        f"When it would not pay: for its money the paper's case serves {limits.equal_cost_ratio:.2f} x as many "
        f"requests as H20 alone, but {', '.join(cases)} (`prfaas plan`)."
    )


def print_burst(out: Console, burst: BurstOutcome) -> None:
    """Write when it pays to a console."""
    out.print(burst_table(burst))
    for note in burst_notes(burst):
        out.print(note, style="dim")
    out.print()
    out.print(burst_closing(burst), style="bold")
    out.print(when_not(burst.limits))
    out.print()
