"""How engines are started, and how long each step of a KV transfer between them may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from prfaas.core.deployment.field_types import (
    Arg,
    EnvName,
    EnvValue,
    Flag,
    Positive,
    PositiveFloat,
    Seconds,
    Size,
    SocketSeconds,
    Whole,
)
from prfaas.core.deployment.section import ENGINES_AGAIN, LIVE, Section
from prfaas.core.units import GIB, MIB

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
class EngineConfig(Section, on_change=ENGINES_AGAIN):
    """How every vLLM server is started."""

    max_num_batched_tokens: Positive = 2048
    """Tokens of one prefill chunk."""
    max_num_seqs: Positive = 16
    """Requests that an engine works on at a time."""
    kv_cache_gib: Annotated[PositiveFloat, Field(le=1 << 20)] | None = None
    """GiB of KVCache; must be given on `cpu`, left out elsewhere: vLLM's choice."""
    staging_bytes: Annotated[Size, Field(alias="staging")] = 4 * GIB
    """Host memory of a rank for KVCache that has arrived before the engine has blocks for it."""
    transfer_block_bytes: Annotated[Size, Field(alias="transfer_block", ge=64 * 1024, le=64 * MIB)] = MIB
    """Unit in which staging is handed out."""
    prefix_cache_retention_tokens: Whole | None = None
    """Distance of the states that models with state or windows keep; left out: 256 on `cpu`, else vLLM's default."""
    extra_args: tuple[Arg, ...] = ()
    """Further options of `vllm serve`, after ours."""
    env: Mapping[EnvName, EnvValue] = field(default_factory=dict)
    """Further environment variables of the engines."""
    log_bytes: Annotated[Size, Field(alias="log_size", ge=64 * 1024)] = 64 * MIB
    """An engine's log of more becomes an earlier part of it."""
    log_files: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """So many earlier parts are kept."""
    shutdown_timeout_s: Annotated[int, Field(strict=True, ge=0, le=3600)] = 30
    """What runs at an engine that is told to end may go on so long, whole seconds; another one continues the rest."""
    local_transfer: LocalTransfer = "prfaas"
    """What moves KVCache inside a `pd` cluster."""

    @property
    def mixed_chunk_tokens(self) -> int:
        """Of a prompt in one step of an engine that decodes too."""
        return mixed_chunk_tokens(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class TransferLimits(Section, on_change=ENGINES_AGAIN):
    """How long each step of a KV transfer may take before the request goes on without it; and its check."""

    lease_s: Seconds = 60.0
    """A finished prefill keeps its blocks so long for a transfer that is not acknowledged."""
    load_wait_s: Seconds = 30.0
    """A decode request waits so long for a transfer that is still arriving."""
    staging_wait_s: Seconds = 20.0
    """A transfer waits so long for room in staging."""
    staging_ttl_s: Seconds = 60.0
    """A complete transfer waits so long for its decode request."""
    silence_s: Seconds = 3.0
    """A silent path of an open transfer is noticed within that time; its connection is closed after half of it."""
    resume_s: Seconds = 2.5
    """A transfer goes on if the other side comes back within that time after its last sign of life."""
    decode_lead_s: Annotated[float, Field(strict=True, ge=0, le=60), LIVE] = 1.0
    """A decode request is sent so long before its KV is expected to be complete; 0: not before it is."""
    progress_deadline_s: Seconds = 8.0
    """A connection is given up where an engine takes and answers nothing for so long, though its machine does."""
    page_digests: Flag = True
    """A digest of every page travels with a transfer and is compared after its load."""
    checksums: Flag = True
    """Every chunk on its way carries a checksum, and is sent again if it does not fit."""
    user_timeout_s: SocketSeconds = 10.0
    """TCP_USER_TIMEOUT of KV connections: bytes that are unacknowledged so long end one."""
    keepalive_s: Annotated[SocketSeconds, Field(ge=1)] = 10.0
    """A silent KV connection is probed by TCP after that time."""
