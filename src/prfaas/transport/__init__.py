"""Moving KV between machines over TCP: verified, paced, resumable. Knows bytes, regions and offsets, nothing
of vLLM or HTTP. The wire format is in docs/wire.md."""

from prfaas.transport.admission import RegionLayout
from prfaas.transport.handshake import Fingerprint, HandshakeError
from prfaas.transport.keyfile import KeyFileError, create_key, load_key
from prfaas.transport.observer import Observer
from prfaas.transport.options import ReceiverOptions, SenderOptions
from prfaas.transport.outgoing import OutgoingTransfer, SendPhase
from prfaas.transport.peer import Peer
from prfaas.transport.receiver import Receiver
from prfaas.transport.sender import Sender
from prfaas.transport.source import BytesSource, ChunkSource, SourceGone
from prfaas.transport.staged import StagedTransfer
from prfaas.transport.staging import StagingArena, StagingLease
from prfaas.transport.status import TransferPhase, TransferStatus
from prfaas.transport.tcpinfo import LinkSample, TcpInfo
from prfaas.transport.ticket import Ticket, TicketError, prompt_digest
from prfaas.transport.wire import PROTOCOL_VERSION, WireError

__all__ = [
    "PROTOCOL_VERSION",
    "BytesSource",
    "ChunkSource",
    "Fingerprint",
    "HandshakeError",
    "KeyFileError",
    "LinkSample",
    "Observer",
    "OutgoingTransfer",
    "Peer",
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
    "TransferPhase",
    "TransferStatus",
    "WireError",
    "create_key",
    "load_key",
    "prompt_digest",
]
