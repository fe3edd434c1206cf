"""Discrete events around the live policies: what a deployment would do with a stream of requests."""

from prfaas.simulator.capacity import CapacityProcess, Constant
from prfaas.simulator.result import Result
from prfaas.simulator.scenario import (
    CacheOptions,
    Failure,
    Overheads,
    Scenario,
    SimulatedCluster,
    SimulatedLink,
    scenario_of,
)
from prfaas.simulator.simulation import simulate

__all__ = [
    "CacheOptions",
    "CapacityProcess",
    "Constant",
    "Failure",
    "Overheads",
    "Result",
    "Scenario",
    "SimulatedCluster",
    "SimulatedLink",
    "scenario_of",
    "simulate",
]
