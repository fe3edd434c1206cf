"""Deployments whose engines draft, and what these drafted.

Tiny models have a layer for it (MTP), as their families' checkpoints have it, or draft for themselves.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.tiny import tiny_config, tiny_model
from prfaas.serving.engines.tiny.weights import (
    WeightMaker,
    _attention,
    _gated_mlp,
    _qwen3_next_layer,
    tiny_weights,
)

from .shimmed import with_shims
from .stack import write_deployment


def write_checkpoint(directory: Path, name: str = "qwen3-next", modules: int = 1) -> Path:
    """The model's own files, with weights and a setting more; `modules`: for the tokens behind the next one."""
    from safetensors.torch import save_file

    folder = tiny_model(name, directory)
    config: dict[str, Any] = tiny_config(name) | {"num_nextn_predict_layers": modules}
    maker = WeightMaker(f"{name}-mtp")
    _LAYERS[name](maker, config)
    save_file(
        tiny_weights(name, config) | maker.tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _layer_of_qwen3_next(maker: WeightMaker, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]
    maker.matrix("mtp.fc.weight", hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        maker.vector(f"mtp.{name}.weight", hidden, 0.0)
    for layer in (f"mtp.layers.{module}." for module in range(config["num_nextn_predict_layers"])):
        for name in ("input_layernorm", "post_attention_layernorm"):
            maker.vector(f"{layer}{name}.weight", hidden, 0.0)
        _qwen3_next_layer(maker, layer, 0, config | {"layer_types": ["full_attention"]})


def _layer_of_mimo_v2(maker: WeightMaker, config: dict[str, Any]) -> None:
    hidden, layer = config["hidden_size"], "model.mtp.layers.0."
    for name in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
        maker.vector(f"{layer}{name}.weight", hidden, 1.0)
    maker.matrix(layer + "eh_proj.weight", hidden, 2 * hidden)
    heads, kv_heads = config["swa_num_attention_heads"], config["swa_num_key_value_heads"]
    _attention(
        *(maker, layer + "self_attn.", hidden, heads, kv_heads, config["swa_head_dim"]),
        qk_gain=math.sqrt(3.0),
        o_gain=1.5,
    )
    maker.vector(layer + "self_attn.attention_sink_bias", heads, 0.0, 1.0)
    _gated_mlp(maker, layer + "mlp.", hidden, config["intermediate_size"])


_LAYERS: Mapping[str, Callable[[WeightMaker, dict[str, Any]], None]] = {
    "qwen3-next": _layer_of_qwen3_next,
    "mimo-v2-flash": _layer_of_mimo_v2,
}


def write_drafting(
    directory: Path, *, model: str, prefill: int, decode: int, modules: int = 1, told: Path | None = None
) -> tuple[Path, dict[str, str]]:
    """One engine that prefills elsewhere and one that decodes, with so many drafts each, and their environment.

    The tiny Qwen3 drafts for itself, as a draft model; others have a layer for it. An engine that drafts takes no
    processors of logits (but with the model runner of GPUs), so only one that does not can be made to say what another
    has said.

    `modules`: of multi-token prediction, of the tiny Qwen3-Next alone.
    `told`: a folder for what they draft, see `ToldDrafts`.
    """
    # A model that drafts for itself keeps all of its KV twice.
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=16384)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["clusters"][1]["instances"].pop(0)
    plain_args, document["engine"]["extra_args"] = document["engine"]["extra_args"], []
    shims = ["with_drafts_told"] if told is not None else []
    env = {"TOLD_DRAFTS": str(told)}
    if model == "qwen3":
        document["model"]["tiny"] = model
        path.write_text(json.dumps(document))
        drafts = {"method": "draft_model", "model": str(load_deployment(path).model.folder)}
    else:
        document["model"] |= {"path": str(write_checkpoint(directory, model, modules))}
        del document["model"]["tiny"]
        drafts = {"method": "mtp"}
    if model == "qwen3-next":
        # Hybrids draft with kernels of Triton only.
        shims.append("with_triton")
    for cluster, count in zip(document["clusters"], (prefill, decode), strict=True):
        option = json.dumps(drafts | {"num_speculative_tokens": count})
        cluster["extra_args"] = ["--speculative-config", option] if count else plain_args
    path.write_text(json.dumps(document))
    return path, env | with_shims(*shims)


class ToldDrafts:
    """What engines with the shim `with_drafts_told` have drafted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> dict[tuple[int, ...], list[int]]:
        """Since the last call: behind which ids of an answer, and what."""
        found = {}
        for place in self._folder.glob("*.jsonl"):
            lines = place.read_text().splitlines()
            for line in lines[self._read.get(place, 0) :]:
                known, ids = json.loads(line)
                found[tuple(known)] = ids
            self._read[place] = len(lines)
        return found


def equal_drafts(
    one: Mapping[tuple[int, ...], list[int]], other: Mapping[tuple[int, ...], list[int]]
) -> list[bool]:
    """Of each token drafted behind the same ids by both, whether it is the same."""
    pairs = [(one[known], other[known]) for known in one.keys() & other.keys()]
    return [mine == its for ours, theirs in pairs for mine, its in zip(ours, theirs, strict=False)]
