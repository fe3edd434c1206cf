"""Who may talk: proofs in both directions, and sentences that say what differs."""

import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving.transport.harness import await_true, receive_control

from prfaas.core.deployment.field_types import NAME_PATTERN
from prfaas.serving.transport.io.greeting import ServerHandshake, greet
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sockets import ConnectionEnded
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol import fingerprint
from prfaas.serving.transport.protocol.fingerprint import fingerprint_difference
from prfaas.serving.transport.protocol.handshake import (
    NONCE_BYTES,
    ROLE_OBSERVER,
    ROLE_PRODUCER,
    ClientHello,
    HandshakeError,
    PeerIdentity,
    ServerHello,
    is_peer_name,
)
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.region_layout import resume_points
from prfaas.serving.transport.protocol.sentences import bounded_sentences, legible
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, part_id
from prfaas.serving.transport.protocol.wire import FrameType, WireError, pack_control

KEY = bytes(range(32))
LAYOUT = {"model": "m", "dtype": "bf16", "layers": 4}


def hello(**changes: Any) -> ClientHello:
    said: dict[str, Any] = {
        "key": KEY,
        "name": "p/0",
        "server_name": "c/0",
        "role": ROLE_PRODUCER,
        "session": "s1",
        "nonce": secrets.token_hex(NONCE_BYTES),
        "fingerprint": LAYOUT,
    }
    return ClientHello(**said | changes)


_OF_CLIENTS = {"producers", "plain_peers", "admit"}


def meet(client: Callable[[socket.socket], object], **server: Any) -> tuple[object, object]:
    """Results (or exceptions) of both sides."""
    ours, theirs = socket.socketpair()
    results: list[object] = [None]

    def serve() -> None:
        said: dict[str, Any] = {
            "key": KEY,
            "name": "c/0",
            "session": "r1",
            "fingerprint": LAYOUT,
        }
        asked = {"producers": {"p/0"}} | {each: server.pop(each) for each in _OF_CLIENTS & server.keys()}
        try:
            tls = server.pop("tls", None)
            handshake = ServerHandshake(hello=ServerHello(**said | server), tls=tls)
            results[0] = handshake.welcome(theirs, **asked)
        except Exception as error:
            results[0] = error
        theirs.close()

    for sock in (ours, theirs):
        sock.settimeout(5)
    thread = threading.Thread(target=serve)
    thread.start()
    outcome: object
    try:
        outcome = client(ours)
    except Exception as error:
        outcome = error
    ours.close()
    thread.join()
    return outcome, results[0]


def test_both_sides_agree() -> None:
    outcome, identity = meet(lambda sock: greet(sock, hello()))
    assert outcome is None
    assert identity == (PeerIdentity("p/0", ROLE_PRODUCER, "s1"), None)


def test_observer_needs_no_layout_and_no_listing() -> None:
    outcome, identity = meet(
        lambda sock: greet(sock, hello(name="gateway", role=ROLE_OBSERVER, fingerprint={}))
    )
    assert outcome is None
    assert identity == (PeerIdentity("gateway", ROLE_OBSERVER, "s1"), None)


@pytest.mark.parametrize(
    ("said", "server", "why"),
    [
        ({"key": bytes(32)}, {}, "does not have this deployment's key"),
        ({}, {"key": bytes(32)}, "does not have this deployment's key"),
        ({"server_name": "d/0"}, {}, "this is c/0, not d/0"),
        ({"name": "q/0"}, {}, "c/0 takes no KV from q/0"),
        ({"role": "king"}, {}, "role 'king' is neither"),
        (
            {"fingerprint": LAYOUT | {"dtype": "fp8"}},
            {},
            "KV layout differs in 'dtype': c/0 has 'bf16', p/0 has 'fp8'",
        ),
        ({"fingerprint": {"model": "m"}}, {}, "differs in 'dtype': c/0 has 'bf16', p/0 has None"),
        ({"fingerprint": LAYOUT | {"tp": 2}}, {}, "differs in 'tp': p/0 has 2, c/0 has None"),
        ({"fingerprint": LAYOUT | {"layers": "4"}}, {}, "differs in 'layers': c/0 has 4, p/0 has '4'"),
    ],
)
def test_mismatch_is_said(said: dict[str, Any], server: dict[str, Any], why: str) -> None:
    outcome, _ = meet(lambda sock: greet(sock, hello(**said)), **server)
    assert isinstance(outcome, HandshakeError)
    assert why in str(outcome)


class Form:
    """A layout that only has a mark."""

    part, parts = 0, 1

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [num_tokens - skip_tokens]


def layouts(told: object, refused: str = "") -> PeerLayouts[Form]:
    def agree(theirs: object, peer: str, sends: bool) -> Form:
        if refused:
            raise ValueError(f"{refused} of {peer}")
        return Form(f"{told} and {theirs}")

    return PeerLayouts(told, agree, Form(""))


def test_both_sides_hear_how_the_other_keeps_its_kv() -> None:
    ours, theirs = layouts([16]), layouts([32])
    outcome, _ = meet(lambda sock: greet(sock, hello(layouts=ours)), layouts=theirs)
    assert outcome is None
    assert ours.agreed("c/0", is_sent=True).mark == "[16] and [32]"
    assert theirs.agreed("p/0", is_sent=False).mark == "[32] and [16]"
    assert theirs.agreed("q/0", is_sent=False).mark == ""


def test_who_keeps_it_alike_needs_no_other_form() -> None:
    ours, theirs = layouts([16]), layouts([16], refused="what")
    meet(lambda sock: greet(sock, hello(layouts=ours)), layouts=theirs)
    assert ours.agreed("c/0", is_sent=True).mark == theirs.agreed("p/0", is_sent=False).mark == ""


def test_a_layout_that_cannot_be_mapped_is_refused_with_its_sentence() -> None:
    outcome, error = meet(
        lambda sock: greet(sock, hello(layouts=layouts([16]))), layouts=layouts([32], refused="heads")
    )
    assert str(outcome) == "c/0 rejected the connection: heads of p/0"
    assert isinstance(error, HandshakeError) and error.peer == "p/0"
    outcome, _ = meet(
        lambda sock: greet(sock, hello(layouts=layouts([16], refused="heads"))), layouts=layouts([32])
    )
    assert str(outcome) == "heads of c/0"


def sender_to(port: int, ours: PeerLayouts[Form]) -> Sender:
    peer = Peer("c/0", "127.0.0.1", port, "wan", 2, None, on_demand=True)
    sender = Sender(
        name="p/0",
        key=KEY,
        peers={"c/0": peer},
        fingerprint=LAYOUT,
        options=SenderOptions(backoff_max_s=0.1),
        layouts=ours,
    )
    sender.start()
    return sender


@pytest.mark.parametrize("refused", ["", "heads"])
def test_a_sender_meets_a_peer_on_demand_before_the_first_transfer(refused: str) -> None:
    theirs = layouts([32], refused)
    receiver = Receiver(
        name="c/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=StagingArena(1 << 20, 1 << 16),
        layout=theirs,
        fingerprint=LAYOUT,
    )
    receiver.start()
    ours = layouts([16])
    sender = sender_to(receiver.port, ours)
    try:
        assert sender.stats()["peers"]["c/0"]["connects"] == 0
        if refused:
            await_true(lambda: sender.meet("c"), 10, lambda: "it has rejected this side")
            assert sender.telemetry()["rejected"] == {"c/0": "c/0 rejected the connection: heads of p/0"}
        else:
            assert sender.meet("c", 10)
            assert ours.agreed("c/0", is_sent=True).mark == "[16] and [32]"
        assert sender.meet("nobody")
    finally:
        sender.close()
        receiver.close()


def test_a_peer_that_is_not_there_is_waited_for_so_long_as_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sender = sender_to(port, layouts([16]))
    try:
        began_s = time.monotonic()
        assert not sender.meet("c", 0.2)
        assert 0.2 <= time.monotonic() - began_s < 5
    finally:
        sender.close()


def test_nothing_is_heard_of_who_has_not_proved_its_key() -> None:
    theirs = layouts([32])
    outcome, _ = meet(lambda sock: greet(sock, hello(key=bytes(32), layouts=layouts([16]))), layouts=theirs)
    assert isinstance(outcome, HandshakeError)
    assert theirs.agreed("p/0", is_sent=False).mark == ""


def test_an_observer_tells_nothing_and_is_told_nothing_of_use() -> None:
    theirs = layouts([32], refused="heads")
    observer = hello(name="gateway", role=ROLE_OBSERVER, fingerprint={})
    assert meet(lambda sock: greet(sock, observer), layouts=theirs)[0] is None


@pytest.mark.parametrize("changed", ["HELLO", "CHALLENGE"])
def test_a_layout_that_is_changed_on_its_way_is_no_proof(changed: str) -> None:
    def client(sock: socket.socket) -> Any:
        ours = hello(layouts=layouts([16]))
        told = {"layout": [17]} if changed == "HELLO" else {}
        side = ours.converse(encrypted=False)
        next(side)
        sock.sendall(pack_control(FrameType.HELLO, body=ours.body() | told))
        header, challenge = receive_control(sock)
        if changed == "CHALLENGE":
            challenge["layout"] = [33]
        sock.sendall(side.send((header, challenge)))
        return side.send(receive_control(sock))

    outcome, _ = meet(client, layouts=layouts([32]))
    assert isinstance(outcome, HandshakeError)
    assert "does not have this deployment's key" in str(outcome)


def test_a_transfer_comes_in_the_form_that_was_agreed() -> None:
    theirs = layouts([32])
    theirs.note("p/0", [16], sends=False)
    with pytest.raises(WireError, match=r"p/0 sends KV in form 'x', where '\[32\] and \[16\]' was agreed"):
        theirs.begin("p/0", b"t" * 16, "x")
    with pytest.raises(WireError, match="p/0 sends part 1 of a transfer, where part 0 was agreed"):
        theirs.begin("p/0", b"t" * 16, "[32] and [16]", 1)
    assert theirs.of_ticket(b"t" * 16) == {}
    theirs.begin("p/0", b"t" * 16, "[32] and [16]")
    # Another handshake changes nothing of what has begun.
    theirs.note("p/0", [64], sends=False)
    assert theirs.of_ticket(b"t" * 16)[0].mark == "[32] and [16]"


class Divisible(Form):
    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        return 7


@pytest.mark.parametrize("part", [0, 1])
def test_what_has_come_of_a_broken_transfer_is_that_of_its_part(part: int) -> None:
    form = Divisible("")
    form.part, form.parts = part, 2
    theirs = PeerLayouts([32], lambda _told, _peer, _sends: form, form)
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="p",
        consumer="c",
        num_tokens=10,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=60,
    )
    mine, other = (
        replace(ticket, transfer_id=part_id(ticket.transfer_id, each)) for each in (part, 1 - part)
    )
    assert resume_points(theirs, mine, lambda _region, _start: 0).tokens == 0
    theirs.begin("p/0", ticket.transfer_id, "", part)
    assert resume_points(theirs, mine, lambda _region, _start: 0).tokens == 7
    assert resume_points(theirs, other, lambda _region, _start: 0).tokens == 0


def test_old_transfers_are_forgotten() -> None:
    theirs = layouts([32])
    for number in range(theirs.MOST_TRANSFERS + 1):
        theirs.begin("p/0", number.to_bytes(16), "")
    assert theirs.of_ticket((0).to_bytes(16)) == {}
    assert theirs.of_transfer((0).to_bytes(16)) is None
    assert theirs.of_ticket((1).to_bytes(16))
    assert theirs.of_transfer((1).to_bytes(16)) is not None


def test_other_version_is_told_both() -> None:
    def client(sock: socket.socket) -> Any:
        sock.sendall(pack_control(FrameType.HELLO, body=hello().body() | {"version": 7}))
        return receive_control(sock)[1]["reason"]

    outcome, error = meet(client)
    assert outcome == "c/0 speaks protocol version 4, the peer 7"
    assert isinstance(error, HandshakeError)

    def alien(sock: socket.socket) -> Any:
        sock.sendall(pack_control(FrameType.HELLO, body={}, version=5))
        return receive_control(sock)[1]["reason"]

    assert meet(alien)[0] == "peer speaks protocol version 5, this side 4"


def test_proof_cannot_be_replayed_or_reflected() -> None:
    recorded: list[bytes] = []
    said = hello()

    def honest(sock: socket.socket) -> None:
        side = said.converse(encrypted=False)
        sock.sendall(next(side))
        recorded.append(side.send(receive_control(sock)))
        sock.sendall(recorded[0])
        with pytest.raises(StopIteration):
            side.send(receive_control(sock))

    assert meet(honest)[0] is None

    def replay(sock: socket.socket) -> Any:
        sock.sendall(said.frame())
        receive_control(sock)
        sock.sendall(recorded[0])
        return receive_control(sock)[0].kind

    assert meet(replay)[0] is FrameType.REJECT

    def reflect(sock: socket.socket) -> Any:
        sock.sendall(said.frame())
        proof = receive_control(sock)[1]["proof"]
        sock.sendall(pack_control(FrameType.AUTH, body={"proof": proof}))
        return receive_control(sock)[0].kind

    assert meet(reflect)[0] is FrameType.REJECT


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\n\r\n\r\n",
        pack_control(FrameType.WATCH),
        pack_control(FrameType.HELLO, body={"version": 1, "name": 5}),
        pack_control(FrameType.HELLO, body={"version": 1, "name": "\ud800", "role": "producer"}),
        pack_control(FrameType.DATA, body={"x": 1}),
    ],
)
def test_noise(frame: bytes) -> None:
    def client(sock: socket.socket) -> object:
        sock.sendall(frame)
        return receive_control(sock)[0].kind

    outcome, error = meet(client)
    assert outcome is FrameType.REJECT or isinstance(outcome, ConnectionEnded)
    assert isinstance(error, ValueError | ConnectionError)


def test_of_several_differences_the_one_is_told_that_comes_first_on_either_side() -> None:
    told = fingerprint_difference(LAYOUT, LAYOUT | {"dtype": "fp8", "model": "n"}, "a", "b")
    assert told == "KV layout differs in 'model': a has 'm', b has 'n'"
    told = fingerprint_difference(LAYOUT, {"model": "m", "base": 2} | LAYOUT | {"layers": 5}, "a", "b")
    assert told == "KV layout differs in 'base': a has None, b has 2"
    told = fingerprint_difference(LAYOUT, {"layers": 5, "zeta": 1}, "a", "b")
    assert told == "KV layout differs in 'layers': a has 4, b has 5"


def test_a_mark_of_a_newer_release_is_looked_at_by_that_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what a release meant that does not tell it; from that one's side there is nothing to look at."""
    newer = LAYOUT | {"rotation": "off"}
    assert fingerprint_difference(LAYOUT, newer, "old", "new") is None
    assert fingerprint_difference(newer, LAYOUT, "new", "old") == (
        "KV layout differs in 'rotation': new has 'off', old has None"
    )
    monkeypatch.setattr(fingerprint, "MEANT_WITHOUT", {"rotation": "off"})
    assert fingerprint_difference(newer, LAYOUT, "new", "old") is None
    assert fingerprint_difference(newer | {"rotation": "on"}, LAYOUT, "new", "old") == (
        "KV layout differs in 'rotation': new has 'on', old has 'off'"
    )


@pytest.mark.parametrize("is_client", [True, False])
def test_whichever_side_knows_more_refuses(is_client: bool) -> None:
    newer = LAYOUT | {"rotation": "on"}
    outcome, error = meet(
        lambda sock: greet(sock, hello(fingerprint=newer if is_client else LAYOUT)),
        fingerprint=LAYOUT if is_client else newer,
    )
    refused = outcome if is_client else error
    assert isinstance(refused, HandshakeError) and "KV layout differs in 'rotation'" in str(refused)


def test_difference_of_nothing() -> None:
    assert fingerprint_difference(LAYOUT, dict(LAYOUT), "a", "b") is None
    assert fingerprint_difference(LAYOUT, None, "a", "b") == "b sent no layout fingerprint"


@given(st.one_of(st.text(max_size=80), st.from_regex(NAME_PATTERN), st.from_regex(r"[\w./ \n-]{0,70}")))
def test_only_names_of_deployment_files_are_names(name: str) -> None:
    allowed = re.fullmatch(NAME_PATTERN.strip("^$"), name.split("/")[0]) is not None
    rank = name.partition("/")[2]
    with_rank = "/" not in name or re.fullmatch("[0-9]{1,4}", rank) is not None
    assert is_peer_name(name) == (allowed and with_rank)


@given(st.text(), st.integers(10, 200))
def test_what_another_side_says_is_legible(text: str, most: int) -> None:
    said = legible(text, most)
    assert len(said) <= most and said.isascii() and (said.isprintable() or not said)
    if text.isascii() and text.isprintable() and "\\" not in text and len(text) <= most:
        assert said == text


@given(st.dictionaries(st.text(max_size=70), st.text(max_size=1000), max_size=400))
def test_all_sentences_fit_into_a_report(sentences: dict[str, str]) -> None:
    kept = bounded_sentences(sentences)
    assert sum(len(sentence) for sentence in kept.values()) <= 16 << 10
    assert kept.keys() <= sentences.keys() and len(kept) >= min(len(sentences), 200)


def test_a_damaged_hello_says_nothing_of_its_sender() -> None:
    def client(sock: socket.socket) -> None:
        side = hello().converse(encrypted=False)
        frame = bytearray(next(side))
        frame[-1] ^= 1
        sock.sendall(frame)
        side.send(receive_control(sock))

    outcome, _ = meet(client)
    assert isinstance(outcome, WireError) and "could not read the HELLO" in str(outcome)


@given(
    st.dictionaries(st.sampled_from(list(LAYOUT)) | st.text(max_size=300), st.text(max_size=300), max_size=5)
)
def test_a_difference_is_one_short_line(theirs: dict[str, str]) -> None:
    said = fingerprint_difference(LAYOUT, theirs, "c/0", "p/0")
    assert said is not None and said.isprintable() and said.isascii() and len(said) <= 400
