"""The tiny Qwen3-Next of `trained: words`, in the plain torch that trains it.

It computes what Hugging Face's Qwen3NextForCausalLM does (`train.py check` compares the two), several times as fast on
CPUs: all experts in one matrix product, layers that can be compiled, products in bf16.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from prfaas.serving.engines.tiny.checkpoint import write_tokenizer_config
from prfaas.serving.engines.tiny.configs import SPECIAL_TOKENS, tiny_config

VOCAB_SIZE = 3072
HIDDEN = 160
PAD_ID, BEGIN_ID, END_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))

# Tokens of a chunk of the delta rule.
CHUNK_TOKENS = 64


def words_config() -> dict[str, Any]:
    """The `config.json`: the tiny Qwen3-Next's kinds of layers and heads, somewhat wider and with words as tokens."""
    return {
        **tiny_config("qwen3-next"),
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
    }


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x` (..., inputs) times `weight` (outputs, inputs), in bf16 unless `x` asks for more with fp64."""
    kind = x.dtype if x.dtype == torch.float64 else torch.bfloat16
    return functional.linear(x.to(kind), weight.to(kind))


class Norm(nn.Module):
    """RMS norm whose weight is what it adds to 1, as Qwen3-Next has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        return normed


def matrix(outputs: int, inputs: int, gain: float = 1.0) -> nn.Linear:
    """A layer without bias whose outputs have the standard deviation `gain` for inputs of 1."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """What the states of a gated delta net answer: shape (batch, heads, tokens, value size).

    `q`, `k`, `v`: (batch, heads, tokens, size), keys of length 1; `log_decay`, `beta`: (batch, heads, tokens). Within a
    chunk the updates are one triangular system (Yang et al., 2024, "Gated Delta Networks"); a state links chunks.
    """
    batch, heads, tokens, size = v.shape
    q, k, v = (torch.unflatten(x, 2, (-1, CHUNK_TOKENS)) for x in (q, k, v))
    log_decay, beta = (torch.unflatten(x, 2, (-1, CHUNK_TOKENS)) for x in (log_decay, beta))
    total = log_decay.cumsum(-1)
    visible = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~visible, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * between
    wanted = torch.cat([v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, reads = torch.split(solved, [size, k.shape[-1]], -1)
    within = (q @ k.mT) * between
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, k.shape[-1], size, dtype=v.dtype)
    answers = []
    for i in range(tokens // CHUNK_TOKENS):
        new = values[:, :, i] - reads[:, :, i] @ state
        answers.append(q[:, :, i] @ state + within[:, :, i] @ new)
        state = state * kept[:, :, i] + k[:, :, i].mT @ new
    return torch.cat(answers, 2)


class Scale(nn.Module):
    """The weight of a norm that the delta net computes itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class DeltaNet(nn.Module):
    """Gated delta net: states of a fixed size in place of keys and values of every token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.k_heads, self.v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.size = config["linear_key_head_dim"]
        keys, values = self.k_heads * self.size, self.v_heads * self.size
        self.in_proj_qkvz = matrix(2 * keys + 2 * values, HIDDEN)
        self.in_proj_ba = matrix(2 * self.v_heads, HIDDEN, gain=0.3)
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, 4, groups=2 * keys + values, bias=False)
        # States that forget over tens to a thousand tokens, as in Mamba; Hugging Face's own start forgets in one.
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(1, 16).log())
        steps = torch.exp(torch.empty(self.v_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = Scale(self.size)
        self.out_proj = matrix(HIDDEN, values, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        each = self.v_heads // self.k_heads
        grouped = torch.unflatten(product(x, self.in_proj_qkvz.weight), -1, (self.k_heads, -1))
        parts = torch.split(grouped, [self.size, self.size, each * self.size, each * self.size], -1)
        mixed = torch.cat([part.flatten(2) for part in parts[:3]], -1).to(x.dtype)
        late = functional.pad(mixed, (0, 0, 3, 0))
        taps = self.conv1d.weight[:, 0]
        mixed = functional.silu(
            sum((late[:, i : i + tokens] * taps[:, i] for i in range(4)), start=torch.zeros(()))
        )
        keys = self.k_heads * self.size
        q, k, v = (
            torch.unflatten(part, -1, (-1, self.size)).transpose(1, 2)
            for part in torch.split(mixed, [keys, keys, 2 * keys], -1)
        )
        q, k = (u * torch.rsqrt(u.pow(2).sum(-1, keepdim=True) + 1e-6) for u in (q, k))
        both = torch.unflatten(functional.linear(x, self.in_proj_ba.weight), -1, (self.k_heads, -1))
        b, a = torch.split(both, [each, each], -1)
        log_decay = -self.A_log.exp() * functional.softplus(a.flatten(2) + self.dt_bias)
        answer = delta_rule(
            (q / math.sqrt(self.size)).repeat_interleave(each, 1),
            k.repeat_interleave(each, 1),
            v,
            log_decay.transpose(1, 2),
            b.flatten(2).sigmoid().transpose(1, 2),
        ).transpose(1, 2)
        answer = answer * torch.rsqrt(answer.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        z = parts[3].reshape(batch, tokens, self.v_heads, self.size)
        return product((answer * functional.silu(z.to(x.dtype))).flatten(2), self.out_proj.weight)


class Attention(nn.Module):
    """Full attention with a gate on its answer; a quarter of a head turns with the position."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            config[field] for field in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        rope = config["rope_parameters"]
        self.turning = int(self.size * rope["partial_rotary_factor"])
        self.theta = float(rope["rope_theta"])
        self.q_proj = matrix(2 * self.heads * self.size, HIDDEN)
        self.k_proj = matrix(self.kv_heads * self.size, HIDDEN)
        self.v_proj = matrix(self.kv_heads * self.size, HIDDEN)
        self.o_proj = matrix(HIDDEN, self.heads * self.size, gain=0.1)
        self.q_norm, self.k_norm = Norm(self.size), Norm(self.size)

    def _turned(self, x: Tensor) -> Tensor:
        speeds = self.theta ** (-torch.arange(0, self.turning, 2, dtype=x.dtype) / self.turning)
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * speeds
        cos, sin = angles.cos(), angles.sin()
        half = self.turning // 2
        first, second, still = torch.split(x, [half, half, self.size - self.turning], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, still], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = torch.unflatten(product(x, self.q_proj.weight), -1, (self.heads, -1)).chunk(2, -1)
        k = torch.unflatten(product(x, self.k_proj.weight), -1, (self.kv_heads, -1))
        v = torch.unflatten(product(x, self.v_proj.weight), -1, (self.kv_heads, -1)).transpose(1, 2)
        q = self._turned(self.q_norm(q).transpose(1, 2)).to(v.dtype)
        k = self._turned(self.k_norm(k).transpose(1, 2)).to(v.dtype)
        each = self.heads // self.kv_heads
        answer = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), is_causal=True
        )
        return product(answer.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid(), self.o_proj.weight)


class Expert(nn.Module):
    """The weights of one expert; `Experts` computes all of them together."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = matrix(size, HIDDEN), matrix(size, HIDDEN)
        self.down_proj = matrix(HIDDEN, size, gain=0.1)


class Experts(nn.Module):
    """Two of four experts for each token beside the shared one. Computing all five at once is faster at this size."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.chosen = config["num_experts_per_tok"]
        self.gate = matrix(config["num_experts"], HIDDEN, gain=0.3)
        self.experts = nn.ModuleList(
            Expert(config["moe_intermediate_size"]) for _ in range(config["num_experts"])
        )
        self.shared_expert = Expert(config["shared_expert_intermediate_size"])
        self.shared_expert_gate = matrix(1, HIDDEN, gain=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        every = [*self.experts, self.shared_expert]
        gates = product(x, torch.cat([expert.gate_proj.weight for expert in every]))
        ups = product(x, torch.cat([expert.up_proj.weight for expert in every]))
        chances = functional.linear(x, self.gate.weight).softmax(-1)
        least = chances.topk(self.chosen, -1).values[..., -1:]
        shares = torch.where(chances >= least, chances, 0.0)
        used = (shares > 0).to(x.dtype).mean((0, 1)) / self.chosen
        imbalance = len(self.experts) * (used * chances.mean((0, 1))).sum()
        shares = shares / shares.sum(-1, keepdim=True)
        shares = torch.cat([shares, functional.linear(x, self.shared_expert_gate.weight).sigmoid()], -1)
        inner = torch.unflatten(functional.silu(gates) * ups, -1, (len(every), -1))
        inner = (inner * shares.unsqueeze(-1).to(gates.dtype)).flatten(2)
        return product(inner, torch.cat([expert.down_proj.weight for expert in every], 1)), imbalance


class Layer(nn.Module):
    """One layer: delta net or attention, then experts."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.is_linear = kind == "linear_attention"
        self.mlp = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        answer, imbalance = self.mlp(self.post_attention_layernorm(x))
        return x + answer, imbalance


class Trunk(nn.Module):
    """Everything but the head, as checkpoints group it."""

    def __init__(self) -> None:
        super().__init__()
        config = words_config()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.norm = Norm(HIDDEN)


class Words(nn.Module):
    """The whole model. Its parameters have the names of a Qwen3-Next checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Trunk()
        self.lm_head = matrix(VOCAB_SIZE, HIDDEN, gain=0.3)

    def logits(self, ids: Tensor) -> Tensor:
        """(batch, tokens) ids to (batch, tokens, vocabulary); tokens a multiple of the chunk."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x, _ = layer(x)
        return product(self.model.norm(x), self.lm_head.weight)

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Nats per token of predicting each next id of `ids` (batch, tokens + 1), and how uneven experts are used."""
        x = self.model.embed_tokens(ids[:, :-1])
        uneven = torch.zeros(())
        for layer in self.model.layers:
            x, imbalance = layer(x)
            uneven = uneven + imbalance
        return self.head_loss(x, ids[:, 1:]), uneven / len(self.model.layers)

    def head_loss(self, x: Tensor, following: Tensor) -> Tensor:
        """The last norm, the head and the loss."""
        logits = product(self.model.norm(x), self.lm_head.weight).flatten(0, 1).float()
        return functional.cross_entropy(logits, following.flatten())


def write_checkpoint(model: Words, tokenizer: Tokenizer, out: Path) -> None:
    """The files that Hugging Face loaders and vLLM read."""
    out.mkdir(parents=True, exist_ok=True)
    config = words_config()
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [END_ID, TURN_END_ID]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_tokenizer_config(out, int(config["max_position_embeddings"]))
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    # It comes out private, which would keep an engine of another user from reading it.
    (out / "model.safetensors").chmod(0o644)
