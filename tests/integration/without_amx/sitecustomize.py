"""Python runs this at its start in engines that have the folder on their path: vLLM then finds a CPU without AMX."""

import torch.cpu

torch.cpu._is_amx_tile_supported = lambda: False
