"""Which kind of simulated deployment a scenario has."""

import numpy as np

from prfaas.lab.simulator.chunked_world import ChunkedWorld
from prfaas.lab.simulator.mixed_world import MixedWorld
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.slowed_world import SlowedWorld
from prfaas.lab.simulator.world import World


def world_of(scenario: Scenario, rng: np.random.Generator, block_tokens: int) -> World:
    """The empty world of a scenario; `rng` is for the links' capacities."""
    if scenario.slowdown is not None:
        return SlowedWorld(scenario, rng, block_tokens)
    if any(cluster.mixed_tokens for cluster in scenario.clusters):
        return MixedWorld(scenario, rng, block_tokens)
    if any(cluster.chunk_tokens for cluster in scenario.clusters):
        return ChunkedWorld(scenario, rng, block_tokens)
    return World(scenario, rng, block_tokens)
