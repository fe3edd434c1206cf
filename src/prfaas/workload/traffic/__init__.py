"""Streams of whole requests: when they come, how long they are, and which prompts begin alike.

Everything is drawn from numpy Generators that are passed in, in arrays of thousands, so that a simulator takes
millions of requests quickly. Unlike its parent package, this one imports numpy.
"""

from prfaas.workload.traffic.arrivals import Arrivals, Poisson
from prfaas.workload.traffic.chunk import RequestChunk, take
from prfaas.workload.traffic.diurnal import Diurnal
from prfaas.workload.traffic.independent import IndependentTraffic
from prfaas.workload.traffic.mmpp import Mmpp, Phase
from prfaas.workload.traffic.replayed import ReplayedTraffic
from prfaas.workload.traffic.sessions import SessionTraffic
from prfaas.workload.traffic.token_ids import prompt_ids
from prfaas.workload.traffic.traffic import Traffic

__all__ = [
    "Arrivals",
    "Diurnal",
    "IndependentTraffic",
    "Mmpp",
    "Phase",
    "Poisson",
    "ReplayedTraffic",
    "RequestChunk",
    "SessionTraffic",
    "Traffic",
    "prompt_ids",
    "take",
]
