"""How an HTTP answer of an engine can fail to come."""


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
