"""Moving KV between machines over TCP: verified, paced, resumable. Knows bytes, regions and offsets, nothing
of vLLM or HTTP. The wire format is in docs/reference/wire-format.md."""

from prfaas.serving.secret_files import KeyFileError, TlsFileError
from prfaas.serving.transport.chunk_source import BytesSource, ChunkSource, SourceGone
from prfaas.serving.transport.fingerprint import Fingerprint
from prfaas.serving.transport.observer import Observer
from prfaas.serving.transport.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.outgoing import (
    OutgoingTransfer,
    SendPhase,
)
from prfaas.serving.transport.pacing import PaceOrder
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.region_layout import AskedTransfers, RegionLayout
from prfaas.serving.transport.requests import PeerRequest
from prfaas.serving.transport.sender import Sender
from prfaas.serving.transport.sockets import HandshakeError, TcpInfo
from prfaas.serving.transport.staging import StagedTransfer, StagingArena, StagingLease
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
from prfaas.serving.transport.wire import PROTOCOL_VERSION, TransferPhase, TransferStatus, WireError

__all__ = [
    "PROTOCOL_VERSION",
    "AskedTransfers",
    "BytesSource",
    "ChunkSource",
    "Fingerprint",
    "HandshakeError",
    "KeyFileError",
    "Observer",
    "OutgoingTransfer",
    "PaceOrder",
    "Peer",
    "PeerRequest",
    "Receiver",
    "ReceiverOptions",
    "RegionLayout",
    "SendPhase",
    "Sender",
    "SenderOptions",
    "SourceGone",
    "StagedTransfer",
    "StagingArena",
    "StagingLease",
    "TcpInfo",
    "Ticket",
    "TicketError",
    "TlsFileError",
    "TlsIdentity",
    "TransferAttributes",
    "TransferClass",
    "TransferPhase",
    "TransferStatus",
    "WireError",
    "create_key",
    "load_key",
    "prompt_digest",
]
