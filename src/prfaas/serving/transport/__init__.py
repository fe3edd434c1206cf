"""Moving KV between machines over TCP: verified, paced, resumable. Knows bytes, regions and offsets, nothing
of vLLM or HTTP. The wire format is in docs/reference/wire-format.md."""

from prfaas.serving.secret_files import KeyFileError
from prfaas.serving.transport.chunk_source import BytesSource, ChunkSource, SourceGone
from prfaas.serving.transport.observer import Observer
from prfaas.serving.transport.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.outgoing import (
    OutgoingTransfer,
    SendPhase,
)
from prfaas.serving.transport.pacing import PaceOrder
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.region_layout import AskedTransfers
from prfaas.serving.transport.requests import PeerRequest
from prfaas.serving.transport.sender import Sender
from prfaas.serving.transport.sockets import HandshakeError, TcpInfo
from prfaas.serving.transport.staging import StagingArena, StagingLease
from prfaas.serving.transport.ticket import (
    Ticket,
    TicketError,
    TransferAttributes,
    TransferClass,
    create_key,
    load_key,
    prompt_digest,
)
from prfaas.serving.transport.tls_identity import TlsIdentity
from prfaas.serving.transport.wire import TransferPhase, TransferStatus

__all__ = [
    "AskedTransfers",
    "BytesSource",
    "ChunkSource",
    "HandshakeError",
    "KeyFileError",
    "Observer",
    "OutgoingTransfer",
    "PaceOrder",
    "Peer",
    "PeerRequest",
    "Receiver",
    "ReceiverOptions",
    "SendPhase",
    "Sender",
    "SenderOptions",
    "SourceGone",
    "StagingArena",
    "StagingLease",
    "TcpInfo",
    "Ticket",
    "TicketError",
    "TlsIdentity",
    "TransferAttributes",
    "TransferClass",
    "TransferPhase",
    "TransferStatus",
    "create_key",
    "load_key",
    "prompt_digest",
]
