"""The feed-forward parts of a model's layers: MLPs, shared and routed experts, counted from its `config.json`.

Classes of vLLM 0.32 are in `vllm/model_executor/models/FILE`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.core.kv.config_fields import ConfigError, ConfigFields


@dataclass(frozen=True, slots=True)
class Experts:
    """`layers` layers with `count` routed experts of `params` parameters each, `per_token` of which a token takes."""

    layers: int
    count: int
    per_token: int
    params: int

    def touched(self, tokens: float) -> float:
        """Experts of a layer that at least one of `tokens` tokens takes, if all are taken alike."""
        return self.count * (1 - math.pow(1 - self.per_token / self.count, tokens))


# Models with an MLP of intermediate_size beside the experts of each layer: vLLM's llama4.py `Llama4MoE`, gemma4.py
# `Gemma4DecoderLayer`.
_SHARED_OF_INTERMEDIATE_SIZE = ("llama4", "llama4_text", "gemma4", "gemma4_text")
# MLPs without a gate: apertus.py `ApertusMLP`; transformers' `Starcoder2MLP` and `PhiMLP`. Others have three matrices,
# but for those whose `mlp_hidden_act` is relu2 (nemotron_h.py `NemotronHMLP`).
_WITHOUT_GATE = ("apertus", "phi", "starcoder2")
# Experts that work in a smaller space, with one projection into it and one back: nemotron_h.py, Kimi K3.
_LATENT = ("moe_latent_size", "routed_expert_hidden_size")
_COUNT = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_SHARED_SIZE = (
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)


def with_usual_names(fields: ConfigFields) -> ConfigFields:
    """Fields of LongCat-Flash by the names that other families have; those of others as they are.

    Each of its layers has two attentions, two MLPs, and experts beside them: longcat_flash.py `FlashDecoderLayer`. That
    is two layers, the second with experts and an MLP beside them. Some of its experts compute nothing: a token takes so
    many fewer on average.
    """
    if not fields.given("expert_ffn_hidden_size"):
        return fields
    dense, count = fields.whole("ffn_hidden_size"), fields.whole("n_routed_experts")
    chosen = fields.whole("moe_topk") * count / (count + fields.count("zero_expert_num", 0))
    return fields.with_defaults(
        {
            "num_hidden_layers": 2 * fields.whole("num_layers"),
            "intermediate_size": dense,
            "moe_intermediate_size": fields.whole("expert_ffn_hidden_size"),
            "shared_expert_intermediate_size": dense,
            "decoder_sparse_step": 2,
            "num_experts_per_tok": max(round(chosen), 1),
        }
    )


def feed_forward(fields: ConfigFields) -> tuple[int, Experts | None]:
    """Parameters of all MLPs and shared experts, and the routed experts.

    Raises:
        ConfigError: a size is missing or wrong.
    """
    hidden = fields.whole("hidden_size")
    is_plain = (
        fields.fields.get("model_type") in _WITHOUT_GATE or fields.fields.get("mlp_hidden_act") == "relu2"
    )
    matrices = 2 if is_plain else 3
    count = _first(fields, _COUNT)
    kinds = _kinds(fields, count is not None)
    params = matrices * hidden * sum(_dense_sizes(fields, kinds))
    if count is None or "experts" not in kinds:
        return params, None
    per_token = _first(fields, _PER_TOKEN)
    if per_token is None:
        raise ConfigError(f"{_PER_TOKEN[0]} is missing; a mixture of experts needs it")
    size = (
        fields.whole("moe_intermediate_size") if fields.given("moe_intermediate_size") else _mlp_size(fields)
    )
    layers = kinds.count("experts")
    shared = _first(fields, _SHARED_SIZE)
    if shared is None and fields.fields.get("model_type") in _SHARED_OF_INTERMEDIATE_SIZE:
        shared = fields.whole("intermediate_size")
    if shared is None:
        shared = size * (_first(fields, ("n_shared_experts", "num_shared_experts")) or 0)
    params += layers * matrices * hidden * shared
    latent = _first(fields, _LATENT)
    if latent is not None:
        params += layers * 2 * hidden * latent
    return params, Experts(layers, count, min(per_token, count), matrices * (latent or hidden) * size)


def _dense_sizes(fields: ConfigFields, kinds: Sequence[str]) -> list[int]:
    """The inner size of each layer that has an MLP and no experts. Gemma 3n lists them: gemma3n.py `Gemma3nMLP`."""
    places = [place for place, kind in enumerate(kinds) if kind == "dense"]
    if isinstance(fields.fields.get("intermediate_size"), list):
        listed = fields.entries("intermediate_size", len(kinds)) or ()
        sizes = ConfigFields({f"intermediate_size[{place}]": listed[place] for place in places})
        return [sizes.whole(name) for name in sizes.fields]
    if not places:
        return []
    wide = (
        fields.whole("intermediate_size_mlp") if fields.given("intermediate_size_mlp") else _mlp_size(fields)
    )
    return [wide] * len(places)


def _mlp_size(fields: ConfigFields) -> int:
    """`intermediate_size`; that of LFM2 is first made smaller, as in lfm2.py `Lfm2MLP`."""
    if fields.fields.get("model_type") != "lfm2":
        return fields.whole("intermediate_size")
    size = fields.whole("block_ff_dim") if fields.given("block_ff_dim") else fields.whole("intermediate_size")
    if not fields.fields.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = fields.fields.get("block_ffn_dim_multiplier", 1.0)
    if isinstance(multiplier, int | float):
        size = int(multiplier * size)
    multiple = fields.whole("block_multiple_of", 256)
    return multiple * math.ceil(size / multiple)


def _first(fields: ConfigFields, names: tuple[str, ...]) -> int | None:
    """The first of these fields that holds a whole number above 0; None where none does."""
    for name in names:
        if fields.fields.get(name):
            return fields.whole(name)
    return None


def _kinds(fields: ConfigFields, mixture: bool) -> list[str]:
    """Of every layer: "dense", "experts", or "" where it has no feed-forward part."""
    layers = fields.layers
    pattern = fields.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [{"-": "dense", "E": "experts"}.get(letter, "") for letter in pattern]
    blocks = fields.entries("layers_block_type", None)
    if blocks is not None and {"mlp", "moe"} & set(map(str, blocks)):
        return [{"mlp": "dense", "moe": "experts"}.get(str(block), "") for block in blocks]
    if not mixture:
        return ["dense"] * layers
    numbered = fields.fields.get("moe_layers_enum")
    if isinstance(numbered, str):
        with_experts = {int(each) for each in numbered.split(",")}
        return ["experts" if layer in with_experts else "dense" for layer in range(layers)]
    listed = fields.fields.get("moe_layer_freq")
    if isinstance(listed, list):
        return ["experts" if entry else "dense" for entry in listed[:layers]]
    # LFM2 names the layers before the first with experts otherwise: lfm2_moe.py `Lfm2MoeAttentionDecoderLayer`.
    first = _first(fields, ("first_k_dense_replace", "num_dense_layers")) or 0
    step = fields.whole(
        "decoder_sparse_step",
        fields.whole("expert_layer_period", fields.whole("interleave_moe_layer_step", 1)),
    )
    # Jamba counts from expert_layer_offset, the others so that the last layer of a step has the experts.
    offset = fields.fields.get("expert_layer_offset", step - 1)
    plain = set(fields.fields.get("mlp_only_layers") or ())
    return [
        "experts" if layer >= first and layer not in plain and layer % step == offset % step else "dense"
        for layer in range(layers)
    ]
