"""Of an HTTP exchange with an engine: the head of the request, and how the answer can fail to come."""

from collections.abc import Mapping


class AnswerCutError(ConnectionError):
    """The connection ended, or what came was not HTTP, before the answer was complete."""

    def __init__(self, text: str, *, by_server: bool = False) -> None:
        """`by_server`: the server closed or reset the connection, which only a process that lives or has died does."""
        super().__init__(text)
        self.by_server = by_server


class ServerSilentError(AnswerCutError):
    """The server was judged frozen (`HttpPool.bar`)."""


class AnswerLateError(AnswerCutError):
    """Nothing came for too long."""

    def __init__(self, reason: str, limit_s: float) -> None:
        """`reason`: "first-byte" or "idle"."""
        super().__init__(f"nothing came for {limit_s:g} s")
        self.reason = reason


def request_head(
    method: str, host: str, port: int, path: str, headers: Mapping[str, str], body_bytes: int
) -> bytes:
    """The lines before the body. Raises ValueError when a header contains a line break."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    length = f"Content-Length: {body_bytes}\r\n" if body_bytes or method == "POST" else ""
    text = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{length}{''.join(lines)}\r\n"
    # More line feeds than lines: a value contains one.
    if text.count("\n") != len(lines) + (4 if length else 3) or text.count("\r") != text.count("\n"):
        raise ValueError("a request header contains a line break")
    return text.encode("latin-1")
