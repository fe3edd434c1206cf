"""What a daemon that was killed leaves to the next one."""

import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from prfaas.core.pool.keys import page_id
from prfaas.serving.pool.arena import ArenaLayout
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import DaemonOptions
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PoolMatch

from .pool_daemon import (
    DENSE,
    HYBRID,
    MIB,
    TENANT,
    WAIT_S,
    chain_of,
    connected,
    daemon_process,
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
from .stepped_ssd import RecordedEvents, SteppedSsd

PROMPT = list(range(1, 257))


@pytest.fixture
def options(tmp_path: Path) -> DaemonOptions:
    return pool_options(tmp_path, keep_arena=True)


def killed_after_storing(options: DaemonOptions) -> int:
    """A daemon that was killed with pages in its arena. Returns its epoch."""
    with daemon_process(options) as process, connected(options) as client:
        store_prompt(client, PROMPT)
        epoch = client.epoch
        process.kill()
        process.join(WAIT_S)
        return epoch


def found(client: PoolClient) -> PoolMatch:
    match = client.match(packed_chain(chain_of(HYBRID, PROMPT)), 0, 256, whole=True, tenant=TENANT, pin=True)
    assert match is not None
    return match


def assert_bytes_are_right(client: PoolClient, match: PoolMatch) -> None:
    chain = chain_of(HYBRID, PROMPT)
    for group, first, refs in match.pages:
        for block, ref in enumerate(refs, first):
            page = page_id(chain.key_at((block + 1) * HYBRID.group(group).block_tokens), group)
            assert read_part(client, ref, group) == part_of(HYBRID, page)


def test_pages_are_back_after_a_kill_in_a_new_epoch(options: DaemonOptions) -> None:
    epoch = killed_after_storing(options)
    events = RecordedEvents()
    with running_daemon(options, events=events), connected(options) as client:
        assert client.epoch > epoch
        match = found(client)
        assert match.usable_tokens == 256
        assert_bytes_are_right(client, match)
        assert events.held == {(page, "memory") for page, _ in pages_of(HYBRID, PROMPT)}
        assert events.identities == dict(pages_of(HYBRID, PROMPT))
        # They have been verified soon, and then readers need not.
        refs = [ref for each in match.pages for ref in each.refs]
        wait_until(lambda: not client.checksums_to_verify(refs))


def test_a_client_finds_the_new_daemon_and_distrusts_what_it_copied(options: DaemonOptions) -> None:
    with daemon_process(options) as process, connected(options) as client:
        store_prompt(client, PROMPT)
        match = found(client)
        refs = [ref for each in match.pages for ref in each.refs]
        assert client.intact(match.epoch, refs)
        process.kill()
        process.join(WAIT_S)
        # Nobody reuses the slots while no daemon is there; the next one may.
        with daemon_process(options):
            chain = packed_chain(chain_of(HYBRID, PROMPT))
            wait_until(lambda: client.match(chain, 0, 256, whole=True, tenant=TENANT, pin=False) is not None)
            assert client.epoch > match.epoch
            assert not client.intact(match.epoch, refs)
            assert found(client).usable_tokens == 256


def test_slots_of_a_writer_that_lives_wait_for_its_end(options: DaemonOptions) -> None:
    with daemon_process(options) as daemon, writing_engine(options) as (engine, refs):
        # It cannot connect again, as if it hung.
        os.kill(engine.pid, signal.SIGSTOP)
        daemon.kill()
        daemon.join(WAIT_S)
        with running_daemon(options), connected(options) as client:
            assert (client.stats() or {})["writing_pages"] == len(refs)
            pages = pages_of(HYBRID, PROMPT)[:4]
            given = client.reserve(TENANT, pages)
            assert given is not None and all(given)
            old = {ref.slot & 0xFFFFFFFF for ref in refs}
            assert old.isdisjoint(ref.slot & 0xFFFFFFFF for ref in given if ref)
            client.abort([ref for ref in given if ref])
            engine.kill()
            wait_until(lambda: (client.stats() or {})["writing_pages"] == 0)


def test_slots_of_a_writer_are_free_once_it_has_connected_again(options: DaemonOptions) -> None:
    with daemon_process(options) as daemon, writing_engine(options) as (_, refs):
        daemon.kill()
        daemon.join(WAIT_S)
        with running_daemon(options), connected(options, "tool", None) as tool:
            wait_until(lambda: (tool.stats() or {})["engine_sessions"] == 2)
            assert (tool.stats() or {})["writing_pages"] == 0
            assert len(refs) > 0


def test_a_page_that_rotted_meanwhile_is_noticed(options: DaemonOptions) -> None:
    killed_after_storing(options)
    content = bytearray(options.arena.read_bytes())
    wrong = part_of(HYBRID, pages_of(HYBRID, PROMPT)[3][0])
    at = content.index(wrong)
    with options.arena.open("r+b") as file:
        file.seek(at + 77)
        file.write(bytes((wrong[77] ^ 1,)))
    with running_daemon(options), connected(options) as client:
        wait_until(lambda: (client.stats() or {})["wrong_pages"] == 1)
        assert found(client).usable_tokens == 96


def damaged(options: DaemonOptions, how: str) -> None:
    match how:
        case "deleted":
            options.arena.unlink()
        case "empty":
            os.truncate(options.arena, 0)
        case "truncated":
            os.truncate(options.arena, options.arena.stat().st_size - 4096)
        case "no header":
            with options.arena.open("r+b") as file:
                file.write(bytes(4096))
        case "another version":
            with options.arena.open("r+b") as file:
                file.seek(8)
                file.write(struct.pack("<I", 99))
        case "damaged geometry":
            content = options.arena.read_bytes()[:4096]
            with options.arena.open("r+b") as file:
                file.seek(content.index(b"tiny hybrid"))
                file.write(b"x")
        case "open to others":
            options.arena.chmod(0o644)
        case "a link":
            options.arena.rename(options.arena.with_suffix(".moved"))
            options.arena.symlink_to(options.arena.with_suffix(".moved"))
        case "garbage":
            size = options.arena.stat().st_size
            options.arena.write_bytes(os.urandom(size))


@pytest.mark.parametrize(
    "how",
    [
        "deleted", "empty", "truncated", "no header", "another version", "damaged geometry", "open to others",
        "a link", "garbage",
    ],
)  # fmt: skip
def test_an_arena_of_no_use_is_replaced(
    options: DaemonOptions, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    killed_after_storing(options)
    damaged(options, how)
    with caplog.at_level("INFO"), running_daemon(options), connected(options) as client:
        assert caplog.text.count("the pool starts empty") == 1
        assert found(client).usable_tokens == 0
        store_prompt(client, PROMPT)
        assert found(client).usable_tokens == 256


def test_an_arena_of_another_size_is_replaced(options: DaemonOptions) -> None:
    killed_after_storing(options)
    larger = DaemonOptions(options.socket, options.arena, 9 * MIB)
    with running_daemon(larger), connected(larger) as client:
        assert found(client).usable_tokens == 0
        assert 8 * MIB < options.arena.stat().st_size <= 9 * MIB


@pytest.mark.parametrize("seed", range(12))
def test_a_page_table_full_of_garbage_is_survived(options: DaemonOptions, seed: int) -> None:
    """Whatever stands in the rows: what is served has the bytes of its checksums, and all slots can be used."""
    killed_after_storing(options)
    layout = ArenaLayout.of(HYBRID, options.memory_bytes)
    generator = random.Random(seed)
    with options.arena.open("r+b") as file:
        for _ in range(200):
            file.seek(generator.randrange(layout.table_at, layout.slabs_at))
            file.write(bytes((generator.randrange(9 if generator.random() < 0.5 else 256),)))
    with running_daemon(options), connected(options) as client:
        match = found(client)
        for each in match.pages:
            for ref in each.refs:
                wait_until(lambda ref=ref: not client.checksums_to_verify([ref]))  # type: ignore[misc]
        if client.intact(match.epoch, [ref for each in match.pages for ref in each.refs]):
            assert_bytes_are_right(client, match)
        client.unpin(match.pin)
        for number in range(40):
            store_prompt(client, [*range(10_000 * number, 10_000 * number + 256)])
        assert client.stats() is not None


def test_pages_on_ssd_are_known_before_they_are_read(options: DaemonOptions) -> None:
    tiers: list[SteppedSsd] = []

    def make_ssd(geometry: object, view: memoryview) -> SteppedSsd:
        tier = SteppedSsd(HYBRID, view)
        if tiers:
            tier.pages = tiers[0].pages
        tiers.append(tier)
        return tier

    with running_daemon(options, make_ssd=lambda _: make_ssd) as daemon, connected(options) as client:
        pages = store_prompt(client, PROMPT)
        daemon.in_loop(lambda _: [tiers[0].step() for _ in range(pages)])
    options.arena.unlink()
    events = RecordedEvents()
    with (
        running_daemon(options, events=events, make_ssd=lambda _: make_ssd) as daemon,
        connected(options) as client,
    ):
        assert events.held == {(page, "ssd") for page, _ in pages_of(HYBRID, PROMPT)}
        match = found(client)
        assert (match.usable_tokens, match.memory_tokens) == (256, 0)
        refs = [ref for each in match.pages for ref in each.refs]
        assert {state_of(client, ref.slot) for ref in refs} == {PageState.PROMOTING}
        daemon.in_loop(lambda _: [tiers[1].step() for _ in refs])
        assert client.intact(match.epoch, refs)
        assert_bytes_are_right(client, match)


@pytest.fixture
def stopped_daemon(options: DaemonOptions) -> Iterator[BaseProcess]:
    with daemon_process(options) as process:
        yield process
        os.kill(process.pid, signal.SIGCONT)


def test_a_daemon_that_hangs_costs_one_timeout(options: DaemonOptions, stopped_daemon: BaseProcess) -> None:
    client = PoolClient(options.socket, "worker", HYBRID, timeout_s=1.0)
    wait_until(client.connect)
    wait_until(lambda: is_provided(client))
    store_prompt(client, PROMPT)
    os.kill(stopped_daemon.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    chain = packed_chain(chain_of(HYBRID, PROMPT))
    for _ in range(1000):
        assert client.match(chain, 0, 256, whole=True, tenant=TENANT, pin=True) is None
    assert client.reserve(TENANT, pages_of(HYBRID, PROMPT)) is None
    assert (client.stats(), client.epoch) == (None, 0)
    assert time.monotonic() - started_s < 30
    os.kill(stopped_daemon.pid, signal.SIGCONT)
    wait_until(lambda: client.match(chain, 0, 256, whole=True, tenant=TENANT, pin=False) is not None)
    client.close()


def test_what_was_written_while_the_connection_was_lost_is_committed_later(options: DaemonOptions) -> None:
    with (
        running_daemon(options) as daemon,
        connected(options, "scheduler") as scheduler,
        connected(options, "worker") as worker,
    ):
        pages = pages_of(HYBRID, PROMPT)
        refs = scheduler.reserve(TENANT, pages)
        assert refs is not None
        written = [
            (ref, write_part(worker, ref, page)) for ref, (page, _) in zip(refs, pages, strict=True) if ref
        ]
        # Without goodbye; the daemon must not take the new session for the end of what it has written.
        daemon.in_loop(
            lambda each: [c.close() for c in list(each._connections) if c.session.kind == "worker"]
        )
        worker.commit(written)
        wait_until(lambda: worker.epoch != 0)
        assert found(scheduler).usable_tokens == 256


def test_no_session_is_opened_while_a_copy_runs(options: DaemonOptions) -> None:
    with daemon_process(options) as process, connected(options, "worker") as client:
        with client.writing(client.epoch) as allowed:
            assert allowed
            process.kill()
            process.join(WAIT_S)
            with daemon_process(options):
                assert client.stats() is None
                assert not client.connect()
                with client.writing(client.epoch) as allowed:
                    assert not allowed
        assert state_of(client, 0) is PageState.FREE


def test_engines_of_another_model_replace_what_is_left(options: DaemonOptions) -> None:
    killed_after_storing(options)
    with running_daemon(options), connected(options, geometry=DENSE) as client:
        assert (client.stats() or {})["memory_pages"] == {"0": 0}
