"""Kimi Delta Attention token by token in torch, under the names and arguments of vLLM's two Triton kernels.

The kernel for chunks is wrong by orders of magnitude in Triton's interpreter. Of each head there is a state S of shape
(values, keys) in fp32. A token forgets by key, writes what the state does not say of its key yet, and reads
(arXiv 2510.26692, equation 1): S ← S·diag(α); S ← S + β·(v − S·k)·kᵀ; o = S·q.
"""

import itertools
from typing import Any

import torch
from torch.nn.functional import normalize, softplus


def chunk_kda_with_fused_gate(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts behind each other: (1, tokens, heads, size) of q, k, v and gates; their outputs, their last states."""
    decay, beta = _gates(raw_g[0].view(k[0].shape), raw_beta[0], A_log, g_bias, lower_bound)
    out, last = torch.empty_like(v), initial_state.float().clone()
    for number, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for token in range(start, end):
            out[0, token] = _step(
                last[number], q[0, token], k[0, token], v[0, token], decay[token], beta[token]
            )
    return out, last.to(initial_state.dtype)


def fused_recurrent_kda_packed_decode(
    *,
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request, whose states in `initial_state` go on in place; block 0 is nobody's."""
    _, heads, values, keys = initial_state.shape
    parts = mixed_qkv.split([heads * keys, heads * keys, heads * values], dim=-1)
    q, k, v = (part.view(len(mixed_qkv), heads, -1) for part in parts)
    decay, beta = _gates(raw_g.view(k.shape), raw_beta.view(len(k), heads), A_log, dt_bias, lower_bound)
    out = torch.zeros(1, *v.shape, dtype=v.dtype)
    for number, block in enumerate(state_indices[: len(k)].tolist()):
        if block > 0:
            state = initial_state[block].float()
            out[0, number] = _step(state, q[number], k[number], v[number], decay[number], beta[number])
            initial_state[block] = state
    return out, initial_state


def _gates(
    raw: torch.Tensor,
    raw_beta: torch.Tensor,
    a_log: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of each key's column after a token, and how much of the token is written."""
    speed = a_log.float().exp()[:, None]
    gate = raw.float() + bias.float().view(raw.shape[1:])
    log_decay = -speed * softplus(gate) if lower_bound is None else lower_bound * torch.sigmoid(speed * gate)
    return log_decay.exp(), torch.sigmoid(raw_beta.float())


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Change `state` (heads, values, keys) by one token, and read it."""
    q, k = normalize(q.float(), dim=-1) * q.shape[-1] ** -0.5, normalize(k.float(), dim=-1)
    state *= decay[:, None, :]
    unknown = v.float() - (state @ k[:, :, None])[..., 0]
    state += (beta[:, None] * unknown)[:, :, None] * k[:, None, :]
    return (state @ q[:, :, None])[..., 0]
