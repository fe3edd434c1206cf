"""Pages on their way to SSD, with a real daemon and a real file."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.ssd_tier import FileTier, SsdFactory, SsdOptions

from .pool_daemon import (
    MIB,
    TENANT,
    chain_of,
    connected,
    packed_chain,
    pages_of,
    part_of,
    pool_options,
    running_daemon,
    state_of,
    wait_until,
    write_part,
)

GEOMETRY = PoolGeometry(
    "spilled",
    1,
    (PageGroup(0, GroupKind.FULL, 16, 0, 8192), PageGroup(1, GroupKind.STATE, 16, 0, 32768)),
)


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def on_ssd(
    folder: Path, ssd_bytes: int, share: float = 1.0
) -> Callable[[asyncio.AbstractEventLoop], SsdFactory]:
    options = SsdOptions(folder, ssd_bytes, share)
    return lambda loop: (
        lambda geometry, arena: FileTier(geometry, arena, options, LruEviction, partial(in_loop, loop))
    )


def prompt(number: int, blocks: int = 4) -> list[int]:
    return [number * 1000 + token for token in range(16 * blocks)]


def store(client: PoolClient, token_ids: list[int], tenant: bytes = TENANT) -> int:
    """Store all pages of a prompt for which there is room. Returns how many."""
    pages = pages_of(GEOMETRY, token_ids)
    refs = client.reserve(tenant, pages)
    assert refs is not None
    done = [
        (ref, write_part(client, ref, page))
        for (page, _), ref in zip(pages, refs, strict=True)
        if ref is not None
    ]
    client.commit(done)
    return len(done)


def load(client: PoolClient, token_ids: list[int]) -> int:
    """Load what the pool has of a prompt and compare it. Returns its tokens."""
    chain = chain_of(GEOMETRY, token_ids)
    match = client.match(packed_chain(chain), 0, len(token_ids), whole=True, tenant=TENANT, pin=True)
    assert match is not None
    for group, first, refs in match.pages:
        for block, ref in enumerate(refs, first):
            wait_until(lambda slot=ref.slot: state_of(client, slot) is not PageState.PROMOTING)
            page = chain.key_at((block + 1) * 16) + bytes((group,))
            assert state_of(client, ref.slot).is_readable
            part = part_of(GEOMETRY, page)
            assert bytes(client.arena[ref.offset : ref.offset + len(part)]) == part
    client.unpin(match.pin)
    return match.usable_tokens


def figure(client: PoolClient, name: str) -> int:
    figures = client.stats()
    assert figures is not None
    return int(figures[name])


def written_all(client: PoolClient) -> bool:
    figures = client.stats()
    assert figures is not None
    return bool(figures["ssd_pages"] == figures["memory_pages"])


def test_what_memory_has_no_room_for_comes_back_from_ssd(tmp_path: Path) -> None:
    options = pool_options(tmp_path, 1 * MIB)
    with (
        running_daemon(options, make_ssd=on_ssd(tmp_path / "disk", 16 * MIB)),
        connected(options, geometry=GEOMETRY) as client,
    ):
        for number in range(20):
            assert store(client, prompt(number)) == 8
            wait_until(lambda: written_all(client) or figure(client, "ssd_queued_pages") == 0)
        assert figure(client, "evicted_pages") > 0
        assert [load(client, prompt(number)) for number in range(20)] == [64] * 20
        assert figure(client, "promoted_pages") > 0


def test_a_burst_larger_than_the_queue_reaches_the_disk(tmp_path: Path) -> None:
    options = pool_options(tmp_path, 4 * MIB)
    with (
        running_daemon(options, make_ssd=on_ssd(tmp_path / "disk", 64 * MIB)),
        connected(options, geometry=GEOMETRY) as client,
    ):
        for number in range(14):
            assert store(client, prompt(number)) == 8
        wait_until(lambda: written_all(client))
        assert figure(client, "ssd_not_written") == 0


def test_the_pool_outlives_its_arena(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    disk = on_ssd(tmp_path / "disk", 16 * MIB)
    with running_daemon(options, make_ssd=disk), connected(options, geometry=GEOMETRY) as client:
        for number in range(5):
            store(client, prompt(number))
        wait_until(lambda: written_all(client))
    assert not options.arena.exists()
    with running_daemon(options, make_ssd=disk), connected(options, geometry=GEOMETRY) as client:
        assert [load(client, prompt(number)) for number in range(5)] == [64] * 5
        verified = client.verify()
        assert verified is not None
        assert (verified["ssd_right_pages"], verified["ssd_wrong_pages"]) == (40, 0)
        assert (verified["right_pages"] > 0, verified["wrong_pages"]) == (True, 0)


def test_pages_of_before_are_written_once_the_disk_works(tmp_path: Path) -> None:
    options = pool_options(tmp_path, keep_arena=True)
    with running_daemon(options), connected(options, geometry=GEOMETRY) as client:
        store(client, prompt(1))
    with (
        running_daemon(options, make_ssd=on_ssd(tmp_path / "disk", 16 * MIB)),
        connected(options, geometry=GEOMETRY) as client,
    ):
        wait_until(lambda: written_all(client))
        assert figure(client, "ssd_written_bytes") > 0


def test_cleared_pages_are_gone_from_memory_and_disk(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    disk = on_ssd(tmp_path / "disk", 16 * MIB)
    with running_daemon(options, make_ssd=disk), connected(options, geometry=GEOMETRY) as client:
        store(client, prompt(1))
        wait_until(lambda: written_all(client))
        store(client, prompt(2))
        assert client.clear() is not None
        wait_until(lambda: figure(client, "used_bytes") == 0)
        assert load(client, prompt(1)) == load(client, prompt(2)) == 0
    with running_daemon(options, make_ssd=disk), connected(options, geometry=GEOMETRY) as client:
        assert load(client, prompt(1)) == load(client, prompt(2)) == 0


def test_a_tenant_above_its_share_does_not_push_others_out(tmp_path: Path) -> None:
    options = pool_options(tmp_path, 4 * MIB)
    with (
        running_daemon(options, tenant_share=0.5) as _,
        connected(options, geometry=GEOMETRY) as client,
    ):
        assert [store(client, prompt(number), b"quiet") for number in range(5)] == [8] * 5
        for number in itertools.islice(itertools.count(100), 60):
            store(client, prompt(number), b"loud")
        assert figure(client, "evicted_pages") > 0
        assert [load(client, prompt(number)) for number in range(5)] == [64] * 5
