"""Peer lists: on the wire, in a sender that goes on sending, and at a receiver that lets no other peer in."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.deployment import CONTROL, TOOLS, load_deployment
from prfaas.core.shipped import example_path
from prfaas.serving.engines.command import kv_transfer_config
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.pacing import PaceOrder
from prfaas.serving.transport.protocol.peer_list import PeerList, peer_list_of
from prfaas.serving.transport.protocol.wire import WireError

from .harness import FAST_RECEIVER, FAST_SENDER, FINGERPRINT, KEY, SizesByTokens

rates = st.one_of(st.none(), st.integers(1, 10**13).map(float))
texts = st.text(max_size=30)
peers = st.builds(
    Peer,
    name=texts,
    host=texts,
    port=st.integers(1, 65535),
    link=texts,
    connections=st.integers(1, 64),
    bandwidth_bits_per_s=rates,
    on_demand=st.booleans(),
    encrypted=st.booleans(),
    compressed=st.booleans(),
    share_bits_per_s=rates,
)
peer_lists = st.builds(
    lambda found, producers, plain: PeerList({peer.name: peer for peer in found}, producers, plain),
    st.lists(peers, max_size=5),
    st.frozensets(texts, max_size=5),
    st.frozensets(texts, max_size=5),
)


@given(peer_lists)
def test_a_peer_list_comes_as_it_was_sent(peer_list: PeerList) -> None:
    came = PeerList.from_body(json.loads(json.dumps(peer_list.to_body())))
    assert came == peer_list
    assert came.digest == peer_list.digest


@given(peer_lists, peer_lists)
def test_digests_tell_peer_lists_apart(one: PeerList, other: PeerList) -> None:
    assert (one.digest == other.digest) == (one == other)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda body: body.pop("peers"),
        lambda body: body.update(peers={}),
        lambda body: body.update(peers=[7]),
        lambda body: body.update(peers=body["peers"] * 2),
        lambda body: body["peers"][0].update(port=0),
        lambda body: body["peers"][0].update(port=1 << 20),
        lambda body: body["peers"][0].update(connections=65),
        lambda body: body["peers"][0].update(bits_per_s=-1),
        lambda body: body["peers"][0].update(bits_per_s=0),
        lambda body: body["peers"][0].update(name=None),
        lambda body: body.update(producers=[1]),
        lambda body: body.update(producers=["x"] * 5000),
        lambda body: body.pop("plain"),
    ],
)
def test_absurd_peer_lists_are_refused(break_it: Callable[[dict[str, object]], object]) -> None:
    body = PeerList({"c/0": Peer("c/0", "h", 1, "l", 1, 1e9)}, frozenset({"p/0"})).to_body()
    break_it(body)
    with pytest.raises(WireError):
        PeerList.from_body(body)


@pytest.mark.parametrize("example", ["local.yaml", "local-wide.yaml", "synthetic.yaml"])
def test_the_command_line_and_the_control_plane_say_the_same(example: str, tmp_path: Path) -> None:
    """An engine whose file is the gateway's is not told anything."""
    deployment = load_deployment(example_path(example), state_dir=tmp_path)
    for instance in deployment.instances:
        config = kv_transfer_config(deployment, instance)["kv_connector_extra_config"]
        assert isinstance(config, dict)
        settings = ConnectorSettings.parse(json.loads(json.dumps(config)))
        for rank in range(instance.tensor_parallel):
            assert (
                settings.peer_list(rank, instance.rank_grid).digest
                == peer_list_of(deployment, instance, rank).digest
            )


def test_ranks_of_unlike_engines_have_to_do_with_those_that_share_their_heads(tmp_path: Path) -> None:
    deployment = load_deployment(example_path("local.yaml"), state_dir=tmp_path)
    sizes = {"prfaas": 1, "pd": 2}
    clusters = tuple(
        replace(
            cluster,
            instances=tuple(replace(each, tensor_parallel=sizes[cluster.kind]) for each in cluster.instances),
        )
        for cluster in deployment.clusters
    )
    deployment = replace(deployment, clusters=clusters)
    far = next(each for each in deployment.instances if each.name == "east-prefill-0")
    home = next(each for each in deployment.instances if each.name == "home-decode-0")
    peers = peer_list_of(deployment, far, 0).peers
    for rank in range(2):
        assert peers[f"home-decode-0/{rank}"].port == home.kv_port + rank
        peer_list = peer_list_of(deployment, home, rank)
        assert {"east-prefill-0/0", f"home-prefill-0/{rank}"} == peer_list.producers
    for instance in (far, home):
        config = kv_transfer_config(deployment, instance)["kv_connector_extra_config"]
        assert isinstance(config, dict)
        settings = ConnectorSettings.parse(json.loads(json.dumps(config)))
        for rank in range(instance.tensor_parallel):
            told = peer_list_of(deployment, instance, rank)
            assert settings.peer_list(rank, instance.rank_grid).digest == told.digest


def receiver(name: str, peer_list: PeerList | None = None, **more: object) -> Receiver:
    made = Receiver(
        name=name,
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=StagingArena(1 << 20, 1 << 16),
        layout=SizesByTokens(),
        fingerprint=FINGERPRINT,
        options=FAST_RECEIVER,
        peer_list=peer_list,
        **more,  # type: ignore[arg-type]
    )
    made.start()
    return made


class BesideSender:
    """A sender beside a receiver that only learns its peers."""

    def __init__(self, apply_peers: Callable[[Mapping[str, Peer]], None]) -> None:
        self.apply_peers = apply_peers

    def telemetry(self) -> dict[str, object]:
        return {"links": {}}

    def pace(self, order: PaceOrder) -> None:
        raise AssertionError(order)

    def probe(self, link: str, nbytes: int) -> None:
        raise AssertionError(link)


def peer_of(to: Receiver, **changes: object) -> Peer:
    peer = Peer(to.name, "127.0.0.1", to.port, "a->b", 1, 1e9)
    return structs.replace(peer, **changes)


def await_true(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connections(sender: Sender) -> dict[str, int]:
    return {name: told["connections"] for name, told in sender.stats()["peers"].items()}


def test_a_sender_meets_new_peers_and_leaves_others() -> None:
    one, two = receiver("one/0"), receiver("two/0")
    sender = Sender(name="p/0", key=KEY, peers={}, fingerprint=FINGERPRINT, options=FAST_SENDER)
    try:
        sender.start()
        sender.apply_peers({"one/0": peer_of(one)})
        await_true(lambda: connections(sender) == {"one/0": 1})
        sender.apply_peers({"one/0": peer_of(one), "two/0": peer_of(two)})
        await_true(lambda: connections(sender) == {"one/0": 1, "two/0": 1})
        assert sender.stats()["peers"]["one/0"]["connects"] == 1, "the old connection was made anew"
        # Another bandwidth is no other way.
        wider = {each.name: peer_of(each, bandwidth_bits_per_s=2e9) for each in (one, two)}
        sender.apply_peers(wider)
        assert {told["connects"] for told in sender.stats()["peers"].values()} == {1}
        sender.apply_peers({"two/0": peer_of(two)})
        await_true(lambda: one.stats()["producer_connections"] == 0)
        assert connections(sender) == {"two/0": 1}
        # More connections are another way.
        sender.apply_peers({"two/0": peer_of(two, connections=3)})
        await_true(lambda: connections(sender) == {"two/0": 3})
    finally:
        for each in (sender, one, two):
            each.close()
    assert sender.stats()["threads"] == 0


def test_a_sender_refuses_what_it_cannot_be() -> None:
    sender = Sender(name="p/0", key=KEY, peers={}, fingerprint=FINGERPRINT, options=FAST_SENDER)
    there = Peer("c/0", "127.0.0.1", 9, "a->b", 1, 1e9, on_demand=True)
    sender.apply_peers({"c/0": there})
    for wrong, why in (
        ({"c/0": structs.replace(there, encrypted=True)}, "no TLS identity"),
        (
            {"c/0": there, "d/0": structs.replace(there, name="d/0", bandwidth_bits_per_s=2e9)},
            "different bandwidths",
        ),
        ({"c/0": structs.replace(there, bandwidth_bits_per_s=None)}, "is paced in one peer list"),
    ):
        with pytest.raises(ValueError, match=why):
            sender.apply_peers(wrong)
        assert sender.stats()["peers"].keys() == {"c/0"}
    sender.close()


def test_a_link_takes_another_bandwidth_and_share() -> None:
    sender = Sender(name="p/0", key=KEY, peers={}, fingerprint=FINGERPRINT, options=FAST_SENDER)
    there = Peer("c/0", "127.0.0.1", 9, "a->b", 1, 1e9, on_demand=True, share_bits_per_s=5e8)
    sender.apply_peers({"c/0": there})
    assert sender.telemetry()["links"]["a->b"]["pace_bits_per_s"] == 5e8
    sender.apply_peers({"c/0": structs.replace(there, bandwidth_bits_per_s=4e9, share_bits_per_s=2e9)})
    assert sender.telemetry()["links"]["a->b"]["pace_bits_per_s"] == 2e9
    sender.close()


def told(name: str, to: Receiver, peer_list: PeerList) -> dict[str, object]:
    """What a receiver says of its peer_list after somebody has told it one."""

    async def tell() -> dict[str, object]:
        observer = Observer(name, KEY, "127.0.0.1", to.port, to.name)
        try:
            await observer.order(peer_list)
            found: dict[str, object] = (await observer.stats())["roster"]
            return found
        finally:
            await observer.close()

    return asyncio.run(tell())


def test_a_receiver_lets_in_whom_its_peer_list_names() -> None:
    start = PeerList({}, frozenset({"old/0"}))
    heard: list[Mapping[str, Peer]] = []
    here = receiver("here/0", start, sender=BesideSender(heard.append))
    senders = {
        name: Sender(
            name=name,
            key=KEY,
            peers={"here/0": peer_of(here)},
            fingerprint=FINGERPRINT,
            # Who was rejected would ask again only after a minute.
            options=replace(FAST_SENDER, backoff_min_s=60.0),
        )
        for name in ("old/0", "new/0")
    }
    try:
        for sender in senders.values():
            sender.start()
        await_true(lambda: connections(senders["old/0"])["here/0"] == 1)
        await_true(
            lambda: "not among its producers" in senders["new/0"].telemetry()["rejected"].get("here/0", "")
        )
        new = PeerList({"x/0": Peer("x/0", "h", 1, "l", 1, 1e9)}, frozenset({"new/0"}))
        assert here.stats()["roster"] == {"digest": start.digest, "told": False, "trouble": ""}
        assert told(CONTROL, here, new) == {"digest": new.digest, "told": True, "trouble": ""}
        assert heard == [new.peers]
        await_true(lambda: connections(senders["old/0"])["here/0"] == 0)
        # Who was rejected asks again at once when it is told itself.
        senders["new/0"].apply_peers({"here/0": peer_of(here)})
        await_true(lambda: connections(senders["new/0"])["here/0"] == 1)
    finally:
        for each in (*senders.values(), here):
            each.close()


def test_only_the_control_plane_sends_a_peer_list() -> None:
    start = PeerList({}, frozenset({"old/0"}))
    here = receiver("here/0", start)
    try:
        with pytest.raises(ConnectionError):
            told(TOOLS, here, PeerList({}, frozenset({"new/0"})))
        assert here.stats()["roster"]["digest"] == start.digest
    finally:
        here.close()


def test_a_peer_list_that_the_sender_refuses_changes_nothing() -> None:
    start = PeerList({}, frozenset({"old/0"}))

    def refuse(_peers: Mapping[str, Peer]) -> None:
        raise ValueError("it can't")

    here = receiver("here/0", start, sender=BesideSender(refuse))
    try:
        assert told(CONTROL, here, PeerList({}, frozenset({"new/0"}))) == {
            "digest": start.digest,
            "told": True,
            "trouble": "it can't",
        }
    finally:
        here.close()
