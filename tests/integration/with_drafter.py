"""The tiny Qwen3-Next with a layer that drafts for it (MTP), as its family's checkpoints have it."""

import json
from pathlib import Path
from typing import Any

from prfaas.serving.engines.tiny import tiny_config, tiny_model
from prfaas.serving.engines.tiny.weights import WeightMaker, _qwen3_next_layer, tiny_weights

_NAME = "qwen3-next"


def write_checkpoint(directory: Path) -> Path:
    """The model's own files, with weights and a setting more."""
    from safetensors.torch import save_file

    folder = tiny_model(_NAME, directory)
    config: dict[str, Any] = tiny_config(_NAME)
    hidden = config["hidden_size"]
    maker = WeightMaker("qwen3-next-mtp")
    maker.matrix("mtp.fc.weight", hidden, 2 * hidden)
    layer = "mtp.layers.0."
    norms = ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    for name in (*norms, layer + "input_layernorm", layer + "post_attention_layernorm"):
        maker.vector(f"{name}.weight", hidden, 0.0)
    _qwen3_next_layer(maker, layer, 0, config | {"layer_types": ["full_attention"]})
    save_file(
        tiny_weights(_NAME, config) | maker.tensors,
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder
