"""Stop strings of an answer that a second engine continues: the text that is held back is the gateway's to account for.

A stop string may have begun before the seam, where the second engine sees a prompt. So it is asked without any, and
the gateway looks for them as vLLM 0.32 does: as many characters as a stop string may lack are held back.
"""

from collections.abc import Sequence


class StopAccount:
    """What of the text may leave, and where it ends."""

    def __init__(self, stops: Sequence[str], *, includes: bool, text: str, held_chars: int) -> None:
        """
        Args:
            stops: in the order in which they are looked for.
            includes: whether the client is to have the one that ends the answer.
            text: the end of the answer's text so far.
            held_chars: how much of it the client has not got.
        """
        self._stops = stops
        self._includes = includes
        self._longest = max(map(len, stops))
        self._text = text
        self._held_chars = min(held_chars, len(text))
        self.stop: str | None = None
        """The string that has ended the answer."""

    def take(self, piece: str, *, is_last: bool, is_looked_at: bool) -> str:
        """What may leave now that `piece` has come, perhaps the last one.

        `is_looked_at`: False while the answer has too few tokens to end.
        """
        text = self._text + piece
        sent = len(self._text) - self._held_chars
        end = len(text) if is_last or self._includes else max(len(text) - self._longest + 1, sent)
        for stop in self._stops if is_looked_at and piece else ():
            found = text.find(stop, max(len(text) - len(piece) - len(stop) + 1, 0))
            if found >= 0:
                self.stop = stop
                end = max(found + len(stop) * self._includes, sent)
                break
        self._text = text[-self._longest - (len(text) - end) :]
        self._held_chars = len(text) - end
        return text[sent:end]
