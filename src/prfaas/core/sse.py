"""Server-sent events as OpenAI-compatible servers stream them: one line `data: …` per event, `[DONE]` at the end."""

_DATA = b"data:"
_END = b"[DONE]"
_MOST_LINE_BYTES = 16 << 20


class SseParser:
    """Takes a stream's bytes in pieces of any size and gives the data of each event once its line is whole."""

    def __init__(self) -> None:
        self.ended = False
        """Whether the mark of the end has come."""
        self._partial_line = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that `piece` completes, in order; the mark of the end is not among them.

        Raises:
            ValueError: a line has no end.
        """
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        if len(self._partial_line) > _MOST_LINE_BYTES:
            raise ValueError(f"a line of the stream has more than {_MOST_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _END:
                self.ended = True
            else:
                events.append(data)
        return events
