"""The client's side of a handshake on asyncio streams, as `handshake` has it for sockets."""

import asyncio
import ssl

from prfaas.serving.transport.handshake import ClientHello
from prfaas.serving.transport.sealing import Sealing, read_frame
from prfaas.serving.transport.tls_identity import TlsIdentity
from prfaas.serving.transport.tls_stream import AsyncTlsStream, NotTlsError, tls_trouble


async def shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: ClientHello, tls: TlsIdentity | None
) -> tuple[str, Sealing | None]:
    """Prove who this side is on a connection that has just been made, and see that the server is who it should be.

    Takes as long as the server does. `tls`: the connection is encrypted; None: it is plain.

    Returns:
        The server's session, and what all further frames are sealed with; None on a plain connection.

    Raises:
        HandshakeError: one side has refused the other.
        WireError: the server does not speak this protocol.
        OSError: the connection is broken.
        asyncio.IncompleteReadError: the server has ended it.
    """
    if tls is None:
        writer.write(hello.frame())
        writer.write(hello.answer(*await read_frame(reader)))
        return hello.finish(*await read_frame(reader)), None
    try:
        stream = await AsyncTlsStream.open(reader, writer, tls.client_context())
        hello.check_certificate(stream.certificate())
        stream.write(hello.frame())
        stream.write(hello.answer(*await read_frame(stream)))
        session = hello.finish(*await read_frame(stream))
        return session, hello.keys(*await read_frame(stream))
    except (ssl.SSLError, NotTlsError) as error:
        raise tls_trouble(error, hello.server_name) from None
