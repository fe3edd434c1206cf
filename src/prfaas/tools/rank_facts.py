"""Whether engines that send each other KVCache divide it among as many ranks."""

from prfaas.core.deployment import Deployment
from prfaas.tools.finding import Finding, problem


def check_ranks(deployment: Deployment) -> list[Finding]:
    """What engines will refuse each other for, by the file alone; nothing where all are alike."""
    unlike = list(
        dict.fromkeys(
            tuple(sorted((instance, peer.instance), key=lambda each: each.name))
            for instance in deployment.instances
            for peer in deployment.peers_of(instance)
            if instance.tensor_parallel != peer.instance.tensor_parallel
        )
    )
    if not unlike:
        return []
    one, other = unlike[0]
    more = f" (and {len(unlike) - 1} more pairs)" if len(unlike) > 1 else ""
    return [
        problem(
            "ranks",
            f"{one.name} has tensor_parallel {one.tensor_parallel} and {other.name} {other.tensor_parallel}, so they "
            f"refuse each other's KVCache{more}",
            f"give them the same tensor_parallel in {deployment.path}; until then prompts are prefilled where they are "
            "decoded",
        )
    ]
