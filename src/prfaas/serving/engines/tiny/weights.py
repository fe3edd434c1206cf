"""Seeded weights of the tiny models, under the tensor names that checkpoints of their families use.

A plain small initialisation makes a model that repeats one token whatever it is asked. Here the gains are such that
the residual stream keeps its scale through the layers, attention looks at few tokens (so that a wrong KV byte far back
in the prompt changes the answer), linear states remember hundreds of tokens, and logits are well spread.
"""

import hashlib
import math
from typing import TYPE_CHECKING, Any

from prfaas.serving.engines.tiny.configs import PRINTABLE_IDS

if TYPE_CHECKING:
    import torch

_SEED = "prfaas tiny model 1"

# Standard deviation of the logits: top-1 and top-2 then differ by some nats as a rule, much more than bf16 rounding.
_LOGIT_STD = 5.0

# Standard deviation of the attention scores: of 16,000 keys a handful gets most of the weight.
_SCORE_STD = 3.0


class WeightMaker:
    """Collects named bf16 tensors; each is drawn from a generator seeded by its own name, so that order is free."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int) -> "torch.Tensor":
        """Standard normal numbers of `shape` in fp32, the same for the same name every time."""
        import torch

        digest = hashlib.blake2b(f"{_SEED}/{self._model_name}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, generator=generator)

    def put(self, name: str, tensor: "torch.Tensor") -> None:
        """Keeps `tensor` as it is, rounded to bf16."""
        import torch

        self.tensors[name] = tensor.to(torch.bfloat16).contiguous()

    def matrix(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        """(outputs, inputs): unit-variance input gives outputs of standard deviation `gain`."""
        self.put(name, self.normal(name, outputs, inputs) * (gain / math.sqrt(inputs)))

    def vector(self, name: str, size: int, mean: float = 0.0, std: float = 0.1) -> None:
        """(size,): one-dimensional weights and biases."""
        self.put(name, mean + std * self.normal(name, size))

    def stack(self, name: str, experts: int, inputs: int, outputs: int, gain: float = 1.0) -> None:
        """(experts, inputs, outputs): expert matrices that are kept input-major (gpt-oss)."""
        self.put(name, self.normal(name, experts, inputs, outputs) * (gain / math.sqrt(inputs)))

    def head(self, name: str, vocab_size: int, inputs: int) -> None:
        """(vocab_size, inputs): rows of all but printable tokens are zero, their logit 0 is never the greatest."""
        import torch

        rows = torch.zeros(vocab_size, inputs)
        ids = list(PRINTABLE_IDS)
        rows[ids] = self.normal(name, len(ids), inputs) * (_LOGIT_STD / math.sqrt(inputs))
        self.put(name, rows)


def tiny_weights(name: str, config: dict[str, Any]) -> dict[str, "torch.Tensor"]:
    """All tensors of the checkpoint of tiny model `name` with `config` (its `config.json`), bf16."""
    maker = WeightMaker(name)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Only Qwen3-Next's norms multiply by 1 + weight.
    unit = 0.0 if config["model_type"] == "qwen3_next" else 1.0
    maker.put("model.embed_tokens.weight", maker.normal("model.embed_tokens.weight", vocab, hidden))
    maker.vector("model.norm.weight", hidden, unit)
    maker.head("lm_head.weight", vocab, hidden)
    add_layer = {
        "qwen3_next": _qwen3_next_layer,
        "gpt_oss": _gpt_oss_layer,
        "mimo_v2_flash": _mimo_v2_flash_layer,
        "qwen3": _qwen3_layer,
    }[config["model_type"]]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        maker.vector(prefix + "input_layernorm.weight", hidden, unit)
        maker.vector(prefix + "post_attention_layernorm.weight", hidden, unit)
        add_layer(maker, prefix, index, config)
    return maker.tensors


def _qwen3_next_layer(maker: WeightMaker, prefix: str, index: int, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]
    if config["layer_types"][index] == "full_attention":
        # q_proj carries the output gate of each head beside its query.
        _attention(
            maker,
            prefix + "self_attn.",
            hidden,
            config["num_attention_heads"] * 2,
            config["num_key_value_heads"],
            config["head_dim"],
            o_heads=config["num_attention_heads"],
            o_gain=2.0,
        )
        _query_key_norms(maker, prefix + "self_attn.", config["head_dim"], unit=0.0)
    else:
        _gated_delta_net(maker, prefix + "linear_attn.", config)
    mlp = prefix + "mlp."
    maker.matrix(mlp + "gate.weight", config["num_experts"], hidden, 2.0)
    for expert in range(config["num_experts"]):
        _gated_mlp(maker, f"{mlp}experts.{expert}.", hidden, config["moe_intermediate_size"])
    _gated_mlp(maker, mlp + "shared_expert.", hidden, config["shared_expert_intermediate_size"])
    maker.matrix(mlp + "shared_expert_gate.weight", 1, hidden)


def _gated_delta_net(maker: WeightMaker, prefix: str, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = key_heads * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    kernel = config["linear_conv_kernel_dim"]
    maker.matrix(prefix + "in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
    maker.matrix(prefix + "in_proj_ba.weight", 2 * value_heads, hidden)
    maker.put(
        prefix + "conv1d.weight",
        maker.normal(prefix + "conv1d.weight", 2 * keys + values, 1, kernel) / math.sqrt(kernel),
    )
    # Decay per token is exp(-exp(A_log) * softplus(a + dt_bias)): about 0.5 % to 2 % of the state is forgotten.
    maker.vector(prefix + "A_log", value_heads, 0.0, 0.3)
    maker.vector(prefix + "dt_bias", value_heads, -5.0, 0.7)
    maker.vector(prefix + "norm.weight", config["linear_value_head_dim"], 1.0)
    maker.matrix(prefix + "out_proj.weight", hidden, values, 1.5)


def _gpt_oss_layer(maker: WeightMaker, prefix: str, _index: int, config: dict[str, Any]) -> None:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    attention = prefix + "self_attn."
    yarn_scale = 1.0 + 0.1 * math.log(config["rope_parameters"]["factor"])
    _attention(maker, attention, hidden, heads, kv_heads, head, qk_gain=math.sqrt(_SCORE_STD) / yarn_scale)
    for projection, size in (
        ("q", heads * head),
        ("k", kv_heads * head),
        ("v", kv_heads * head),
        ("o", hidden),
    ):
        maker.vector(f"{attention}{projection}_proj.bias", size)
    maker.vector(attention + "sinks", heads, 0.0, 1.0)
    mlp = prefix + "mlp."
    maker.matrix(mlp + "router.weight", experts, hidden, 2.0)
    maker.vector(mlp + "router.bias", experts)
    maker.stack(mlp + "experts.gate_up_proj", experts, hidden, 2 * inner)
    maker.put(mlp + "experts.gate_up_proj_bias", 0.1 * maker.normal(mlp + "gate_up_bias", experts, 2 * inner))
    maker.stack(mlp + "experts.down_proj", experts, inner, hidden)
    maker.put(mlp + "experts.down_proj_bias", 0.1 * maker.normal(mlp + "down_bias", experts, hidden))


def _mimo_v2_flash_layer(maker: WeightMaker, prefix: str, index: int, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]
    kind = "swa_" if config["hybrid_layer_pattern"][index] else ""
    heads = config[kind + "num_attention_heads"]
    _attention(
        maker,
        prefix + "self_attn.",
        hidden,
        heads,
        config[kind + "num_key_value_heads"],
        config[kind + "head_dim"],
        qk_gain=math.sqrt(_SCORE_STD),
        o_gain=1.5,
    )
    if kind:
        maker.vector(prefix + "self_attn.attention_sink_bias", heads, 0.0, 1.0)
    mlp = prefix + "mlp."
    if not config["moe_layer_freq"][index]:
        _gated_mlp(maker, mlp, hidden, config["intermediate_size"])
        return
    maker.matrix(mlp + "gate.weight", config["n_routed_experts"], hidden, 2.0)
    maker.vector(mlp + "gate.e_score_correction_bias", config["n_routed_experts"], 0.0, 0.05)
    for expert in range(config["n_routed_experts"]):
        _gated_mlp(maker, f"{mlp}experts.{expert}.", hidden, config["moe_intermediate_size"])


def _qwen3_layer(maker: WeightMaker, prefix: str, _index: int, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]
    _attention(
        maker,
        prefix + "self_attn.",
        hidden,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    _query_key_norms(maker, prefix + "self_attn.", config["head_dim"], unit=1.0)
    _gated_mlp(maker, prefix + "mlp.", hidden, config["intermediate_size"])


def _attention(
    maker: WeightMaker,
    prefix: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head: int,
    *,
    o_heads: int | None = None,
    qk_gain: float = 1.0,
    o_gain: float = 1.0,
) -> None:
    maker.matrix(prefix + "q_proj.weight", heads * head, hidden, qk_gain)
    maker.matrix(prefix + "k_proj.weight", kv_heads * head, hidden, qk_gain)
    maker.matrix(prefix + "v_proj.weight", kv_heads * head, hidden)
    maker.matrix(prefix + "o_proj.weight", hidden, (o_heads or heads) * head, o_gain)


def _query_key_norms(maker: WeightMaker, prefix: str, head: int, unit: float) -> None:
    # Normed queries and keys have unit elements, so their scaled product has the product of the two weights.
    excess = math.sqrt(_SCORE_STD) - 1.0
    maker.vector(prefix + "q_norm.weight", head, unit + excess)
    maker.vector(prefix + "k_norm.weight", head, unit + excess)


def _gated_mlp(maker: WeightMaker, prefix: str, hidden: int, inner: int) -> None:
    maker.matrix(prefix + "gate_proj.weight", inner, hidden, 1.5)
    maker.matrix(prefix + "up_proj.weight", inner, hidden)
    maker.matrix(prefix + "down_proj.weight", hidden, inner, 1.5)
