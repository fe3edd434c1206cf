"""Requests that have nothing to do with each other."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prfaas.workload.lengths import LengthDistribution
from prfaas.workload.requests import BLOCK_TOKENS
from prfaas.workload.traffic.arrivals import Arrivals
from prfaas.workload.traffic.chunk import RequestChunk, starts_of
from prfaas.workload.traffic.sampling import LengthSampler
from prfaas.workload.traffic.traffic import Traffic


@dataclass(frozen=True, slots=True)
class IndependentTraffic(Traffic):
    """Arrivals of a process, each with a prompt and an answer of random length; no two prompts begin alike."""

    arrivals: Arrivals
    inputs: LengthDistribution
    outputs: LengthDistribution
    block_tokens: int = BLOCK_TOKENS

    @property
    def mean_per_s(self) -> float:
        return self.arrivals.mean_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        of_times, of_inputs, of_outputs = rng.spawn(3)
        inputs, outputs = LengthSampler.of(self.inputs), LengthSampler.of(self.outputs)
        next_id = 0
        for arrival_s in self.arrivals.chunks(of_times):
            prompts = inputs.draw(of_inputs, len(arrival_s))
            starts = starts_of(-(-prompts // self.block_tokens))
            ids = np.arange(next_id, next_id + starts[-1])
            next_id += int(starts[-1])
            answers = outputs.draw(of_outputs, len(arrival_s))
            yield RequestChunk(arrival_s, prompts, answers, ids, starts, self.block_tokens)
