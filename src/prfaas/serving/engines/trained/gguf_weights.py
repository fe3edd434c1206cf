"""Weights of a GGUF file as a checkpoint of Hugging Face has them: names, order of rows, and bfloat16.

Which tensor is which: `gguf/constants.py` of llama.cpp, MODEL_TENSORS, and the models' classes in transformers. Where
values differ is from the same project's `convert_hf_to_gguf.py`. transformers reads such files too, but needs the
package accelerate for it, and makes the model with all of its layers on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """What is special in the files of an architecture."""

    layer: Mapping[str, str]
    """Names within a layer, by GGUF's."""
    pairs_rotary: tuple[str, ...] = ()
    """Projections whose rows stand so that the two halves of a rotation are neighbours."""
    norm_offset: float = 0.0
    """What GGUF adds to the weights of norms."""


_FAMILIES = {
    "llama": _Family({**_LAYER, "ffn_norm": "post_attention_layernorm"}, pairs_rotary=("attn_q", "attn_k")),
    "gemma3": _Family(
        {
            **_LAYER,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}


def gguf_weights(reader: "GGUFReader") -> "dict[str, torch.Tensor]":
    """Every tensor in bfloat16, by its name in a checkpoint.

    Raises:
        ValueError: the file is of another architecture, or has a tensor that this one has not.
    """
    import torch

    architecture = str(reader.fields["general.architecture"].contents())
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ValueError(f"a GGUF file of {architecture}; known are {', '.join(_FAMILIES)}")
    count = reader.fields[f"{architecture}.attention.head_count"].contents()
    kv_count = reader.fields[f"{architecture}.attention.head_count_kv"].contents()
    heads = {"attn_q": int(count), "attn_k": int(kv_count)}
    weights = {}
    for tensor in reader.tensors:
        inner, name = _names(tensor.name, family)
        values = _values(tensor)
        if inner in family.pairs_rotary:
            # Rows (head, i, half) become (head, half, i).
            rows, columns = values.shape
            split = values.reshape(heads[inner], rows // heads[inner] // 2, 2, columns)
            values = split.transpose(1, 2).reshape(rows, columns)
        if family.norm_offset and name.endswith("norm"):
            values = values - family.norm_offset
        weights[f"{name}.weight"] = values.to(torch.bfloat16).contiguous()
    return weights


def _names(gguf_name: str, family: _Family) -> tuple[str, str]:
    """A tensor's name within its layer, and the whole one of the checkpoint, without ".weight"."""
    name = gguf_name.removesuffix(".weight")
    try:
        if not name.startswith("blk."):
            return name, _OUTER[name]
        _, layer, inner = name.split(".", 2)
        return inner, f"model.layers.{int(layer)}.{family.layer[inner]}"
    except (KeyError, ValueError):
        raise ValueError(
            f"a GGUF file with the tensor {gguf_name}, which this architecture has not"
        ) from None


def _values(tensor: "ReaderTensor") -> "torch.Tensor":
    """In float32, in the shape that torch has it."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    # Writable: torch warns of what is not, and tensors that aren't quantized are a view of the file.
    values = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W"])
    return torch.from_numpy(values)
