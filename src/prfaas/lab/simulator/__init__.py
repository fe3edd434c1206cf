"""Discrete events around the live policies: what a deployment would do with a stream of requests."""

from prfaas.lab.simulator.capacity import CapacityProcess, Constant
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import (
    Failure,
    Overheads,
    Scenario,
    ScenarioOptions,
    SimulatedLink,
    scenario_of,
)
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster
from prfaas.lab.simulator.simulation import simulate
from prfaas.lab.simulator.slowdown import Slowdown

__all__ = [
    "CacheOptions",
    "CapacityProcess",
    "Constant",
    "Failure",
    "Overheads",
    "PoolOptions",
    "Result",
    "Scenario",
    "ScenarioOptions",
    "SimulatedCluster",
    "SimulatedLink",
    "Slowdown",
    "scenario_of",
    "simulate",
]
