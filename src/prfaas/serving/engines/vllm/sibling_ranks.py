"""What ranks of one engine keep alike, and how they meet to read each other's staging."""

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.rank_shares import rank_copies
from prfaas.serving.engines.vllm.drafter import NO_DRAFTER, Drafter
from prfaas.serving.engines.vllm.layout import read_groups

logger = logging.getLogger(__name__)

Gather = Callable[[object], Sequence[Any]]
"""Gives every rank what each of them brings, in the order of ranks; all call it the same number of times."""

_MEET_S = 60.0
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


def gather_of_ranks(mine: object) -> Sequence[Any]:
    """A `Gather` of vLLM's tensor-parallel group, over its group for CPUs."""
    group = get_tp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


def layer_copies(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, drafter: Drafter = NO_DRAFTER
) -> dict[str, int]:
    """Of layers of full attention by name, how many ranks keep the same; those where it is not certain are missing.

    vLLM gives a head that there are too few of to ranks that follow each other (`QKVParallelLinear`), and the latent of
    MLA to all. A drafter's layers may have other heads than the model's.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return {}
    heads = _full_heads(vllm_config)
    copies: dict[str, int] = {}
    for group in read_groups(kv_cache_config):
        spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        for name in group.layer_names if group.kind is GroupKind.FULL else ():
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            if isinstance(own, MLAAttentionSpec):
                # A kind of its own may keep something else.
                copies[name] = rank_copies(0, 1, ranks) if type(own) is MLAAttentionSpec else 1
            elif isinstance(own, AttentionSpec) and name not in drafter.layer_names and heads:
                copies[name] = rank_copies(heads, own.num_kv_heads, ranks)
    return {name: count for name, count in copies.items() if count > 1}


def _full_heads(vllm_config: VllmConfig) -> int:
    """KV heads of the model's full attention on all ranks together; 0 where layers differ, or it is not known."""
    try:
        return model_from_config(vllm_config.model_config.hf_config.to_dict()).full_heads
    except (ConfigError, AttributeError):
        return 0


def meet_siblings(rank: int, gather: Gather) -> dict[int, socket.socket]:
    """A socket to each other rank of this engine, on this machine; none at all ranks if any of them fails."""
    token = f"\0prfaas-{secrets.token_hex(16)}"
    sockets: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(token)
            listener.listen(128)
            listener.settimeout(_MEET_S)
            names = gather(token)
            try:
                for other in range(rank):
                    sockets[other] = _connected(names[other], rank)
                while len(sockets) < len(names) - 1:
                    other, sock = _accepted(listener)
                    if rank < other < len(names) and other not in sockets:
                        sockets[other] = sock
                    else:
                        sock.close()
                trouble = ""
            except OSError as error:
                trouble = f"rank {rank}: {error}"
    except OSError as error:
        # No rank knows of it yet.
        gather("")
        trouble = f"rank {rank}: {error}"
    troubles = [each for each in gather(trouble) if each]
    if not troubles:
        return sockets
    for sock in sockets.values():
        sock.close()
    logger.warning("ranks do not share their staging, so each is sent all that it keeps: %s", troubles[0])
    return {}


def _connected(name: str, rank: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_MEET_S)
    try:
        sock.connect(name)
        sock.sendall(_RANK.pack(rank))
    except OSError:
        sock.close()
        raise
    return sock


def _accepted(listener: socket.socket) -> tuple[int, socket.socket]:
    """Of this machine's same user alone."""
    while True:
        sock, _ = listener.accept()
        sock.settimeout(_MEET_S)
        _, user, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        told = sock.recv(_RANK.size) if user == os.geteuid() else b""
        if len(told) == _RANK.size:
            return int(_RANK.unpack(told)[0]), sock
        sock.close()


def page_locked(memory: memoryview) -> memoryview:
    """Memory that a device copies from and to without waiting, as `pin_memory` would give it.

    Raises:
        RuntimeError: the driver refuses.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)))
    return memory
