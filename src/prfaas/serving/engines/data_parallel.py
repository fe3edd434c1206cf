"""How vLLM is told that an engine is a rank of a data-parallel group.

Its external load balancing: every rank is a server of its own, and the gateway balances. Rank 0 starts a coordinator,
which keeps all in step.
"""

from collections.abc import Collection

from prfaas.core.deployment import Deployment, EventsEndpoint, Instance
from prfaas.core.deployment.addresses import RANK_ENDING
from prfaas.serving.certificates import identity_of
from prfaas.serving.engines.engine_server import ask


def rank_of(deployment: Deployment, instance: Instance) -> int:
    """Its number in its group; 0 where it is in none."""
    return deployment.ranks_with(instance).index(instance)


def rank_options(deployment: Deployment, instance: Instance) -> tuple[str, ...]:
    """Options of `vllm serve` about the group and the experts."""
    experts = ("--enable-expert-parallel",) if instance.expert_parallel else ()
    if instance.data_parallel is None:
        return experts
    ranks = deployment.ranks_with(instance)
    return (
        *("--data-parallel-size", str(len(ranks)), "--data-parallel-rank", str(ranks.index(instance))),
        *("--data-parallel-address", ranks[0].host, "--data-parallel-rpc-port", str(ranks[0].meeting_port)),
        *experts,
    )


def given_endpoint(endpoint: EventsEndpoint, rank: int) -> EventsEndpoint:
    """What a rank is to bind, as vLLM must be given it so that it binds that."""
    ending = f"{RANK_ENDING}{rank}"
    return EventsEndpoint(endpoint.publish.removesuffix(ending), endpoint.replay.removesuffix(ending))


def end_group_before(deployment: Deployment, instance: Instance, *, started: Collection[str]) -> None:
    """Have ranks end that still run in a group which had `instance` in it, and lost it.

    A rank's server answers only once its group is whole, so one that answers while `instance` starts is of a former
    group. An idle one does not know that: its next step fails, vLLM ends, and what supervises it starts it again.

    Args:
        deployment: whose engines they are.
        instance: it is about to start.
        started: names of all that are started now.
    """
    others = [rank for rank in deployment.ranks_with(instance) if rank.name not in started]
    if not others:
        return
    tls = identity_of(deployment, instance.name)
    request = {"model": deployment.model.served_name, "prompt": [0], "max_tokens": 1}
    for rank in others:
        if ask(rank, "GET", "/health", tls=tls) is not None:
            ask(rank, "POST", "/v1/completions", tls=tls, content=request)
