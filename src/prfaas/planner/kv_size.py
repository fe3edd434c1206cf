"""S_kv of a model for lengths that aren't whole numbers, such as means."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prfaas.kvmodel import KvModel, SlidingWindow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

_FAR = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class KvSize:
    """Bytes of a request's KVCache for arrays of tokens.

    A model's size is a straight line but where a window is full, so it is interpolated between these lengths exactly.
    """

    model: KvModel
    _tokens: "FloatArray" = field(init=False, repr=False)
    _bytes: "FloatArray" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import numpy as np

        windows = [group for group in self.model.groups if isinstance(group, SlidingWindow)]
        knots = {1, _FAR, *(group.window_tokens for group in windows)}
        tokens = sorted(knots)
        object.__setattr__(self, "_tokens", np.array(tokens, dtype=np.float64))
        sizes = [self.model.kv_bytes(count) for count in tokens]
        object.__setattr__(self, "_bytes", np.array(sizes, dtype=np.float64))

    def __call__(self, tokens: "FloatArray") -> "FloatArray":
        """Bytes at `tokens` (1 to 16 million; below 1 it counts as 1)."""
        import numpy as np

        return np.interp(tokens, self._tokens, self._bytes)
