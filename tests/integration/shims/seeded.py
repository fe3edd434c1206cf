"""`--load-format seeded`: weights that are the same in every engine, by the names of parameters alone."""

import math
import zlib
from typing import Any


def seeded_weights(module: Any) -> None:
    """Change `vllm.model_executor.model_loader`."""
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @module.register_model_loader("seeded")
    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if not torch.is_floating_point(parameter):
                    # Which experts a token goes to.
                    count = torch.arange(parameter.numel()).view(parameter.shape)
                    parameter.data.copy_(count % model_config.hf_config.n_routed_experts)
                    continue
                seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                drawn = torch.randn(parameter.shape, generator=seed)
                if name.endswith("dt_bias"):
                    # So that what a token wrote is in a state hundreds of tokens later.
                    drawn = 0.7 * drawn - 5
                elif parameter.dim() == 1:
                    drawn = 1 + 0.1 * drawn if "norm" in name else 0.5 * drawn
                elif "embed" not in name:
                    drawn *= 1.5 / math.sqrt(parameter.shape[-1])
                parameter.data.copy_(drawn.to(parameter.dtype))
