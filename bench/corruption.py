"""Whether page digests see what is wrong with KV that arrives, and what they cost.

    python bench/corruption.py [--corruptions 10000] [--clean 10000] [--seed 1] [--cost] [--ttft] [--json FILE]

Detection: transfers of random prompts through the producing and the consuming half of the vLLM connector, with two
tensor-parallel ranks, random layouts, chunks, skipped and held tokens, over the real transport on loopback. Each gets
one corruption at one of six sites, or none:

- page reused: another request writes into a block before it is sent;
- layers swapped: the sender reads another layer's pages, or two layers change places in staging with their digests;
- ranks swapped: two ranks' transfers change places in staging, with their digests;
- stale state: a linear state's block holds another state when it is sent than at the end of the prefill;
- wire: a frame is changed on its way, half of them with a right checksum;
- staging: a page or a digest is changed after it has arrived.

A corruption is undetected if the load succeeds and a loaded page is not the one that was computed. It is repaired if
the load succeeds and all pages are right: damage that the wire's checksum sees is sent again.
Transfers without corruption must load. In a third of them the free slots behind the prompt change before they are
sent, in another third the request is preempted and its blocks are reused.

--cost: speed of the digest, and connector with and without it in turns (medians of paired ratios).
--ttft: the same for the time to first token of real vLLM engines (tiny Qwen3-Next, CPU), over both hops.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from corruption_cost import connector_ratios, digest_speed, ttft_ratios
from corruption_world import Prompt, Rank, World, damage, exchange, random_prompt, spoil_staged
from prfaas.core.kv.groups import GroupKind
from prfaas.serving.engines.page_digests import DIGEST_BYTES

TRANSFERS_PER_WORLD = 200

Outcome = str
DETECTED, REPAIRED, UNDETECTED = "detected", "repaired", "UNDETECTED"


class NotApplicable(Exception):
    """This prompt has nothing for this fault to change; another one is drawn."""


def page_reused(
    world: World, prompt: Prompt, kinds: tuple[GroupKind, ...] = (GroupKind.FULL, GroupKind.WINDOW)
) -> None:
    """A block is written between its computation and its sending. A partial last block leaves as a copy."""
    rank, rng = world.ranks[0], world.rng
    num_tokens = prompt.ticket.num_tokens
    places = [
        (region, block)
        for region, block in rank.loaded_pages(prompt)
        if region.group.kind in kinds
        and (region.group.kind is GroupKind.STATE or (block + 1) * region.group.block_tokens <= num_tokens)
    ]
    if not places:
        raise NotApplicable
    region, block = rng.choice(places)
    page = rank.east[region.layer_name][prompt.east[region.group.index][block]]
    changed = bytearray(page)
    damage(rng, changed)
    page[:] = changed


def stale_state(world: World, prompt: Prompt) -> None:
    page_reused(world, prompt, (GroupKind.STATE,))


def layers_misread(world: World, prompt: Prompt) -> None:
    """The sender reads the pages of another layer of the same group."""
    rank, rng = world.ranks[0], world.rng
    kind = rng.choice((GroupKind.FULL, GroupKind.STATE))
    one, other = (f"{kind.value}.{number}" for number in (0, 1))
    whole = [
        block
        for region, block in rank.loaded_pages(prompt)
        if region.layer_name == one
        and (kind is GroupKind.STATE or (block + 1) * region.group.block_tokens <= prompt.ticket.num_tokens)
    ]
    if not whole:
        raise NotApplicable
    rank.pages[one].instead, rank.pages[other].instead = rank.pages[other], rank.pages[one]


def layers_swapped(world: World, prompt: Prompt) -> None:
    """Two layers change places in staging, with their digests."""
    rank, ticket = world.ranks[0], prompt.ticket
    kind = world.rng.choice(list(GroupKind))
    one, other = (r for r in rank.layout.regions if r.layer_name in (f"{kind.value}.0", f"{kind.value}.1"))
    if not len(one.group.moving_blocks(*prompt.extent)):
        raise NotApplicable
    staged = rank.receiver.take_early(ticket.transfer_id)
    blocks = one.group.moving_blocks(ticket.num_tokens, ticket.skip_tokens)
    digests = rank.digest_plan.of_transfer(ticket.transfer_id, ticket.num_tokens, ticket.skip_tokens)
    page_views = [
        staged.region_views(region.index, 0, region.page_bytes * len(blocks)) for region in (one, other)
    ]
    digest_views = [
        [
            view
            for block in blocks
            for view in staged.region_views(
                digests.region, DIGEST_BYTES * digests.index(region.index, block), DIGEST_BYTES
            )
        ]
        for region in (one, other)
    ]
    exchange(*page_views)
    exchange(*digest_views)


def ranks_swapped(world: World, prompt: Prompt) -> None:
    staged = [rank.receiver.take_early(prompt.ticket.transfer_id) for rank in world.ranks]
    for region, size in enumerate(staged[0].region_bytes):
        exchange(*(each.region_views(region, 0, size) for each in staged))


def staging_spoilt(world: World, prompt: Prompt) -> None:
    spoil_staged(world.rng, world.ranks[0], prompt)


def arm_wire(world: World, prompt: Prompt) -> None:
    """A DATA frame of a region that has bytes is changed on its way, in half of the cases with a right checksum."""
    rank, rng, ticket = world.ranks[0], world.rng, prompt.ticket
    sizes = rank.digest_plan.region_bytes(ticket.num_tokens, ticket.skip_tokens)
    region = rng.choice([index for index, size in enumerate(sizes) if size])
    rank.proxy.arm(region, lambda payload: damage(rng, payload), forge=rng.random() < 0.5)


Fault = Callable[[World, Prompt], None]
BEFORE_PREFILL: dict[str, tuple[Fault, ...]] = {"wire": (arm_wire,)}
BEFORE_SEND: dict[str, tuple[Fault, ...]] = {
    "page reused": (page_reused,),
    "layers swapped": (layers_misread,),
    "stale state": (stale_state,),
}
BEFORE_LOAD: dict[str, tuple[Fault, ...]] = {
    "layers swapped": (layers_swapped,),
    "ranks swapped": (ranks_swapped,),
    "staging": (staging_spoilt,),
}
SITES = ("page reused", "layers swapped", "ranks swapped", "stale state", "wire", "staging")


def inject(world: World, site: str) -> Outcome:
    """One transfer with one corruption.

    Raises:
        NotApplicable: the prompt that was drawn has nothing to corrupt at this site.
    """
    rng = world.rng
    stages = [stage[site] for stage in (BEFORE_PREFILL, BEFORE_SEND, BEFORE_LOAD) if site in stage]
    fault = rng.choice([fault for faults in stages for fault in faults])
    prompt = random_prompt(rng, world.groups, load_all=site == "wire")
    ranks = world.ranks if site == "ranks swapped" else world.ranks[:1]
    missing = False

    def apply(stage: dict[str, tuple[Fault, ...]]) -> None:
        nonlocal missing
        if fault in stage.get(site, ()):
            try:
                fault(world, prompt)
            except NotApplicable:
                missing = True

    apply(BEFORE_PREFILL)
    for rank in ranks:
        rank.gate.clear()
        rank.prefill(prompt, world.random_bytes)
    apply(BEFORE_SEND)
    for rank in ranks:
        rank.gate.set()
        rank.await_arrival(prompt)
        for pages in rank.pages.values():
            pages.instead = None
    apply(BEFORE_LOAD)
    if world.ranks[0].proxy.armed:
        raise RuntimeError("the frame to change did not pass")
    outcomes = [outcome(rank, prompt) for rank in ranks]
    if missing:
        if outcomes != [REPAIRED]:
            raise RuntimeError("a transfer without corruption was not loaded")
        raise NotApplicable
    return max(outcomes, key=(DETECTED, REPAIRED, UNDETECTED).index)


def outcome(rank: Rank, prompt: Prompt) -> Outcome:
    """What became of the load."""
    before = rank.stats.data["digest_mismatches"]
    if not rank.load(prompt):
        if rank.stats.data["digest_mismatches"] != before + 1:
            raise RuntimeError("a load failed for another reason than its digests")
        return DETECTED
    return REPAIRED if rank.holds_what_was_computed(prompt) else UNDETECTED


def move_clean(world: World) -> bool:
    """One transfer without corruption; the free slots of its last block may change before it is sent."""
    rng, rank = world.rng, world.ranks[0]
    prompt = random_prompt(rng, world.groups, load_all=False)
    way = rng.randrange(3)
    if way == 1:
        rank.gate.clear()
    rank.prefill(prompt, world.random_bytes)
    if way == 1:
        for region in rank.layout.regions:
            group, last = region.group, prompt.ticket.num_tokens // region.group.block_tokens
            if group.kind is not GroupKind.STATE and prompt.ticket.num_tokens % group.block_tokens:
                page = rank.east[region.layer_name][prompt.east[group.index][last]]
                page[:] = world.random_bytes.integers(0, 256, len(page), dtype="u1")
        rank.gate.set()
    elif way == 2:
        # Preempted: what is unsent is copied out, then the blocks are another request's.
        rank.producer.detach(["p"])
        for pages in rank.east.values():
            pages[:] = world.random_bytes.integers(0, 256, pages.shape, dtype="u1")
    rank.await_arrival(prompt)
    return outcome(rank, prompt) == REPAIRED


def detect(
    corruptions: int, clean: int, seed: int, progress: Progress
) -> tuple[dict[str, Counter[str]], int]:
    """Returns the outcomes by site, and the number of clean transfers that were not loaded as computed."""
    found: dict[str, Counter[str]] = {site: Counter() for site in SITES}
    alarms = done = moved = 0
    task = progress.add_task("transfers", total=corruptions + clean)
    rng = random.Random(seed)
    while done < corruptions or moved < clean:
        world = World(rng.randrange(1 << 31))
        try:
            for _ in range(TRANSFERS_PER_WORLD):
                if done < corruptions:
                    site = SITES[done % len(SITES)]
                    try:
                        found[site][inject(world, site)] += 1
                    except NotApplicable:
                        pass
                    else:
                        done += 1
                        progress.advance(task)
                if moved < clean:
                    alarms += not move_clean(world)
                    moved += 1
                    progress.advance(task)
        finally:
            world.close()
    return found, alarms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corruptions", type=int, default=10_000)
    parser.add_argument("--clean", type=int, default=10_000, help="transfers without corruption")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cost", action="store_true", help="also measure the connector with and without digests"
    )
    parser.add_argument(
        "--ttft", action="store_true", help="also start real engines with and without digests"
    )
    parser.add_argument("--rounds", type=int, default=30, help="pairs of each cost measurement")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    # Each detected corruption is an error of the connector, and logged as one.
    logging.getLogger("prfaas").setLevel(logging.CRITICAL)
    sys.setswitchinterval(0.0005)
    console = Console(width=120)
    began_s = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        found, alarms = detect(options.corruptions, options.clean, options.seed, progress)
    table = Table("site", "corruptions", DETECTED, REPAIRED, UNDETECTED)
    for site, counts in found.items():
        row = (counts.total(), counts[DETECTED], counts[REPAIRED], counts[UNDETECTED])
        table.add_row(site, *map(str, row))
    console.print(table)
    console.print(
        f"clean transfers: {options.clean}, false alarms: {alarms}; {time.monotonic() - began_s:.0f} s"
    )
    undetected = sum(counts[UNDETECTED] for counts in found.values())
    figures: dict[str, Any] = {
        "sites": {site: dict(counts) for site, counts in found.items()},
        "clean_transfers": options.clean,
    }
    goals = [_goal("undetected corruptions", undetected, "", 0), _goal("false alarms", alarms, "", 0)]
    if options.cost:
        figures["digest_gb_per_s"] = digest_speed()
        figures["connector_ratios"] = connector_ratios(options.rounds)
        console.print("digest, GB/s by page size in bytes:", figures["digest_gb_per_s"])
        console.print("connector with / without digests:", figures["connector_ratios"])
    if options.ttft:
        figures["ttft"] = ttft_ratios(options.rounds)
        console.print("TTFT with / without digests:", figures["ttft"])
        worst = max(row["ratio"] for row in figures["ttft"].values())
        goals.append(_goal("TTFT with / without digests", worst, "ratio", 1.03))
    if options.json is not None:
        document = {"figures": figures, "goals": goals}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _goal(name: str, value: float, unit: str, goal: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": value <= goal}


if __name__ == "__main__":
    main()
