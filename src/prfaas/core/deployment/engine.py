"""How engines are started, and how long each step of a KV transfer between them may take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LocalTransfer = Literal["prfaas", "nixl"]
"""What moves KV between two engines of one PD cluster: our own transport, or vLLM's NIXL connector."""


def mixed_chunk_tokens(step_tokens: int, seats: int) -> int:
    """Of a prompt in a step that it shares with answers: half of what their next tokens leave of it, at least 1.

    So two prompts and all answers fit into a step, and a request that comes to them need not wait for a prompt's end.

    Args:
        step_tokens: `engine.max_num_batched_tokens`.
        seats: `engine.max_num_seqs`, a token of a step for each.
    """
    return max((step_tokens - seats) // 2, 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How every vLLM server is started."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_gib: float | None
    """None leaves the size to vLLM, which is not possible on CPUs."""
    staging_bytes: int
    """Memory for KVCache that has arrived before the engine has blocks for it."""
    transfer_block_bytes: int
    prefix_cache_retention_tokens: int | None
    """Distance of the states that models with state or windows keep; None: 256 on CPUs, elsewhere vLLM's default."""
    extra_args: tuple[str, ...]
    """Further arguments of `vllm serve`."""
    env: Mapping[str, str]
    log_bytes: int = 64 << 20
    """An engine's log of more becomes an earlier part of it."""
    log_files: int = 3
    """So many earlier parts are kept."""
    local_transfer: LocalTransfer = "prfaas"
    """What moves KV inside a PD cluster."""

    @property
    def mixed_chunk_tokens(self) -> int:
        """Of a prompt in one step of an engine that decodes too."""
        return mixed_chunk_tokens(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long each step of a KV transfer may take before the request goes on without it; and its check."""

    lease_s: float
    load_wait_s: float
    staging_wait_s: float
    staging_ttl_s: float
    progress_deadline_s: float
    page_digests: bool = True
    """A digest of every page travels with a transfer and is compared after its load."""
    checksums: bool = True
    """Every chunk on its way carries a checksum, and is sent again if it does not fit."""
    user_timeout_s: float = 10.0
    """TCP_USER_TIMEOUT of KV connections: bytes that are unacknowledged so long end one."""
    keepalive_s: float = 10.0
    """A silent KV connection is probed by TCP after that time."""
    silence_s: float = 3.0
    """A silent path of an open transfer is noticed within that time."""
    resume_s: float = 2.5
    """A transfer goes on if the other side comes back within that time after its last sign of life."""
    decode_lead_s: float = 1.0
    """A decode request is sent so long before its KV is expected to be complete; 0: not before it is."""
