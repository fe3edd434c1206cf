"""Permissions at a KV port: which frames a peer may send there. One table, by the peer's authenticated name.

Where connections are encrypted the certificate proves the name, else only membership is proved, by the key.
"""

from types import MappingProxyType

from prfaas.core.deployment import CONTROL, GATEWAY, TOOLS
from prfaas.serving.transport.protocol.handshake import ROLE_PRODUCER, PeerIdentity
from prfaas.serving.transport.protocol.wire import FrameType

PRODUCER = "producer"
"""An engine or pool on a connection of its sender."""

OBSERVING_MEMBER = "member"
"""An engine or pool that asks, and is neither gateway nor tools."""

ITSELF = "itself"
"""An engine's own machine, by that engine's name."""

_HEARTBEATS = frozenset({FrameType.PING, FrameType.PONG})

PERMISSIONS = MappingProxyType(
    {
        PRODUCER: _HEARTBEATS
        | {FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.ABORT, FrameType.FILLER},
        GATEWAY: _HEARTBEATS | {FrameType.WATCH, FrameType.ABANDON, FrameType.STATS, FrameType.COPY},
        CONTROL: _HEARTBEATS
        | {FrameType.STATS, FrameType.PACE, FrameType.PROBE, FrameType.ROSTER}
        | {FrameType.COPY, FrameType.ABANDON, FrameType.FOLLOW},
        TOOLS: _HEARTBEATS | {FrameType.STATS, FrameType.WATCH},
        OBSERVING_MEMBER: _HEARTBEATS | {FrameType.PULL},
        ITSELF: _HEARTBEATS | {FrameType.STATS, FrameType.LEAVE},
    }
)
"""Frames by who sends them. The answers of a KV port are read by its clients, each of its own few kinds."""


def permitted_frames(identity: PeerIdentity, own_name: str, *, is_here: bool) -> frozenset[FrameType]:
    """The frames that an authenticated peer may send to the KV port of the rank or pool `own_name`.

    `is_here`: its certificate proves its name, or it connects from the address of that port. All others have the key,
    too, and could call themselves so.
    """
    if identity.role == ROLE_PRODUCER:
        return PERMISSIONS[PRODUCER]
    if is_here and identity.name == own_name.partition("/")[0]:
        return PERMISSIONS[ITSELF]
    return PERMISSIONS.get(identity.name, PERMISSIONS[OBSERVING_MEMBER])
