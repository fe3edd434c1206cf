"""Python runs this at its start in engines that have the folder on their path: Kimi Linear on a GPU without CUTLASS.

Its Triton kernels are NVIDIA's, compiled.
"""

from changing import change_modules, run_next
from kimi_classes import MODULE, rocms_classes

# Workers are started otherwise than engines: every Python is changed, which costs nothing until vLLM comes.
change_modules({MODULE: rocms_classes}, instead=[MODULE])
run_next(__file__)
