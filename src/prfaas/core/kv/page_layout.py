"""How engines lay out the pages of their KV, and the form in which pages travel between two that do it differently.

A layer's KV is the same bytes in every engine: `width_bytes` for each token in each row of each head. Engines differ in
how many tokens a block has, and in the order of heads and tokens in a page. So a page that travels, a wire page, has as
many tokens as divide both sides' pages, and one order that both sides know. Each side maps it to its own pages.

Where one side keeps elements of 16 bits and the other of 8, those of 8 travel: the side with 16 rounds or widens them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import accumulate, groupby
from math import gcd

from prfaas.core.kv.dtypes import ELEMENT_BYTES
from prfaas.core.kv.groups import REQUEST_TOKENS, GroupKind

# Bounds of what another side may tell.
_MOST_TOKENS = REQUEST_TOKENS
_MOST_BYTES = 1 << 40
_MOST_PARTS = 64
_MOST_LAYOUTS = 1 << 16
# Of the 8 KiB of a handshake's payload, which has a fingerprint too.
_MOST_TOLD_CHARS = 4096
_KINDS = {kind.value: kind for kind in GroupKind}


class UnlikePagesError(ValueError):
    """Pages that do not hold the same KV; the sentence has the field and both values."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """KV in a page whose rows lie at equal distances: keys and values together, keys alone, a latent."""

    heads: int
    """On this rank; 1 where all heads share it, as an MLA latent."""
    rows: int
    """Of a head: 1 where all that it keeps of a token lies together; its elements where each lies apart."""
    width_bytes: int
    """Of one token in a row."""
    offset_bytes: int
    """Of the first token in the first row of the first head, in a page."""
    token_stride_bytes: int
    head_stride_bytes: int
    """0 with one head."""
    row_stride_bytes: int
    """0 with one row."""

    def of_elements(self, nbytes: int, now: int) -> "PagePart":
        """The same with elements of so many bytes, which have `now` of them."""
        lengths = {name: value for name, value in asdict(self).items() if name.endswith("_bytes")}
        return replace(self, **{name: length * nbytes // now for name, length in lengths.items()})

    def strides(self, tokens: int) -> list[tuple[int, int]]:
        """(number, distance in bytes) of its tokens, heads and rows; the distance of a single one means nothing."""
        return [
            (tokens, self.token_stride_bytes),
            (self.heads, self.head_stride_bytes),
            (self.rows, self.row_stride_bytes),
        ]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The pages of one layer, or of one tensor of a layer that has several, on one rank."""

    kind: GroupKind
    block_tokens: int
    """Of one block of the engine's block table."""
    page_tokens: int
    """Tokens that lie in one dense page: a block's, or a whole fraction of them (the kernels' blocks)."""
    page_bytes: int
    """Of a block."""
    parts: tuple[PagePart, ...] = ()
    """Empty where the order in a page is not known. A linear state has one token a page."""
    element: str = ""
    """What keys and values consist of, one of `ELEMENT_BYTES`; "" where they are only moved as they are."""

    def in_elements(self, element: str) -> "PageLayout":
        """The same pages with other elements."""
        if element == self.element:
            return self
        nbytes, now = ELEMENT_BYTES[element], ELEMENT_BYTES[self.element]
        parts = tuple(part.of_elements(nbytes, now) for part in self.parts)
        return replace(self, page_bytes=self.page_bytes * nbytes // now, parts=parts, element=element)


@dataclass(frozen=True, slots=True)
class WirePage:
    """The form of the pages of a layer that both sides keep differently."""

    tokens: int
    """Of one wire page; of a linear state, the unit in which its place in the prompt is counted."""
    parts: tuple[PagePart, ...] = ()
    """How KV lies in it, without gaps; empty for a linear state that travels as it is."""
    element: str = ""
    """What keys and values consist of on the way, where one side keeps them otherwise; else ""."""

    def in_elements(self, element: str) -> "WirePage":
        """The same with elements as one side keeps them."""
        nbytes, now = ELEMENT_BYTES[element], ELEMENT_BYTES[self.element]
        return WirePage(self.tokens, tuple(part.of_elements(nbytes, now) for part in self.parts))


# What travels of a layer: None: the engines' pages as they are.
WireForm = WirePage | None


def wire_forms(
    ours: Sequence[PageLayout], theirs: Sequence[PageLayout], name: str, peer: str, *, sends: bool
) -> tuple[WireForm, ...]:
    """The form for each layer, which is the same from whichever side one looks.

    It is the order of a side whose pages are no larger than wire pages, which then has nothing to copy more. Where both
    or none are, it is the producer's: a consumer copies what it loads in any case.

    Args:
        ours: of each region of a transfer, in its order.
        theirs: the same of the other side.
        name: this side's, for the sentence.
        peer: the other side's.
        sends: this side is the producer.

    Raises:
        UnlikePagesError: no form suits both.
    """
    if len(ours) != len(theirs):
        raise unlike_pages("regions", "a transfer", (name, len(ours)), (peer, len(theirs)))
    known: dict[tuple[PageLayout, PageLayout], WireForm] = {}
    for pair in zip(ours, theirs, strict=True):
        if pair not in known:
            known[pair] = _wire_form(*pair, name, peer, sends=sends)
    return tuple(known[pair] for pair in zip(ours, theirs, strict=True))


def _wire_form(ours: PageLayout, theirs: PageLayout, name: str, peer: str, *, sends: bool) -> WireForm:
    if ours == theirs:
        return None
    where = f"{ours.kind.value} layers"
    if ours.kind is not theirs.kind:
        raise unlike_pages("kind", "a layer", (name, ours.kind.value), (peer, theirs.kind.value))
    is_state = ours.kind is GroupKind.STATE
    if is_state and ours.page_bytes == theirs.page_bytes:
        return WirePage(gcd(ours.block_tokens, theirs.block_tokens))
    element = ""
    if ours.parts and theirs.parts and ours.element != theirs.element:
        element = _narrower(ours, theirs, name, peer)
        ours, theirs = ours.in_elements(element), theirs.in_elements(element)
    if not ours.parts or not theirs.parts:
        is_size = not is_state and ours.block_tokens != theirs.block_tokens
        field = "block_tokens" if is_size else "page_bytes"
        lacking = name if not ours.parts else peer
        raise UnlikePagesError(
            f"{unlike_pages(field, where, (name, getattr(ours, field)), (peer, getattr(theirs, field)))}, "
            f"and in which order {lacking} keeps heads and tokens in a page is not known"
        )
    if len(ours.parts) != len(theirs.parts):
        raise unlike_pages("parts", where, (name, len(ours.parts)), (peer, len(theirs.parts)))
    for mine, other in zip(ours.parts, theirs.parts, strict=True):
        for field in ("heads", "rows", "width_bytes"):
            values = getattr(mine, field), getattr(other, field)
            if values[0] != values[1]:
                raise unlike_pages(field, where, (name, values[0]), (peer, values[1]))
    sent, kept = (ours, theirs) if sends else (theirs, ours)
    if is_state:
        return WirePage(gcd(ours.block_tokens, theirs.block_tokens), _dense_parts(sent.parts, 1))
    tokens = gcd(ours.page_tokens, theirs.page_tokens)
    is_finer = kept.page_tokens == tokens < sent.page_tokens
    return WirePage(tokens, _dense_parts((kept if is_finer else sent).parts, tokens), element)


def _narrower(ours: PageLayout, theirs: PageLayout, name: str, peer: str) -> str:
    both = (ours.element, theirs.element)
    by_bytes = {ELEMENT_BYTES.get(element, 0): element for element in both}
    if by_bytes.keys() != {1, 2}:
        values = [element or "elements of another kind" for element in both]
        raise unlike_pages("element", f"{ours.kind.value} layers", (name, values[0]), (peer, values[1]))
    return by_bytes[1]


def _dense_parts(parts: Sequence[PagePart], tokens: int) -> tuple[PagePart, ...]:
    """The same in the same order, of so many tokens and without gaps.

    One part lies behind the other, in a page or, where the engine has it so, in each head.
    """
    first = parts[0]
    head_stride = first.head_stride_bytes
    is_by_head = first.heads > 1 and all(
        (part.heads, part.head_stride_bytes) == (first.heads, head_stride)
        and abs(part.offset_bytes - first.offset_bytes) < head_stride
        and max(part.token_stride_bytes, part.row_stride_bytes) < head_stride
        for part in parts
    )
    # Of one head, or of all.
    bytes_of = [part.rows * tokens * part.width_bytes * (1 if is_by_head else part.heads) for part in parts]
    offsets = accumulate(bytes_of, initial=0)
    dense = [_dense_part(part, tokens, offset) for part, offset in zip(parts, offsets, strict=False)]
    return tuple(replace(part, head_stride_bytes=sum(bytes_of)) if is_by_head else part for part in dense)


def _dense_part(part: PagePart, tokens: int, offset_bytes: int) -> PagePart:
    numbers, strides = zip(*part.strides(tokens), strict=True)
    dense, nbytes = [0, 0, 0], part.width_bytes
    for place in sorted(range(3), key=lambda place: strides[place]):
        if numbers[place] > 1:
            dense[place] = nbytes
            nbytes *= numbers[place]
    token_stride, head_stride, row_stride = dense
    return PagePart(
        part.heads,
        part.rows,
        part.width_bytes,
        offset_bytes,
        token_stride,
        head_stride_bytes=head_stride,
        row_stride_bytes=row_stride,
    )


def unlike_pages(
    field: str, where: str, ours: tuple[str, object], theirs: tuple[str, object]
) -> UnlikePagesError:
    """The error for a field of a kind of layers, with the name and the value of both sides."""
    (name, mine), (peer, other) = ours, theirs
    return UnlikePagesError(
        f"KV layout differs in {field!r} of {where}: {name} has {mine!r}, {peer} has {other!r}"
    )


def mark_of(forms: Sequence[WireForm], shared: object = None) -> str:
    """Names the forms of all layers, equal at both sides; "" if all pages travel as they are.

    `shared`: what else both sides know of the transfer, as JSON; None: nothing.
    """
    if not any(forms) and shared is None:
        return ""
    listed = [
        None if form is None else [form.tokens, [astuple(part) for part in form.parts], form.element]
        for form in forms
    ]
    return _digest(json.dumps([listed, shared]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def told_layouts(layouts: Sequence[PageLayout]) -> object:
    """Layouts as JSON for the other side: equal ones that follow each other once, with their number.

    So many different ones that a handshake has no room for them are a digest: only an equal side can read that.
    """
    told = [
        [
            len(list(equal)),
            layout.kind.value,
            layout.block_tokens,
            layout.page_tokens,
            layout.page_bytes,
            [list(astuple(part)) for part in layout.parts],
            layout.element,
        ]
        for layout, equal in groupby(layouts)
    ]
    text = json.dumps(told)
    return told if len(text) <= _MOST_TOLD_CHARS else _digest(text)


def read_layouts(told: object) -> tuple[PageLayout, ...]:
    """The layouts that another side tells, each as often as it says.

    Raises:
        ValueError: it is no such list, or a number is out of bounds.
    """
    layouts: list[PageLayout] = []
    for entry in _list(told, _MOST_LAYOUTS):
        count, kind, block_tokens, page_tokens, page_bytes, parts, element = _fields(entry, 7)
        if _number(block_tokens, 1, _MOST_TOKENS) % _number(page_tokens, 1, _MOST_TOKENS):
            raise ValueError("a block has a whole number of pages")
        if str(kind) not in _KINDS:
            raise ValueError(f"a kind of layer is one of {', '.join(_KINDS)}")
        if element not in ("", *ELEMENT_BYTES):
            raise ValueError(f"elements are one of {', '.join(ELEMENT_BYTES)}, or empty")
        layout = PageLayout(
            _KINDS[str(kind)],
            _number(block_tokens, 1, _MOST_TOKENS),
            _number(page_tokens, 1, _MOST_TOKENS),
            _number(page_bytes, 1, _MOST_BYTES),
            tuple(_read_part(part) for part in _list(parts, _MOST_PARTS)),
            element=str(element),
        )
        if layout.element and not layout.parts:
            raise ValueError("only where the order in a page is known, its elements are")
        if len(layouts) + _number(count, 1, _MOST_LAYOUTS) > _MOST_LAYOUTS:
            raise ValueError(f"more than {_MOST_LAYOUTS} layers")
        layouts += [layout] * _number(count, 1, _MOST_LAYOUTS)
    return tuple(layouts)


def _read_part(told: object) -> PagePart:
    heads, rows, width, offset, token_stride, head_stride, row_stride = _fields(told, 7)
    return PagePart(
        heads=_number(heads, 1, _MOST_TOKENS),
        rows=_number(rows, 1, _MOST_TOKENS),
        width_bytes=_number(width, 1, _MOST_BYTES),
        offset_bytes=_number(offset, 0, _MOST_BYTES),
        token_stride_bytes=_number(token_stride, 0, _MOST_BYTES),
        head_stride_bytes=_number(head_stride, 0, _MOST_BYTES),
        row_stride_bytes=_number(row_stride, 0, _MOST_BYTES),
    )


def _list(value: object, most: int) -> list[object]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"a list of at most {most} entries is expected")
    return value


def _fields(value: object, count: int) -> list[object]:
    """So many fields; what a later release puts behind them is for that release to judge."""
    if not isinstance(value, list) or len(value) < count:
        raise ValueError(f"a list of {count} fields is expected")
    return value[:count]


def _number(value: object, least: int, most: int) -> int:
    # Booleans are integers in Python.
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a number from {least} to {most} is expected")
    return value
