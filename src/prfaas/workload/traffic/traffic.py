"""What every source of whole requests can do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from prfaas.workload.traffic.chunk import RequestChunk


class Traffic(ABC):
    """A source of requests."""

    __slots__ = ()

    @property
    @abstractmethod
    def mean_per_s(self) -> float:
        """Requests per second in the long run."""

    @abstractmethod
    def chunks(self, rng: np.random.Generator) -> Iterator[RequestChunk]:
        """The requests in the order of arrival, within and across chunks. No chunk is empty."""
