"""Answers of other servers over HTTP, read whole up to a most number of bytes."""

import aiohttp

_PIECE_BYTES = 1 << 16
_MOST_BYTES = 64 << 20


async def read_bounded(response: aiohttp.ClientResponse, most_bytes: int = _MOST_BYTES) -> bytes:
    """The body of an answer.

    Raises:
        aiohttp.ClientPayloadError: it is longer than `most_bytes`, or ends too early.
    """
    body = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"the answer has more than {most_bytes} bytes")
    return bytes(body)
