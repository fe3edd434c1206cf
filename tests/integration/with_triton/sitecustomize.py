"""Python runs this at its start in engines that have the folder on their path: vLLM then has Triton, interpreted.

Triton's wheel has no backend for CPUs, so vLLM would do without it. With it vLLM takes the model runner that it takes
on GPUs, and the kernels that hybrids need to draft. They run in numpy.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

# Not in helpers of such a process: they have nothing to import.
if "-m" in sys.orig_argv:
    from triton import backends

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Driver)  # type: ignore[arg-type]
