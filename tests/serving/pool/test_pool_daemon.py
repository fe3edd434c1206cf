"""Engines and tools at the daemon's socket."""

import asyncio
import contextlib
import errno
import os
import random
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.core.pool.keys import page_id
from prfaas.serving.pool import daemon as pool_daemon
from prfaas.serving.pool import store as pool_store
from prfaas.serving.pool.arena import ArenaError
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import DaemonOptions, PoolDaemon, PoolError
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PROTOCOL_VERSION, PageRef, PoolMatch

from .pool_daemon import (
    DENSE,
    HYBRID,
    MIB,
    TENANT,
    WAIT_S,
    chain_of,
    connected,
    is_provided,
    packed_chain,
    pages_of,
    part_of,
    pool_options,
    read_part,
    running_daemon,
    state_of,
    store_prompt,
    wait_until,
    write_part,
    writing_engine,
)
from .stepped_ssd import RecordedEvents

PROMPT = list(range(1, 257))
IDENTITY = {"parent": b"", "token_ids": bytes(128), "salt": "", "adapter": ""}


def test_a_prompt_that_was_stored_is_found_by_another_engine(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as first, connected(options) as second:
        assert store_prompt(first, PROMPT) == len(pages_of(HYBRID, PROMPT))
        keys = chain_of(HYBRID, PROMPT)
        match = second.match(packed_chain(keys), 0, 255, whole=True, tenant=TENANT, pin=True)
        assert match is not None
        assert (match.usable_tokens, match.attention_tokens, match.memory_tokens) == (224, 224, 224)
        assert [(group, first, len(refs)) for group, first, refs in match.pages] == [
            (0, 0, 7),
            (1, 6, 1),
            (2, 11, 3),
        ]
        for group, first_block, refs in match.pages:
            block_tokens = HYBRID.group(group).block_tokens
            for block, ref in enumerate(refs, first_block):
                page = page_id(keys.key_at((block + 1) * block_tokens), group)
                assert state_of(second, ref.slot) is PageState.READY
                assert read_part(second, ref, group) == part_of(HYBRID, page)
        assert second.intact(match.epoch, [ref for pages in match.pages for ref in pages.refs])
        second.unpin(match.pin)


def first_match(client: PoolClient, pin: bool = True) -> PoolMatch:
    match = client.match(packed_chain(chain_of(HYBRID, PROMPT)), 0, 256, whole=True, tenant=TENANT, pin=pin)
    assert match is not None
    return match


def figure(client: PoolClient, name: str) -> int:
    figures = client.stats()
    assert figures is not None
    return figures[name]


def raw_connection(options: DaemonOptions) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(options.socket))
    return connection


def exchanged(connection: socket.socket, message: bytes) -> bytes:
    """The answer to a message, empty if the daemon hung up."""
    connection.sendall(len(message).to_bytes(4, "little") + message)
    return connection.recv(1 << 16)


def test_only_this_user_may_connect_or_map(tmp_path: Path) -> None:
    options = pool_options(tmp_path / "state")
    (tmp_path / "state").mkdir()
    before = os.umask(0)
    try:
        with running_daemon(options), connected(options):
            for path in (options.socket, options.arena, options.socket.with_suffix(".lock")):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not options.socket.exists()
    assert not options.arena.exists()


def test_the_arena_is_kept_where_that_is_wanted(tmp_path: Path) -> None:
    options = pool_options(tmp_path, keep_arena=True)
    with running_daemon(options), connected(options) as client:
        store_prompt(client, PROMPT)
    with running_daemon(options), connected(options) as client:
        assert first_match(client).usable_tokens == 256


def test_another_tenants_prefix_is_not_found(tmp_path: Path) -> None:
    """Whatever a tenant calls itself: the keys differ."""
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        store_prompt(client, PROMPT, salt="a", tenant=b"a")
        for salt, tenant in (("b", b"a"), ("", b"a"), ("b", b"b")):
            chain = packed_chain(chain_of(HYBRID, PROMPT, salt))
            match = client.match(chain, 0, 256, whole=True, tenant=tenant, pin=True)
            assert match is not None
            assert (match.pin, match.usable_tokens, match.attention_tokens) == (0, 0, 0)


def test_a_closed_socket_drops_its_pins_and_reservations(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options, "tool", None) as tool, connected(options) as client:
        store_prompt(client, PROMPT[:128])
        first_match(client)
        reserved = client.reserve(TENANT, pages_of(HYBRID, PROMPT)[4:8])
        assert reserved is not None and all(reserved)
        assert (figure(tool, "pinned_pages"), figure(tool, "writing_pages")) == (8, 4)
        assert client._socket is not None
        client._socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: (figure(tool, "pinned_pages"), figure(tool, "writing_pages")) == (0, 0))


def test_the_slots_of_a_lost_scheduler_wait_for_its_workers(tmp_path: Path) -> None:
    """Its pages can be reserved again at once, elsewhere; the old slots only once nobody writes into them."""
    options = pool_options(tmp_path)
    pages = pages_of(HYBRID, PROMPT)[:3]
    with running_daemon(options), connected(options, "tool", None) as tool:
        with connected(options, "worker") as worker:
            with connected(options) as scheduler:
                old = scheduler.reserve(TENANT, pages)
            assert old is not None and all(old)
            with connected(options) as scheduler:
                new = scheduler.reserve(TENANT, pages)
                assert new is not None and all(new)
                assert {ref.slot & 0xFFFFFFFF for ref in old if ref}.isdisjoint(
                    ref.slot & 0xFFFFFFFF for ref in new if ref
                )
                assert figure(tool, "writing_pages") == 6
                worker.abort([old[0]] if old[0] else [])
                worker.commit([(old[1], 7)] if old[1] else [])
                assert figure(tool, "writing_pages") == 4
                worker.commit(
                    [
                        (ref, write_part(worker, ref, page))
                        for (page, _), ref in zip(pages, new, strict=True)
                        if ref
                    ]
                )
                assert figure(tool, "writing_pages") == 1
                assert figure(tool, "memory_pages") == {"0": 3, "1": 0, "2": 0}
        # The worker said goodbye.
        assert figure(tool, "writing_pages") == 0


def test_the_slots_of_a_killed_engine_are_free_again(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with (
        running_daemon(options),
        connected(options, "tool", None) as tool,
        writing_engine(options) as (process, refs),
    ):
        assert figure(tool, "writing_pages") == len(refs) > 0
        process.kill()
        process.wait(WAIT_S)
        wait_until(lambda: figure(tool, "writing_pages") == 0)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        random.Random(1).randbytes(1000),
        msgspec.msgpack.encode(["match", b"", 0, 0, True, b"", True]),
        msgspec.msgpack.encode(["open", 99, "worker", 0, bytes(8), None]),
        msgspec.msgpack.encode(["open", 1, "king", 0, bytes(8), None]),
        msgspec.msgpack.encode(["open", 1, "worker", 0, bytes(8), b"no geometry"]),
        msgspec.msgpack.encode(["open", 1, "worker", 5, bytes(8), HYBRID.encode()]),
        msgspec.msgpack.encode(["open", 1, "worker", 0, bytes(9), HYBRID.encode()]),
        msgspec.msgpack.encode(["open", 1, "worker", 0, bytes(8), msgspec.msgpack.encode(["x", 0, []])]),
    ],
)
def test_garbage_ends_only_its_own_session(tmp_path: Path, message: bytes) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        with raw_connection(options) as connection:
            assert b"refused" in exchanged(connection, message)
            assert connection.recv(100) == b""
        store_prompt(client, PROMPT)
        assert first_match(client).usable_tokens == 256


@pytest.mark.parametrize(
    "message",
    [
        ["match", b"x", 0, 100, True, b"", True],
        ["match", bytes(16), -5, 100, True, b"", True],
        ["reserve", b"", b"x" * 16, [None]],
        ["reserve", b"", b"x" * 17, [None, None]],
        ["reserve", b"", b"x" * 16 + b"\x00", [None]],
        ["reserve", b"123456789", b"x" * 16 + b"\x01", [None]],
        ["reserve", b"", b"x" * 16 + b"\x01", [IDENTITY]],
        ["reserve", b"", b"x" * 16 + b"\x00", [IDENTITY | {"token_ids": bytes(5000)}]],
        ["reserve", b"", b"x" * 16 + b"\x00", [IDENTITY | {"parent": bytes(5000)}]],
        ["commit", b"123", b""],
        ["commit", bytes(8), b""],
        ["abort", b"123"],
        ["discard", b"123"],
        ["open", 1, "worker", 0, bytes(8), HYBRID.encode()],
        ["nothing"],
    ],
)
def test_a_request_that_makes_no_sense_ends_only_its_own_session(
    tmp_path: Path, message: list[object]
) -> None:
    options = pool_options(tmp_path)
    opening = msgspec.msgpack.encode(["open", 1, "worker", 0, bytes(8), HYBRID.encode()])
    with running_daemon(options), connected(options) as client:
        with raw_connection(options) as connection:
            assert b"opened" in exchanged(connection, opening)
            assert b"refused" in exchanged(connection, msgspec.msgpack.encode(message))
            assert connection.recv(100) == b""
        store_prompt(client, PROMPT)
        assert first_match(client).usable_tokens == 256


def test_ends_of_pages_that_never_were_are_passed_over(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        store_prompt(client, PROMPT)
        match = first_match(client)
        ref = match.pages[0].refs[0]
        for slot in (ref.slot, ref.slot + (1 << 32), 1 << 20, -1, (1 << 63) - 1):
            client.commit([(PageRef(slot, 0), 1)])
            client.abort([PageRef(slot, 0)])
        client.unpin(match.pin + 100)
        assert client.intact(match.epoch, [ref])
        assert first_match(client).usable_tokens == 256


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        with pytest.raises(PoolError, match="another daemon serves the pool at"), running_daemon(options):
            pass
        store_prompt(client, PROMPT)
        assert first_match(client).usable_tokens == 256


def test_an_arena_without_room_is_refused(tmp_path: Path) -> None:
    options = pool_options(tmp_path, 1 << 50)
    with pytest.raises(ArenaError, match="set it lower"), running_daemon(options):
        pass


def test_a_pool_too_small_for_a_model_refuses_its_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = pool_options(tmp_path, 100_000)
    client = PoolClient(options.socket, "worker", HYBRID)
    with running_daemon(options):
        assert not client.connect()
        client.close()
        assert "pool.memory is too small for this model" in caplog.text
        with connected(options, geometry=DENSE):
            pass


def test_another_model_waits_until_the_engines_of_the_first_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = pool_options(tmp_path)
    events = RecordedEvents()
    with running_daemon(options, events=events), connected(options, "tool", None) as tool:
        with connected(options) as first:
            store_prompt(first, PROMPT)
            other = PoolClient(options.socket, "worker", DENSE)
            assert not other.connect()
            assert "the pool serves engines of fingerprint tiny hybrid" in caplog.text
            assert events.held
        wait_until(other.connect)
        assert not events.held
        assert figure(other, "fingerprint") == "tiny dense"
        wait_until(tool.connect)
        wait_until(lambda: is_provided(other))
        store_prompt(other, PROMPT)
        assert figure(tool, "memory_pages") == {"0": 16}
        other.close()


def test_tools_can_ask_a_pool_that_no_engine_has_used(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options, "tool", None) as tool:
        assert tool.stats() == {}
        assert set((tool.verify() or {"": 1}).values()) == {0}
        assert len(tool.arena) == 0


def test_verify_finds_a_page_whose_bytes_changed(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client, connected(options, "tool", None) as tool:
        pages = store_prompt(client, PROMPT)
        found = tool.verify()
        assert found is not None and (found["right_pages"], found["wrong_pages"]) == (pages, 0)
        match = first_match(client)
        ref = match.pages[0].refs[3]
        client.arena[ref.offset + 99] ^= 1
        found = tool.verify()
        assert found is not None and (found["right_pages"], found["wrong_pages"]) == (pages - 1, 1)
        assert state_of(client, ref.slot) is PageState.FAILED
        assert not client.intact(match.epoch, [ref])
        assert first_match(client).usable_tokens == 96
        client.unpin(match.pin)
        assert state_of(client, ref.slot) is PageState.FREE


def test_clear_leaves_what_is_in_use(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client, connected(options, "tool", None) as tool:
        pages = store_prompt(client, PROMPT)
        match = first_match(client)
        pinned = sum(len(each.refs) for each in match.pages)
        assert tool.clear() == {"dropped_pages": pages - pinned}
        client.unpin(match.pin)
        assert tool.clear() == {"dropped_pages": pinned}
        assert figure(tool, "used_bytes") == 0


def test_superseded_states_go_unless_they_were_hit(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        store_prompt(client, PROMPT)
        client.unpin(first_match(client).pin)
        states = [page for page, _ in pages_of(HYBRID, PROMPT) if page[-1] == 1]
        client.discard(states)
        assert figure(client, "memory_pages")["1"] == 1


def test_eight_sessions_at_once(tmp_path: Path) -> None:
    """Engines in threads store and load prompts that share a beginning, in a pool too small for all of them."""
    options = pool_options(tmp_path, 2 * MIB)
    prompts = [[*range(1, 97), *range(1000 * each, 1000 * each + 96)] for each in range(1, 9)]
    loaded = [0] * 8

    def work(number: int) -> None:
        generator = random.Random(number)
        with connected(options, engine_id=str(number)) as client:
            for _ in range(40):
                prompt = prompts[generator.randrange(8)]
                store_prompt(client, prompt)
                chain = chain_of(HYBRID, prompt)
                match = client.match(packed_chain(chain), 0, 192, whole=True, tenant=TENANT, pin=True)
                assert match is not None
                for group, first, refs in match.pages:
                    block_tokens = HYBRID.group(group).block_tokens
                    for block, ref in enumerate(refs, first):
                        page = page_id(chain.key_at((block + 1) * block_tokens), group)
                        assert read_part(client, ref, group) == part_of(HYBRID, page)
                assert client.intact(match.epoch, [ref for each in match.pages for ref in each.refs])
                loaded[number] += match.usable_tokens
                if match.pin:
                    client.unpin(match.pin)

    with running_daemon(options), ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert min(loaded) > 0


def test_a_scheduler_takes_the_pages_of_its_own_engines_workers(tmp_path: Path) -> None:
    """Not those of a pool that serves another engine's model."""
    options = pool_options(tmp_path)
    with (
        running_daemon(options),
        connected(options, "worker", engine_id="another"),
        connected(options, "worker", engine_id="one") as worker,
        connected(options, "scheduler", None, engine_id="one") as scheduler,
    ):
        assert scheduler.geometry == HYBRID
        assert scheduler.epoch == worker.epoch
        third = PoolClient(options.socket, "scheduler", None, engine_id="third")
        assert not third.connect()
        assert third.match(b"", 0, 100, whole=True, tenant=TENANT, pin=True) is None
        with connected(options, "worker", engine_id="third"):
            wait_until(third.connect)
        third.close()


def test_a_scheduler_that_came_first_does_not_keep_its_own_worker_out(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options):
        with connected(options) as other:
            store_prompt(other, PROMPT)
        scheduler = PoolClient(options.socket, "scheduler", None)
        assert not scheduler.connect()
        with connected(options, "worker", DENSE):
            wait_until(lambda: scheduler.geometry == DENSE)
        scheduler.close()


@pytest.mark.parametrize(
    ("characters", "is_stored"), [(100, True), (700, True), (800, False), (100_000, False)]
)
def test_a_salt_too_long_for_a_page_keeps_it_out(tmp_path: Path, characters: int, is_stored: bool) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client:
        pages = pages_of(HYBRID, PROMPT[:32], "x" * characters)
        refs = client.reserve(TENANT, pages)
        assert refs is not None
        assert [ref is not None for ref in refs] == [is_stored, True, True, True]


def test_the_tail_of_a_prefix_goes_before_its_head(tmp_path: Path) -> None:
    """And what was used goes after what was not."""
    options = pool_options(tmp_path, MIB)
    with running_daemon(options), connected(options, geometry=DENSE) as client:
        used, unused = [*range(1, 513)], [*range(2001, 2513)]
        store_prompt(client, used)
        store_prompt(client, unused)
        chain = packed_chain(chain_of(DENSE, used))
        match = client.match(chain, 0, 512, whole=True, tenant=TENANT, pin=True)
        assert match is not None and match.usable_tokens == 512
        client.unpin(match.pin)
        lengths = []
        for number in range(5, 25):
            store_prompt(client, [*range(1000 * number, 1000 * number + 128)])
            found = [
                client.match(
                    packed_chain(chain_of(DENSE, each)), 0, 512, whole=True, tenant=TENANT, pin=False
                )
                for each in (used, unused)
            ]
            lengths.append([match.usable_tokens for match in found if match is not None])
        assert all(length == 512 for length, other in lengths if other > 0)
        assert sorted(lengths, reverse=True) == lengths
        assert any(0 < other < 512 for _, other in lengths)


def test_a_socket_path_that_is_too_long_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = pool_options(tmp_path / ("x" * 100))
    with pytest.raises(PoolError, match="cannot be made: AF_UNIX path too long"), running_daemon(options):
        pass
    client = PoolClient(options.socket, "tool", None)
    assert not client.connect()
    client.close()
    assert "is not used for now: AF_UNIX path too long" in caplog.text


@pytest.mark.slow("fills the buffers of a socket")
def test_a_client_that_reads_no_answers_is_not_read(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    opening = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, "tool", 0, bytes(8), None])
    asking = msgspec.msgpack.encode(["stats"])
    with (
        running_daemon(options) as daemon,
        connected(options),
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(str(options.socket))
        client.sendall(len(opening).to_bytes(4, "little") + opening)
        question, asked = len(asking).to_bytes(4, "little") + asking, 0
        client.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while asked < 64 * MIB:
                asked += client.send(question * 10_000)

        def buffered(pool: PoolDaemon) -> int:
            return max(len(each.received) for each in pool._connections)

        most = daemon.in_loop(buffered)
        assert isinstance(most, int) and most <= MIB, f"{most} bytes wait, {asked} were sent"
        # It is served again as soon as it reads; what was cut in the middle is the rest of a question.
        client.settimeout(WAIT_S)
        answers, wanted = 0, 1 + asked // len(question)
        received = bytearray()
        while answers < wanted:
            while len(received) >= 4 and len(received) >= 4 + int.from_bytes(received[:4], "little"):
                del received[: 4 + int.from_bytes(received[:4], "little")]
                answers += 1
            if answers < wanted:
                received += client.recv(1 << 18)
        assert daemon.in_loop(buffered) < len(question)


def test_a_tool_brings_no_geometry(tmp_path: Path) -> None:
    """Else whoever looks would have the pool drop all that it holds."""
    options = pool_options(tmp_path)
    with running_daemon(options):
        with connected(options) as client:
            store_prompt(client, PROMPT)
        opening = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, "tool", 0, bytes(8), DENSE.encode()])
        with socket.socket(socket.AF_UNIX) as tool:
            tool.settimeout(WAIT_S)
            tool.connect(str(options.socket))
            tool.sendall(len(opening).to_bytes(4, "little") + opening)
            assert b"a tool takes the geometry that the pool has" in tool.recv(4096)
        with connected(options) as client:
            assert first_match(client).usable_tokens == 256


def test_connections_without_end_keep_no_engine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_daemon, "_MOST_CONNECTIONS", 4)
    options = pool_options(tmp_path)
    tool = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, "tool", 0, bytes(8), None])
    with running_daemon(options) as daemon, connected(options) as client, contextlib.ExitStack() as stack:
        for number in range(20):
            connection = stack.enter_context(raw_connection(options))
            if number % 2:
                assert b"opened" in exchanged(connection, tool)
        with connected(options) as another:
            store_prompt(another, PROMPT)
            assert first_match(client).usable_tokens == 256
            assert daemon.in_loop(lambda pool: len(pool._connections)) == 4


def test_a_pool_full_of_engines_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_daemon, "_MOST_CONNECTIONS", 1)
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as client, raw_connection(options) as connection:
        assert connection.recv(100) == b""
        store_prompt(client, PROMPT)


def test_without_a_descriptor_nobody_is_accepted_for_a_moment(tmp_path: Path) -> None:
    """A listener stays ready: the loop did nothing else, as fast as it can."""

    one, other = socket.socketpair()

    class Full:
        times = 0

        def fileno(self) -> int:
            return one.fileno()

        def accept(self) -> None:
            self.times += 1
            raise OSError(errno.EMFILE, "Too many open files")

    async def heard() -> int:
        full: Any = Full()
        daemon = PoolDaemon(pool_options(tmp_path))
        asyncio.get_running_loop().add_reader(one.fileno(), daemon._accept, full)
        other.send(b"x")
        for _ in range(50):
            await asyncio.sleep(0)
        return int(full.times)

    with one, other:
        assert asyncio.run(heard()) == 1


def test_half_messages_of_many_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_daemon, "_MOST_HELD_BYTES", 3 * MIB)
    options = pool_options(tmp_path)
    opening = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, "tool", 0, bytes(8), None])
    with running_daemon(options) as daemon, connected(options) as client:
        with raw_connection(options) as one, raw_connection(options) as other:
            for connection in (one, other):
                assert b"opened" in exchanged(connection, opening)
            half = (16 * MIB).to_bytes(4, "little") + bytes(2 * MIB)
            one.sendall(half)

            def held(pool: PoolDaemon) -> int:
                return sum(len(each.received) for each in pool._connections)

            wait_until(lambda: daemon.in_loop(held) == len(half))
            with contextlib.suppress(OSError):
                other.sendall(half)
            with contextlib.suppress(ConnectionResetError):
                assert b"has no memory for this message" in other.recv(4096)
            wait_until(lambda: daemon.in_loop(held) == len(half))
        store_prompt(client, PROMPT)
        assert first_match(client).usable_tokens == 256


def test_sessions_that_are_lost_without_end_are_kept_once(tmp_path: Path) -> None:
    options = pool_options(tmp_path)

    def lose(engine: int) -> bytes:
        opening = ["open", PROTOCOL_VERSION, "worker", 0, engine.to_bytes(8), HYBRID.encode()]
        with raw_connection(options) as connection:
            return exchanged(connection, msgspec.msgpack.encode(opening))

    with running_daemon(options) as daemon, connected(options) as client:
        lost = lambda pool: len(pool._lost)  # noqa: E731
        for _ in range(100):
            assert b"opened" in lose(1)
        wait_until(lambda: daemon.in_loop(lost) == 1)
        for engine in range(2, 65):
            assert b"opened" in lose(engine)
            wait_until(lambda engine=engine: daemon.in_loop(lost) == engine)  # type: ignore[misc]
        assert b"64 sessions of this process ended without a goodbye" in lose(65)
        store_prompt(client, PROMPT)


def test_matches_that_are_never_given_back_end_their_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_store, "_MOST_PINS", 5)
    options = pool_options(tmp_path)
    opening = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, "scheduler", 0, bytes(8), HYBRID.encode()])
    chain = packed_chain(chain_of(HYBRID, PROMPT))
    with running_daemon(options) as daemon, connected(options) as client:
        store_prompt(client, PROMPT)
        with raw_connection(options) as connection:
            assert b"opened" in exchanged(connection, opening)
            asking = msgspec.msgpack.encode(["match", chain, 0, 256, True, TENANT, True])
            for _ in range(5):
                assert b"matched" in exchanged(connection, asking)
            assert b"none is given back" in exchanged(connection, asking)
        wait_until(lambda: client.stats()["pinned_pages"] == 0)  # type: ignore[index]
        assert daemon.in_loop(lambda pool: len(pool._connections)) == 1


def test_pages_are_verified_for_one_who_asks_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = pool_options(tmp_path)
    at_once: list[int] = []
    under_way = 0

    async def counted(*_: object) -> tuple[int, int]:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return 0, 0

    with running_daemon(options), connected(options) as client, ThreadPoolExecutor(8) as threads:
        store_prompt(client, PROMPT)
        monkeypatch.setattr(pool_daemon, "verify_pages", counted)
        with contextlib.ExitStack() as stack:
            tools = [stack.enter_context(connected(options, "tool", None)) for _ in range(8)]
            assert len(list(threads.map(lambda tool: tool.verify(), tools))) == 8
    assert at_once == [1] * 8


def test_who_has_no_session_sends_no_long_message(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), raw_connection(options) as connection:
        connection.sendall((2 * MIB).to_bytes(4, "little"))
        assert b"a message of 2097152 bytes is none of the pool's" in connection.recv(4096)
