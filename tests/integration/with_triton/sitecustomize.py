"""Python runs this at its start in engines that have the folder on their path: vLLM then has Triton, interpreted.

Triton's wheel has no backend for CPUs, so vLLM would do without it. With it vLLM takes the model runner that it takes
on GPUs, and the kernels that hybrids need to draft. They run in numpy.
"""

from changing import interpret_triton, is_engine, run_next

if is_engine():
    interpret_triton()
    run_next(__file__)
