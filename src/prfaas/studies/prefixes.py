"""Traffic that differs in nothing but how much of its prompts is shared."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prfaas.kvmodel import KvModel
from prfaas.simulator import CacheOptions
from prfaas.workload.traffic import IndependentTraffic, RequestChunk, Traffic


@dataclass(frozen=True, slots=True)
class SharedPrefixes(Traffic):
    """`base` where every prompt's first `share`, in whole blocks, is the beginning of one of `documents` texts.

    Document k = 1, 2, … is asked about in proportion to 1 / k (Zipf's law). Arrivals, lengths and documents are the
    same for every share.
    """

    base: IndependentTraffic
    share: float
    documents: int

    @property
    def mean_per_s(self) -> float:
        return self.base.mean_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """See `Traffic.chunks`; without end."""
        of_requests, of_documents = rng.spawn(2)
        weights = 1 / np.arange(1, self.documents + 1)
        # Room for the longest prompt in every document; what nobody shares comes after them all.
        room = -(-int(self.base.inputs.high) // self.base.block_tokens) + 1
        for chunk in self.base.chunks(of_requests):
            document = of_documents.choice(self.documents, size=len(chunk), p=weights / weights.sum())
            counts = np.diff(chunk.block_starts)
            places = np.arange(len(chunk.block_ids)) - np.repeat(chunk.block_starts[:-1], counts)
            shared = (self.share * chunk.input_tokens).astype(np.int64) // chunk.block_tokens
            own = chunk.block_ids + self.documents * room
            ids = np.where(
                places < np.repeat(shared, counts), np.repeat(document * room, counts) + places, own
            )
            yield RequestChunk(
                chunk.arrival_s,
                chunk.input_tokens,
                chunk.output_tokens,
                ids,
                chunk.block_starts,
                chunk.block_tokens,
            )


def cache_of(model: KvModel, num_bytes: int) -> CacheOptions | None:
    """A prefix cache of so many bytes on every instance; None for 0, and for models without KV that grows."""
    return CacheOptions.of_memory(model, num_bytes) if model.token_bytes and num_bytes else None
