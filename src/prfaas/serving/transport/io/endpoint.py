"""Both ends of one process's KV transfers, assembled: the KV port, and the connections to its peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.fingerprint import Fingerprint
from prfaas.serving.transport.protocol.options import ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.region_layout import TransferLayout
from prfaas.serving.transport.protocol.requests import PeerRequest, refuse_request


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """A receiver, and the sender that observers steer over the receiver's port. The caller starts and closes both."""

    receiver: Receiver
    sender: Sender

    @classmethod
    def of(
        cls,
        *,
        name: str,
        key: bytes,
        host: str,
        port: int,
        fingerprint: Fingerprint,
        tls: TlsIdentity | None,
        peer_list: PeerList,
        arena: StagingArena,
        layout: TransferLayout,
        sender_options: SenderOptions,
        receiver_options: ReceiverOptions,
        on_request: Callable[[PeerRequest], None] = refuse_request,
        more_stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> Self:
        """Make both from what they share; arguments as of `Receiver`.

        Raises:
            ValueError: as of `Sender`.
        """
        sender = Sender(
            name=name,
            key=key,
            peers=peer_list.peers,
            fingerprint=fingerprint,
            options=sender_options,
            tls=tls,
            layouts=layout if isinstance(layout, PeerLayouts) else None,
        )
        receiver = Receiver(
            name=name,
            key=key,
            host=host,
            port=port,
            arena=arena,
            layout=layout,
            fingerprint=fingerprint,
            options=receiver_options,
            peer_list=peer_list,
            sender=sender,
            tls=tls,
            on_request=on_request,
            more_stats=more_stats,
        )
        return cls(receiver, sender)
