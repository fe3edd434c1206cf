"""For fuzzers: well formed bytes that are changed in a few places, and a look at what was logged."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import strategies as st

_INTERESTING = (
    *(b"", b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\xc1", b"NaN", b"-1", b"1e999", b"9" * 400, b"null"),
    *(b"[" * 200, b"{", b'"', b"\\ud800", b"\n", b": ", b"!!binary ", b"&a ", b"*a", b"<<: ", b"\t"),
    *(b"2001-99-99", b"!!timestamp ", b"!!int ", b"? ", b"---\n"),
)


@dataclass(frozen=True, slots=True)
class Edit:
    """One place that is changed."""

    place: float
    """Share of what is before it."""
    removed: int
    put: bytes

    def of(self, data: bytes) -> bytes:
        at = int(self.place * len(data))
        return data[:at] + self.put + data[at + self.removed :]


_edits = st.lists(
    st.builds(
        Edit,
        place=st.floats(0, 1),
        removed=st.sampled_from([0, 0, 1, 1, 2, 8, 40, 1000]),
        put=st.sampled_from(_INTERESTING) | st.binary(max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def mutated(corpus: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Examples of a corpus with some edits, and now and then bytes of no form at all."""
    return st.tuples(st.sampled_from(corpus), _edits).map(_edited) | st.binary(max_size=60)


def _edited(drawn: tuple[bytes, Sequence[Edit]]) -> bytes:
    data, edits = drawn
    for edit in edits:
        data = edit.of(data)
    return data


@contextmanager
def no_exception_logged() -> Iterator[None]:
    """Whoever catches an exception that it did not expect logs it: none may have been."""
    caught: list[str] = []

    class Catcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                caught.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    logger, catcher = logging.getLogger("prfaas"), Catcher()
    logger.addHandler(catcher)
    try:
        yield
    finally:
        logger.removeHandler(catcher)
    assert caught == []
