"""The consumer's answers to single frames."""

from prfaas.transport.wire import END_REGION, FrameType, Header, pack_control, pack_header


def ack(header: Header) -> bytes:
    region = END_REGION if header.kind is FrameType.END else header.region
    return pack_header(FrameType.ACK, header.transfer_id, region=region, offset=header.offset)


def nack(header: Header) -> bytes:
    return pack_header(FrameType.NACK, header.transfer_id, region=header.region, offset=header.offset)


def abort(transfer_id: bytes, reason: str) -> bytes:
    return pack_control(FrameType.ABORT, transfer_id, {"reason": reason[:4096]})


def refuse(transfer_id: bytes, reason: str) -> bytes:
    """An OPEN is not let in."""
    return pack_control(FrameType.REFUSE, transfer_id, {"reason": reason[:4096]})
