"""NumPy, loaded when it is first used: what starts without an array starts in half the time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["FloatArray", "Int32Array", "IntArray", "NDArray", "OfLength", "np"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    IntArray = NDArray[np.int64]
    Int32Array = NDArray[np.int32]
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            # Found without this call from now on.
            setattr(self, name, value)
            return value

    np = _Numpy()
    NDArray = FloatArray = IntArray = Int32Array = Any

OfLength = Callable[[FloatArray], FloatArray]
"""Seconds or bytes for arrays of tokens, of the same shape."""
