"""Tickets: what was sealed comes back, everything else is refused."""

import ast
import base64
import hashlib
import hmac
import secrets
import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prfaas
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TicketError,
    TransferAttributes,
    TransferClass,
    prompt_digest,
)

SOURCE = Path(prfaas.__file__).parent
KEY = bytes(range(32))
names = st.text(min_size=1, max_size=60).filter(
    lambda text: len(text.encode(errors="replace")) <= 255 and _clean(text)
)


def _clean(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


tickets = st.builds(
    lambda n, skip, **rest: Ticket(num_tokens=n, skip_tokens=min(n, skip), **rest),
    n=st.integers(1, 1 << 30),
    skip=st.integers(0, 1 << 30),
    transfer_id=st.binary(min_size=16, max_size=16),
    prompt_digest=st.binary(min_size=16, max_size=16),
    producer=names,
    consumer=names,
    expires_at_s=st.floats(1, 1e12),
    attributes=st.builds(
        TransferAttributes,
        uses=st.integers(1, 1024),
        checkpoint_tokens=st.integers(0, 1 << 30),
        service=st.builds(
            TransferClass,
            tenant=st.binary(min_size=8, max_size=8),
            weight=st.integers(1, 65535),
            background=st.booleans(),
        ),
    ),
)


@given(tickets, st.binary(min_size=16, max_size=64))
def test_round_trip(ticket: Ticket, key: bytes) -> None:
    sealed = ticket.seal(key)
    assert Ticket.unseal(sealed, key, 0.0) == ticket
    assert sealed.isascii() and "=" not in sealed


@given(tickets, st.data())
def test_any_change_is_noticed(ticket: Ticket, data: st.DataObject) -> None:
    sealed = ticket.seal(KEY)
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.sampled_from("ABCxyz019-_=!é").filter(lambda char: char != sealed[at]))
    for forged in (sealed[:at] + other + sealed[at + 1 :], sealed[:at], sealed + other, sealed[at:]):
        if forged != sealed:
            with pytest.raises(TicketError):
                Ticket.unseal(forged, KEY, 0.0)
    with pytest.raises(TicketError, match="not sealed with this deployment's key"):
        Ticket.unseal(sealed, bytes(32), 0.0)


@given(st.text(max_size=300))
def test_any_text_is_refused_politely(text: str) -> None:
    with pytest.raises(TicketError):
        Ticket.unseal(text, KEY, 0.0)


def test_a_ticket_expires() -> None:
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="p",
        consumer="c",
        num_tokens=10,
        skip_tokens=4,
        prompt_digest=prompt_digest(range(10)),
        expires_at_s=1000.0 + 30.0,
    )
    assert Ticket.unseal(ticket.seal(KEY), KEY, 1029.9) == ticket
    with pytest.raises(TicketError, match=r"expired 2\.0 s ago"):
        Ticket.unseal(ticket.seal(KEY), KEY, 1032.0)
    again = replace(ticket)
    assert again == ticket and hash(again) == hash(ticket)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 0},
        {"num_tokens": (1 << 30) + 1},
        {"skip_tokens": 11},
        {"skip_tokens": -1},
        {"producer": ""},
        {"consumer": "x" * 256},
        {"transfer_id": b"short"},
        {"prompt_digest": b""},
        {"expires_at_s": float("nan")},
    ],
)
def test_absurd_tickets(change: dict[str, object]) -> None:
    good = Ticket(bytes(16), "p", "c", 10, 0, bytes(16), 1e9)
    with pytest.raises(TicketError):
        replace(good, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"checkpoint_tokens": -1}, {"checkpoint_tokens": (1 << 30) + 1}, {"uses": 0}, {"uses": 1025}]
)
def test_absurd_attributes(change: dict[str, int]) -> None:
    with pytest.raises(TicketError, match=next(iter(change))):
        TransferAttributes(**change)


def files_that_know(attribute: str) -> set[str]:
    """The product's files that read an attribute of tickets, or set it."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "ttributes" in text and attribute in text else "")):
            match node:
                case ast.Attribute(
                    value=ast.Attribute(attr="attributes") | ast.Name(id="attributes"), attr=name
                ):
                    names = {name}
                case ast.Call(func=ast.Name(id="TransferAttributes"), keywords=keywords):
                    names = {each.arg for each in keywords}
                case ast.ClassDef(name="TransferAttributes", body=body):
                    names = {each.target.id for each in body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
                case _:
                    continue
            if attribute in names:
                found.add(path.name)
    return found


def test_what_some_engines_do_with_a_transfer_is_known_to_five_files_at_most() -> None:
    """Its declaration, who sets it, and the engines that act on it: nothing on the way between them."""
    for attribute in ("uses", "checkpoint_tokens"):
        known = files_that_know(attribute)
        assert {"ticket.py", "hops.py"} <= known
        assert len(known) <= 5, known


def sealed(said: dict[str, object]) -> str:
    """A ticket with such fields, as another release may seal it."""
    body = msgspec.msgpack.encode(said)
    mac = hmac.digest(KEY, b"prfaas ticket 4\x00" + body, "sha256")[:16]
    return base64.urlsafe_b64encode(body + mac).rstrip(b"=").decode()


def test_releases_with_unlike_sets_of_attributes_agree_on_what_both_know() -> None:
    attributes = TransferAttributes(uses=3, checkpoint_tokens=64, service=TransferClass(weight=2))
    ticket = Ticket(bytes(16), "p", "c", 10, 0, bytes(16), 1e9, attributes)
    said: dict[str, Any] = msgspec.to_builtins(ticket, builtin_types=(bytes,))
    assert Ticket.unseal(sealed(said), KEY, 0.0) == ticket
    newer = said | {"of_a_newer_release": [1], "attributes": said["attributes"] | {"snapshots": {"every": 2}}}
    assert Ticket.unseal(sealed(newer), KEY, 0.0) == ticket
    older = said | {"attributes": {"uses": 3}}
    assert Ticket.unseal(sealed(older), KEY, 0.0).attributes == TransferAttributes(uses=3)
    for absurd in (
        {"num_tokens": "ten"},
        {"attributes": {"uses": 0}},
        {"attributes": {"service": {"weight": 0}}},
    ):
        with pytest.raises(TicketError, match="ticket of another form"):
            Ticket.unseal(sealed(said | absurd), KEY, 0.0)
    with pytest.raises(TicketError, match="missing required field `transfer_id`"):
        Ticket.unseal(sealed({}), KEY, 0.0)


@pytest.mark.parametrize("change", [{"tenant": b"7 bytes"}, {"weight": 0}, {"weight": 65536}])
def test_absurd_classes(change: dict[str, object]) -> None:
    with pytest.raises(TicketError):
        TransferClass(**change)  # type: ignore[arg-type]


def test_prompt_digest_is_over_little_endian_uint32() -> None:
    ids = [0, 1, 151_935, 2**32 - 1]
    expected = hashlib.blake2b(struct.pack("<4I", *ids), digest_size=16).digest()
    assert prompt_digest(ids) == expected
    assert prompt_digest(tuple(ids)) == expected
    with pytest.raises(OverflowError):
        prompt_digest([-1])
    with pytest.raises(OverflowError):
        prompt_digest([2**32])


def test_prompt_digest_tells_tenants_and_adapters_apart() -> None:
    ids = [1, 2, 3]
    digests = {
        prompt_digest(ids, salt, adapter)
        for salt, adapter in [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("aa", "")]
    }
    assert len(digests) == 5
    assert prompt_digest(array("I", ids), "a") == prompt_digest(ids, "a")
