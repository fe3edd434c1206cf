"""Checks that engines which exchange KVCache can divide its heads among their ranks."""

from prfaas.core.deployment import Deployment
from prfaas.core.deployment.peers import peers_of
from prfaas.tools.finding import Finding, problem


def check_ranks(deployment: Deployment) -> list[Finding]:
    """Engines that can't send each other anything, by the file alone; nothing where one size divides the other."""
    unlike = list(
        dict.fromkeys(
            tuple(sorted((instance, peer.member), key=lambda each: each.name))
            for instance in deployment.instances
            for peer in peers_of(deployment, instance)
            if not instance.rank_grid.paired(0, peer.member.rank_grid)
        )
    )
    if not unlike:
        return []
    one, other = unlike[0]
    more = f" (and {len(unlike) - 1} more pairs)" if len(unlike) > 1 else ""
    return [
        problem(
            "ranks",
            f"{one.name} has tensor_parallel {one.tensor_parallel} and {other.name} {other.tensor_parallel}: neither "
            f"divides the other, so no rank can map the other's KVCache{more}",
            f"give them sizes in {deployment.path} of which one divides the other; until then prompts are prefilled "
            "where they are decoded",
        )
    ]
