"""Places of a wire page's part in an engine's page: runs of equal length at equal distances."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from operator import mul

from prfaas.core.kv.page_layout import PageLayout, PagePart


@dataclass(frozen=True, slots=True)
class PartRuns:
    """The runs of one part of each wire page, in a dense page of the engine and in the wire page."""

    nbytes: int
    """Of the part in one wire page."""
    offset_bytes: int
    """Of the first run of the first wire page, in a dense page."""
    wire_offset_bytes: int
    """Of the part in a wire page."""
    cuts: int
    """Wire pages in a dense page."""
    cut_stride_bytes: int
    """From one of these to the next."""
    page_stride_bytes: int
    """From one dense page to the next."""
    inner: tuple[tuple[int, int, int], ...]
    """(number, distance in a dense page, distance in a wire page) of runs, from outside in as wire pages have them."""
    run_bytes: int
    """They lie together in both."""

    @classmethod
    def of(
        cls, part: PagePart, wire: PagePart, layout: PageLayout, tokens: int, page_stride_bytes: int
    ) -> "PartRuns":
        """
        Args:
            part: in a dense page of the engine.
            wire: the same in a wire page.
            layout: of the engine's pages.
            tokens: of a wire page.
            page_stride_bytes: from one dense page to the next.
        """
        dimensions = [
            (number, stride, wire_stride)
            for (number, stride), (_, wire_stride) in zip(
                part.strides(tokens), wire.strides(tokens), strict=True
            )
            if number > 1
        ]
        outside_in = sorted(dimensions, key=lambda dimension: -dimension[2])
        *inner, (run_bytes, _, _) = _joined([*outside_in, (part.width_bytes, 1, 1)])
        return cls(
            nbytes=part.heads * part.rows * tokens * part.width_bytes,
            offset_bytes=part.offset_bytes,
            wire_offset_bytes=wire.offset_bytes,
            cuts=layout.page_tokens // tokens,
            cut_stride_bytes=tokens * part.token_stride_bytes,
            page_stride_bytes=page_stride_bytes,
            inner=tuple(inner),
            run_bytes=run_bytes,
        )

    @property
    def is_as_travels(self) -> bool:
        """The runs have the same distances in both."""
        return all(stride == wire_stride for _, stride, wire_stride in self.inner)

    @property
    def grain_bytes(self) -> int:
        """Divides all lengths and distances."""
        strides = [stride for _, *both in self.inner for stride in both]
        outer = (self.cut_stride_bytes, self.page_stride_bytes)
        return gcd(self.run_bytes, self.offset_bytes, self.wire_offset_bytes, *outer, *strides)

    @property
    def end_bytes(self) -> int:
        """End of the last run of the last wire page, in a dense page."""
        last = sum((number - 1) * stride for number, stride, _ in self.inner)
        return self.offset_bytes + (self.cuts - 1) * self.cut_stride_bytes + last + self.run_bytes

    def places(self) -> list[tuple[int, int]]:
        """(place in a dense page, place in a wire page) of each run of the first wire page."""
        own, wire = self.strides()[2:], self.wire_strides()
        return [
            (self.offset_bytes + sum(map(mul, run, own)), self.wire_offset_bytes + sum(map(mul, run, wire)))
            for run in product(*(range(number) for number, _, _ in self.inner))
        ]

    def shape(self, item_bytes: int) -> tuple[int, ...]:
        """Shape of the part in one wire page, in items."""
        return (*(number for number, _, _ in self.inner), self.run_bytes // item_bytes)

    def strides(self) -> tuple[int, ...]:
        """Strides of (pages, wire pages in one, …) in the engine's memory, in bytes, without the last one."""
        return (
            self.page_stride_bytes,
            self.cut_stride_bytes,
            *(stride for _, stride, _ in self.inner),
        )

    def wire_strides(self) -> tuple[int, ...]:
        """Strides of the part in a wire page, in bytes."""
        return tuple(stride for _, _, stride in self.inner)


def _joined(dimensions: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same bytes in fewer dimensions: (number, distance here, and there), from outside in."""
    joined = [dimensions[-1]]
    for number, stride, wire_stride in reversed(dimensions[:-1]):
        inside, inside_stride, inside_wire = joined[0]
        if (stride, wire_stride) == (inside * inside_stride, inside * inside_wire):
            joined[0] = (number * inside, inside_stride, inside_wire)
        else:
            joined.insert(0, (number, stride, wire_stride))
    return joined
