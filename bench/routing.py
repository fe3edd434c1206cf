"""Time of one routing decision: the paper's 12 instances, and 64 in eight clusters.

    python bench/routing.py [--json FILE] [--repeat N]

The aim: at most 150 µs over 64 instances for every policy: little beside the 600 µs that a gateway
has for a request. Exit code 1 if it is missed. CPU time, the median of the repeats.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.core.latency.files import load_profile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.scheduling.decision import KvFacts, PoolHit, PrefixHit, RoutingRequest
from prfaas.core.scheduling.policy import POLICIES, Policy, policy_named
from prfaas.core.scheduling.tiers import with_pools
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, PoolView, View

H200, H20 = (ServiceCurve.of_profile(load_profile(f"internal-1t-{name}")).seconds for name in ("h200", "h20"))
GBIT = 1e9
CALLS = 500
GOAL_MICROSECONDS = 150.0


@dataclass(frozen=True)
class Row:
    policy: str
    board: str
    microseconds: float
    goal_microseconds: float | None


def board(prfaas: int, prefill: int, decode: int, clusters: int) -> View:
    """`clusters` of each kind, all linked, with some work under way everywhere."""
    draw = random.Random(1)
    view = View({}, {}, KvFacts(True, True, kv_bytes, kv_bytes), 5.0, now_s=100.0)
    for number in range(clusters):
        far, home = f"far-{number}", f"home-{number}"
        prefillers = [InstanceView(f"{far}-{i}", far, True, False) for i in range(prfaas)]
        view.clusters[far] = ClusterView(far, "prfaas", prefillers, H200)
        both = [InstanceView(f"{home}-{i}", home, i < prefill, i >= prefill) for i in range(prefill + decode)]
        view.clusters[home] = ClusterView(home, "pd", both, H20)
        view.threshold_tokens[home] = 19_400
        for each in [*prefillers, *both]:
            each.busy_until_s = view.now_s + draw.uniform(-1, 3)
            each.decoding, each.decode_slots = draw.randrange(16), 20
    for source in view.clusters:
        for target in view.clusters:
            if source != target:
                view.links[source, target] = LinkView(source, target, 100 * GBIT, 10 * GBIT, seen_s=99.5)
    return view


def kv_bytes(num_tokens: int, skip_tokens: int) -> int:
    """The paper's 1T model (Table 5)."""
    return 182_353_658 + 17_280 * (num_tokens - skip_tokens)


def conversation(view: View) -> RoutingRequest:
    """A prefix that every instance holds, and turns of the conversation at a prefill and a decode instance of two PD
    clusters and at an instance of a PrfaaS cluster."""
    held = {
        each.name: PrefixHit(1024, 1280) for cluster in view.clusters.values() for each in cluster.instances
    }
    held |= {"home-1-1": PrefixHit(16_384, 16_640), "home-1-4": PrefixHit(16_384, 24_064)}
    held |= {
        "home-2-0": PrefixHit(24_576, 24_832),
        "home-2-6": PrefixHit(0, 26_368),
        "far-3-2": PrefixHit(20_480, 20_736),
    }
    return RoutingRequest(50_000, held)


def pooled(view: View) -> tuple[View, dict[str, PoolHit]]:
    """The board with a pool for every two instances, and what a quarter of them holds of a conversation."""
    pools, hits = {}, {}
    for cluster in view.clusters.values():
        for first in range(0, len(cluster.instances), 2):
            together = tuple(each.name for each in cluster.instances[first : first + 2])
            pools[together[0] + "-pool"] = PoolView(together[0] + "-pool", cluster.name, together)
    for number, name in enumerate(pools):
        if number % 4 == 0:
            tokens = 16_384 + 1024 * number
            hits[name] = PoolHit(PrefixHit(tokens, tokens), PrefixHit(8192, 8192))
    return replace(view, pools=pools), hits


def measure(policy: Policy, request: RoutingRequest, view: View, repeat: int) -> float:
    """Microseconds of one decision."""

    def calls() -> None:
        for _ in range(CALLS):
            policy.decide(request, view)

    return statistics.median(timed(calls) for _ in range(repeat)) / CALLS * 1e6


def timed(call: Callable[[], None]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--repeat", type=int, default=40, help="take the median of this many runs")
    options = parser.parse_args()
    paper, large = board(4, 3, 5, 1), board(8, 3, 5, 4)
    with_pool, hits = pooled(large)
    own = conversation(large).held

    def merge() -> None:
        for _ in range(CALLS):
            with_pools(50_000, own, hits, with_pool)

    cases = [
        ("12 instances, 8K prompt", paper, RoutingRequest(8_000), None),
        ("12 instances, 50K prompt", paper, RoutingRequest(50_000), None),
        ("64 instances, 50K prompt", large, RoutingRequest(50_000), GOAL_MICROSECONDS),
        ("64 instances, 50K prompt, cached", large, conversation(large), GOAL_MICROSECONDS),
        ("64, cached, pools", with_pool, with_pools(50_000, own, hits, with_pool), None),
    ]
    rows = []
    merging = statistics.median(timed(merge) for _ in range(options.repeat)) / CALLS * 1e6
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in progress.track(POLICIES):
            params = {"threshold_tokens": 19_400} if name == "static_threshold" else {}
            policy = policy_named(name, **params)
            for label, view, request, goal in cases:
                rows.append(Row(name, label, measure(policy, request, view, options.repeat), goal))
    table = Table("policy", *(label for label, *_ in cases), title="µs per decision")
    for name in POLICIES:
        table.add_row(name, *(f"{row.microseconds:.1f}" for row in rows if row.policy == name))
    Console(width=150).print(table)
    Console().print(
        f"{merging:.0f} µs to add what {len(hits)} of {len(with_pool.pools)} pools hold to a request"
    )
    if options.json is not None:
        document = {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(row.goal_microseconds and row.microseconds > row.goal_microseconds for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
