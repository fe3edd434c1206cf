"""Prefixes from pool to pool over real connections: byte for byte, head first, and nothing pinned or staged after."""

import asyncio
import random
import secrets
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ports import free_ports

from prfaas.core.deployment import GATEWAY, Deployment, load_deployment
from prfaas.core.deployment.peers import peers_of, plain_peers_of, sources_of
from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.core.pool.keys import tenant_id
from prfaas.core.pool.prefix_pages import PrefixPages, batches
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.certificates import identity_of
from prfaas.serving.engines.preparation import ensure_certificates
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.pool.arena import ArenaLayout, create_arena
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.pool.lending import PinnedPages
from prfaas.serving.pool.neighbours import PoolNeighbours
from prfaas.serving.pool.page_table import PageState, row_of
from prfaas.serving.pool.running import RunningPools
from prfaas.serving.pool.store import PageStore
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.requests import CopyOrder, CopyResult, PullAnswer, PullOrder
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TransferAttributes,
    TransferClass,
    prompt_digest,
)
from prfaas.serving.transport.protocol.wire import read_body

from .stepped_ssd import SteppedSsd

KEY = bytes(range(32))
KIB = 1024
TENANT = tenant_id("salt")
FULL = PageGroup(0, GroupKind.FULL, 16, 0, 4 * KIB)
WINDOW = PageGroup(1, GroupKind.WINDOW, 32, 64, 2 * KIB)
STATE = PageGroup(2, GroupKind.STATE, 32, 0, 20 * KIB)
DENSE = PoolGeometry("dense", 2, (FULL,))
HYBRID = PoolGeometry("hybrid", 2, (FULL, WINDOW, STATE))
PROMPT = random.Random(7).choices(range(50_000), k=2000)


def deployment_of(folder: Path, *, encryption: bool = False, staging: str = "1 MiB") -> Deployment:
    """Three pools: two of the cluster `home`, one of `far`, which has a link to and from there."""
    ports = iter(free_ports(9))

    def instance(name: str, host: str) -> dict[str, Any]:
        roles = ["prefill"] if name.startswith("far") else ["prefill", "decode"]
        return {"name": name, "roles": roles, "host": host, "http_port": next(ports), "kv_port": next(ports)}

    def cluster(name: str, kind: str, hosts: Sequence[str]) -> dict[str, Any]:
        return {
            "name": name,
            "kind": kind,
            "hardware": "h200",
            "pool": {"memory": "64 MiB", "kv_port": next(ports)},
            "instances": [instance(f"{name}-{number}", host) for number, host in enumerate(hosts)],
        }

    document = {
        "name": "pools",
        "model": {"served_name": "m", "path": "m", "max_model_len": 4000},
        "clusters": [
            cluster("far", "prfaas", ["127.0.0.1"]),
            cluster("home", "pd", ["127.0.0.2", "127.0.0.3"]),
        ],
        "links": [
            {"source": "far", "target": "home", "bandwidth": "8 Gbit/s", "encryption": encryption},
            {"source": "home", "target": "far", "bandwidth": "8 Gbit/s", "encryption": encryption},
        ],
        "transfer": {"silence_s": 1.0, "resume_s": 1.0, "progress_deadline_s": 2.0},
        "pool": {"staging": staging},
        "engine": {"transfer_block": "64 KiB", "staging": "1 MiB"},
    }
    path = folder / "pools.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_deployment(path, state_dir=folder / "state")


def make_store(
    folder: Path, geometry: PoolGeometry, memory_bytes: int = 24 << 20, *, has_ssd: bool = False
) -> PageStore:
    layout = ArenaLayout.of(geometry, memory_bytes)
    arena = create_arena(folder / f"arena-{random.getrandbits(48)}", layout, epoch=1)
    ssd = SteppedSsd(geometry, arena.view) if has_ssd else None
    store = PageStore(arena, TenantEviction(layout.pages_bytes, LruEviction), ssd=ssd)
    if ssd is not None:
        ssd.attach(store.dropped_by_ssd)
    for slab in range(layout.slabs):
        arena.provide(slab)
        store.memory.add_slab(slab)
    return store


def content(page_id: bytes, geometry: PoolGeometry) -> bytes:
    """What a page must hold, by its name."""
    return random.Random(page_id).randbytes(geometry.group(page_id[-1]).rank_bytes * geometry.ranks)


def fill(
    store: PageStore, pages: PrefixPages, leave_out: Callable[[int, int], bool] = lambda *_: False
) -> None:
    """Put the prefix into the store but for the pages (group, end) that are left out."""
    for page in pages.pages:
        if leave_out(page.group, page.end_tokens):
            continue
        (ref,) = store.reserve(TENANT, [(page.page_id, page.identity)])
        assert ref is not None
        data = content(page.page_id, store.geometry)
        store.memory.arena.view[ref.offset : ref.offset + len(data)] = data
        part = len(data) // store.geometry.ranks
        store.commit_all(
            ref, [xxhash.xxh3_64_intdigest(data[at : at + part]) for at in range(0, len(data), part)]
        )
        if isinstance(store.ssd, SteppedSsd):
            do_all(store.ssd)


def do_all(ssd: SteppedSsd) -> None:
    """Whatever waits to be written or read."""
    while ssd.waiting:
        ssd.waiting.pop(0)(True)


def held(store: PageStore, pages: PrefixPages) -> list[tuple[int, int]]:
    """Group and end of those pages that are there; each is checked byte for byte, and its identity."""
    found = []
    for page in pages.pages:
        (ref,) = store.pin([page.page_id])
        if ref is None:
            continue
        data = content(page.page_id, store.geometry)
        assert bytes(store.memory.arena.view[ref.offset : ref.offset + len(data)]) == data
        assert store.memory.table.state(ref.slot) is PageState.READY
        row = store.memory.table.read(row_of(ref.slot))
        assert row.tenant == TENANT
        assert store.memory.identity(store.memory.rows[row.row]) == page.identity
        store.unpin([ref])
        found.append((page.group, page.end_tokens))
    return found


@dataclass
class Pools:
    deployment: Deployment
    stores: dict[str, PageStore | None]
    neighbours: dict[str, PoolNeighbours] = field(default_factory=dict)
    gateway: dict[str, Observer] = field(default_factory=dict)

    async def open(self, *names: str) -> None:
        for name in names:
            pool = self.deployment.pool_named(name)
            made = PoolNeighbours(
                self.deployment,
                pool,
                KEY,
                identity_of(self.deployment, name),
                lambda name=name: self.stores[name],  # type: ignore[misc]
            )
            made.start()
            self.neighbours[name] = made
            tls = identity_of(self.deployment, GATEWAY) if pool.tls else None
            self.gateway[name] = Observer(GATEWAY, KEY, pool.host, pool.kv_port, name, tls, silence_s=1.0)

    def ticket(self, source: str, target: str, tokens: Sequence[int], **changes: Any) -> Ticket:
        values: dict[str, Any] = {
            "producer": source,
            "consumer": target,
            "num_tokens": len(tokens),
            "skip_tokens": 0,
            "prompt_digest": prompt_digest(tokens, "salt", "adapter"),
            "expires_at_s": time.time() + 30.0,
            "attributes": TransferAttributes(service=TransferClass(b"otherone", 1, background=True)),
            **changes,
        }
        return Ticket(transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES), **values)

    async def copy(
        self, source: str, target: str, tokens: Sequence[int], ticket: Ticket | None = None
    ) -> CopyResult:
        ticket = ticket or self.ticket(source, target, tokens)
        order = CopyOrder.of(ticket.seal(KEY), array("I", tokens), "salt", "adapter")
        return read_body(CopyResult, await self.gateway[target].request(ticket.transfer_id, order, 60.0))

    async def assert_clean(self) -> None:
        """No page is pinned or reserved, and no staging is used, soon after all is over."""
        until_s = time.monotonic() + 10.0
        while (left := self._left()) and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        assert not left

    def _left(self) -> list[str]:
        left = []
        for name, made in self.neighbours.items():
            figures, receiver = made.figures(), made.stats()["receiver"]
            left += [f"{name}: {what}" for what in ("running_copies", "lent_pinned_bytes") if figures[what]]
            left += [f"{name}: staging"] * bool(receiver["staging_used_blocks"])
            store = self.stores[name]
            if store is not None:
                left += [
                    f"{name}: {page.state} {page.pins}" for page in store.memory.rows.values() if page.in_use
                ]
        return left


def prefix(geometry: PoolGeometry, tokens: Sequence[int] = PROMPT) -> PrefixPages:
    return PrefixPages(geometry, tokens, "salt", "adapter")


def run(folder: Path, body: Callable[[Pools], Coroutine[Any, Any, None]], **options: Any) -> None:
    """`body` with all pools open, and everything closed after it."""
    geometries: dict[str, PoolGeometry | None] = options.pop("geometries", {})
    geometry = options.pop("geometry", HYBRID)
    memory: dict[str, int] = options.pop("memory", {})
    deployment = deployment_of(folder, **options)
    ensure_certificates(deployment, [pool.name for pool in deployment.pools])
    names = [pool.name for pool in deployment.pools]
    stores: dict[str, PageStore | None] = {}
    for name in names:
        of_pool = geometries.get(name, geometry)
        stores[name] = None if of_pool is None else make_store(folder, of_pool, memory.get(name, 24 << 20))

    async def main() -> None:
        async with opened(Pools(deployment, stores)) as pools:
            await pools.open(*names)
            await body(pools)
            await pools.assert_clean()

    asyncio.run(main())


@asynccontextmanager
async def opened(pools: Pools) -> AsyncIterator[Pools]:
    try:
        yield pools
    finally:
        for observer in pools.gateway.values():
            await observer.close()
        for made in pools.neighbours.values():
            await made.close()


def store_of(pools: Pools, name: str) -> PageStore:
    found = pools.stores[name]
    assert found is not None
    return found


@pytest.mark.parametrize("encryption", [False, True])
@pytest.mark.parametrize("source", ["home-pool-0", "far-pool"])
@pytest.mark.parametrize("geometry", [DENSE, HYBRID])
def test_a_prefix_comes_whole(tmp_path: Path, geometry: PoolGeometry, source: str, encryption: bool) -> None:
    pages = prefix(geometry)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, source), pages)
        result = await pools.copy(source, "home-pool-1", PROMPT)
        # 2000 tokens: 125 blocks of 16, or 62 of 32.
        end = 2000 if geometry is DENSE else 1984
        assert result == CopyResult(sum(page.nbytes for page in pages.pages), end, "")
        assert len(held(store_of(pools, "home-pool-1"), pages)) == len(pages.pages)
        # Once more: nothing is left to copy.
        assert await pools.copy(source, "home-pool-1", PROMPT) == CopyResult(0, end, "")
        assert len(held(store_of(pools, source), pages)) == len(pages.pages)

    run(tmp_path, body, geometry=geometry, encryption=encryption)


def test_a_prefix_larger_than_staging_comes_in_several_transfers(tmp_path: Path) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        assert (await pools.copy("far-pool", "home-pool-0", PROMPT)).usable_tokens == 2000
        assert pools.neighbours["far-pool"].figures()["pulls"] >= 8
        assert pools.neighbours["home-pool-0"].stats()["receiver"]["staging_peak_blocks"] <= 16
        assert len(held(store_of(pools, "home-pool-0"), pages)) == 125

    run(tmp_path, body, geometry=DENSE, staging="1 MiB")


def test_only_what_is_missing_comes(tmp_path: Path) -> None:
    pages = prefix(HYBRID)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        fill(store_of(pools, "home-pool-0"), pages, lambda group, end: group != 0 or end > 960)
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        here = 60 * 2 * FULL.rank_bytes
        assert result == CopyResult(sum(page.nbytes for page in pages.pages) - here, 1984, "")

    run(tmp_path, body)


def test_a_source_without_the_middle_leaves_a_usable_head(tmp_path: Path) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages, lambda _, end: end == 1008)
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        assert (result.word, result.usable_tokens) == ("gone", 992)
        assert result.copied_bytes >= 62 * 2 * FULL.rank_bytes

    run(tmp_path, body, geometry=DENSE)


def test_a_hybrid_source_without_the_state_sends_nothing_in_vain(tmp_path: Path) -> None:
    pages = prefix(HYBRID)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages, lambda group, _: group == STATE.index)
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        assert (result.word, result.usable_tokens, result.copied_bytes) == ("gone", 0, 0)

    run(tmp_path, body)


def test_damaged_pages_are_not_taken(tmp_path: Path) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        source = store_of(pools, "far-pool")
        fill(source, pages)
        (ref,) = source.pin([pages.pages[40].page_id])
        assert ref is not None
        source.memory.arena.view[ref.offset + 5] ^= 1
        source.unpin([ref])
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        assert (result.word, result.usable_tokens) == ("damaged", 640)
        assert (0, 656) not in held(store_of(pools, "home-pool-0"), pages)
        assert pools.neighbours["home-pool-0"].figures()["wrong_pages"] == 1

    run(tmp_path, body, geometry=DENSE)


@pytest.mark.parametrize("lost", [None, 656])
def test_pages_on_ssd_are_read_before_they_are_sent(tmp_path: Path, lost: int | None) -> None:
    """`lost`: where the block ends that cannot be read."""
    pages, others = prefix(DENSE), prefix(DENSE, PROMPT[::-1])

    async def body(pools: Pools) -> None:
        source = pools.stores["far-pool"] = make_store(tmp_path, DENSE, 1300 * KIB, has_ssd=True)
        ssd = source.ssd
        assert isinstance(ssd, SteppedSsd)
        for each in (pages, others):
            fill(source, each)
        wrong = [page.page_id for page in pages.pages if page.end_tokens == lost]
        assert sum(page_id[:-1] in source.held[0] for page_id in ssd.pages) == 250
        in_memory = [page for page in pages.pages if source.held[0][page.page_id[:-1]].slot >= 0]
        assert len(in_memory) < 50

        async def work() -> None:
            while True:
                do_all(ssd)
                for page_id in wrong:
                    ssd.pages.pop(page_id, None)
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        working.cancel()
        if lost is None:
            assert (result.usable_tokens, result.reason) == (2000, "")
            assert len(held(store_of(pools, "home-pool-0"), pages)) == 125
        else:
            assert (result.word, result.usable_tokens) == ("gone", lost - 16)
        do_all(ssd)

    run(tmp_path, body, geometry=DENSE)


def test_what_is_on_its_way_is_not_evicted(tmp_path: Path) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        source = store_of(pools, "far-pool")
        fill(source, pages)
        pools.neighbours["far-pool"]._sender.set_bandwidth("far->home", 8e6)
        copying = asyncio.create_task(pools.copy("far-pool", "home-pool-0", PROMPT))
        while not pools.neighbours["far-pool"].lender.pinned_bytes:
            await asyncio.sleep(0.01)
        # Others want all of the memory meanwhile, again and again. What is pinned stays, what is not may go.
        number = 0
        while not copying.done():
            number += 1
            other = prefix(DENSE, [number, *PROMPT[:400]])
            for page in other.pages:
                (ref,) = source.reserve(TENANT, [(page.page_id, page.identity)])
                if ref is not None:
                    source.memory.arena.view[ref.offset : ref.offset + 64] = bytes(64)
                    source.commit_all(ref, (0, 0))
            await asyncio.sleep(0.005)
        result = await copying
        # Every page that has come is what it was.
        assert len(held(store_of(pools, "home-pool-0"), pages)) * 16 == result.usable_tokens >= 16
        assert (result.word, pools.neighbours["home-pool-0"].figures()["wrong_pages"]) == ("gone", 0)

    run(tmp_path, body, geometry=DENSE, memory={"far-pool": 1200 * KIB})


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The path of a Unix socket has at most 107 bytes, and pytest's own directories have long names."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
        yield Path(name)


@pytest.mark.slow("pools as processes of their own")
def test_two_daemons_of_a_deployment(short_path: Path) -> None:
    """As `prfaas up` runs them: pages that an engine of one machine has stored are found on the other."""
    deployment = deployment_of(short_path, encryption=True)
    pages = prefix(HYBRID)
    with RunningPools(deployment) as pools:
        pools.wait_ready(60.0)
        here, there = (
            PoolClient(deployment.pool_socket(deployment.pool_named(name)), "scheduler", HYBRID)
            for name in ("far-pool", "home-pool-0")
        )
        ranks = [
            PoolClient(deployment.pool_socket(deployment.pool_named("far-pool")), "worker", HYBRID, rank)
            for rank in range(2)
        ]
        engines = [here, there, *ranks]
        try:
            assert all(engine.connect() for engine in engines)
            store_whole(here, ranks, pages)
            result = asyncio.run(copied(deployment))
            assert result == CopyResult(sum(page.nbytes for page in pages.pages), 1984, "")
            chain = pages._chain.packed(0, 2000 // 16)
            match = there.match(chain, 0, 2000, whole=True, tenant=TENANT, pin=True)
            assert match is not None and match.usable_tokens == 1984
            for group, _, refs in match.pages:
                wanted = [page for page in pages.pages if page.group == group]
                for page, ref in zip(wanted, refs, strict=True):
                    assert there.arena[ref.offset : ref.offset + page.nbytes].tobytes() == content(
                        page.page_id, HYBRID
                    )
            verified = there.verify()
            assert verified is not None
            there.unpin(match.pin)
        finally:
            for engine in engines:
                engine.close()


def store_whole(scheduler: PoolClient, ranks: Sequence[PoolClient], pages: PrefixPages) -> None:
    """As the scheduler and the workers of an engine store it. There may not be room for all at first."""
    left, until_s = list(pages.pages), time.monotonic() + 60.0
    while left and time.monotonic() < until_s:
        refs = scheduler.reserve(TENANT, [(page.page_id, page.identity) for page in left])
        assert refs is not None
        for page, ref in zip(left, refs, strict=True):
            if ref is not None:
                data, part = content(page.page_id, HYBRID), HYBRID.group(page.group).rank_bytes
                for rank, client in enumerate(ranks):
                    own, at = data[rank * part : (rank + 1) * part], ref.offset + rank * part
                    client.arena[at : at + part] = np.frombuffer(own, np.uint8)
                    client.commit([(ref, xxhash.xxh3_64_intdigest(own))])
        left = [page for page, ref in zip(left, refs, strict=True) if ref is None]
        time.sleep(0.05)
    assert not left


async def copied(deployment: Deployment) -> CopyResult:
    """A copy as the gateway orders it."""
    key, tls = load_key(deployment.security.key_file), identity_of(deployment, GATEWAY)
    copier = PoolCopier(RunningDeployment(deployment), key, KvPorts(GATEWAY, key, tls).of_pools(deployment))
    try:
        return await copier.copy(
            "far-pool", "home-pool-0", PROMPT, "salt", "adapter", TransferClass(), kv_bytes=1 << 20
        )
    finally:
        await copier.close()


def test_refusals_have_a_reason(tmp_path: Path) -> None:
    async def body(pools: Pools) -> None:
        copy = pools.copy
        # The pages of the two are different, or there are none yet.
        result = await copy("far-pool", "home-pool-0", PROMPT)
        assert result.reason.startswith(
            "refused: the pages of far-pool and home-pool-0 are of different models"
        )
        result = await copy("home-pool-0", "home-pool-1", PROMPT)
        assert result.reason == "refused: no engine has connected to home-pool-1 yet"
        assert (await copy("far-pool", "home-pool-0", PROMPT[:31])).word == "short"
        # Only what the gateway has sealed, for this pool, from one of its peers, and once.
        ticket = pools.ticket("far-pool", "home-pool-1", PROMPT)
        assert "this is home-pool-0" in (await copy("far-pool", "home-pool-0", PROMPT, ticket)).reason
        ticket = pools.ticket("elsewhere", "home-pool-0", PROMPT)
        assert "may get nothing from elsewhere" in (await copy("", "home-pool-0", PROMPT, ticket)).reason
        ticket = pools.ticket("far-pool", "home-pool-0", PROMPT)
        assert "another prefix" in (await copy("far-pool", "home-pool-0", PROMPT[1:], ticket)).reason
        await copy("far-pool", "home-pool-0", PROMPT, ticket)
        assert "used already" in (await copy("far-pool", "home-pool-0", PROMPT, ticket)).reason
        order = CopyOrder.of(ticket.seal(bytes(32)), [1], "", "")
        answer = await pools.gateway["home-pool-0"].request(ticket.transfer_id, order, 10.0)
        assert "this deployment's key" in read_body(CopyResult, answer).reason

    geometries = {"far-pool": replace(HYBRID, fingerprint="another"), "home-pool-1": None}
    run(tmp_path, body, geometries=geometries)


def test_nobody_but_the_target_may_pull(tmp_path: Path) -> None:
    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), prefix(HYBRID))
        ticket = pools.ticket("far-pool", "home-pool-0", PROMPT)
        order = PullOrder.of(ticket.seal(KEY), HYBRID.digest(), (prefix(HYBRID).pages[0].page_id,))
        at = pools.deployment.pool_named("far-pool")
        other = Observer("home-pool-1", KEY, at.host, at.kv_port, at.name)
        try:
            answer = read_body(PullAnswer, await other.request(ticket.transfer_id, order, 10.0))
        finally:
            await other.close()
        assert "home-pool-1 asks far-pool" in answer.reason
        assert not answer.checksums
        # The gateway never pulls: that is not even read.
        with pytest.raises(ConnectionError):
            await pools.gateway["far-pool"].request(ticket.transfer_id, order, 10.0)

    run(tmp_path, body)


@pytest.mark.parametrize(
    "dying",
    [
        pytest.param(
            "source", marks=pytest.mark.slow("a transfer that breaks in the middle is given up after seconds")
        ),
        "target",
        "source before the copy",
    ],
)
def test_one_of_the_two_dies(tmp_path: Path, dying: str) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        if dying == "source before the copy":
            await pools.neighbours.pop("far-pool").close()
            result = await pools.copy("far-pool", "home-pool-0", PROMPT)
            assert (result.word, result.usable_tokens) == ("source", 0)
            return
        # Slow enough that it dies in the middle.
        pools.neighbours["far-pool"]._sender.set_bandwidth("far->home", 4e6)
        copying = asyncio.create_task(pools.copy("far-pool", "home-pool-0", PROMPT))
        while not pools.neighbours["far-pool"].lender.pinned_bytes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await pools.neighbours.pop("far-pool" if dying == "source" else "home-pool-0").close()
        if dying == "source":
            result = await copying
            assert result.word in ("source", "transfer"), result
            # What had landed is whole.
            assert len(held(store_of(pools, "home-pool-0"), pages)) * 16 == result.usable_tokens < 2000
        else:
            with pytest.raises(ConnectionError):
                await copying

    run(tmp_path, body, geometry=DENSE)


def test_the_gateway_gives_a_copy_up(tmp_path: Path) -> None:
    pages = prefix(DENSE)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        pools.neighbours["far-pool"]._sender.set_bandwidth("far->home", 4e6)
        ticket = pools.ticket("far-pool", "home-pool-0", PROMPT)
        copying = asyncio.create_task(pools.copy("far-pool", "home-pool-0", PROMPT, ticket))
        while not pools.neighbours["far-pool"].lender.pinned_bytes:
            await asyncio.sleep(0.01)
        await pools.gateway["home-pool-0"].abandon(ticket.transfer_id, "the client left")
        assert (await copying).reason == "abandoned: the client left"

    run(tmp_path, body, geometry=DENSE)


def test_equal_copies_at_once_cross_once(tmp_path: Path) -> None:
    pages = prefix(HYBRID)

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        results = await asyncio.gather(*(pools.copy("far-pool", "home-pool-0", PROMPT) for _ in range(5)))
        assert {result.usable_tokens for result in results} == {1984}
        assert sum(result.copied_bytes for result in results) == sum(page.nbytes for page in pages.pages)
        # Others at the same time, in both directions.
        fill(store_of(pools, "home-pool-1"), prefix(HYBRID, PROMPT[500:]))
        results = await asyncio.gather(
            pools.copy("home-pool-1", "far-pool", PROMPT[500:]),
            pools.copy("home-pool-1", "home-pool-0", PROMPT[500:]),
            pools.copy("far-pool", "home-pool-1", PROMPT),
        )
        assert [result.usable_tokens for result in results] == [1472, 1472, 1984]

    run(tmp_path, body)


def test_a_pool_that_is_full_of_pinned_pages_takes_nothing(tmp_path: Path) -> None:
    pages, others = prefix(DENSE), prefix(DENSE, PROMPT[::-1])

    async def body(pools: Pools) -> None:
        fill(store_of(pools, "far-pool"), pages)
        target = store_of(pools, "home-pool-0")
        refs = []
        for page in others.pages:
            (ref,) = target.reserve(TENANT, [(page.page_id, page.identity)])
            if ref is None:
                break
            refs.append(ref)
        result = await pools.copy("far-pool", "home-pool-0", PROMPT)
        assert (result.word, result.usable_tokens) == ("full", 0)
        target.abort(refs)

    run(tmp_path, body, geometry=DENSE, memory={"home-pool-0": 256 * KIB})


def test_pages_of_another_size_than_staging_are_refused(tmp_path: Path) -> None:
    geometry = PoolGeometry("large", 2, (FULL, replace(STATE, rank_bytes=KIB << 10)))

    async def body(pools: Pools) -> None:
        assert (await pools.copy("far-pool", "home-pool-0", PROMPT)).word == "staging"

    run(tmp_path, body, geometry=geometry)


def test_who_is_whose_peer(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, encryption=True)
    far, first, second = deployment.pools
    assert [(way.member.name, way.path.link, way.path.encrypted) for way in peers_of(deployment, first)] == [
        ("far-pool", "home->far", True),
        ("home-pool-1", "home", False),
    ]
    assert [way.path.share_bits_per_s for way in peers_of(deployment, first)] == [0.4e9, None]
    assert [way.member.name for way in sources_of(deployment, far)] == ["home-pool-0", "home-pool-1"]
    assert plain_peers_of(deployment, first) >= {"home-pool-1", GATEWAY}
    assert "far-pool" not in plain_peers_of(deployment, first)
    assert all(deployment.needs_certificate(pool.name) for pool in deployment.pools)
    assert not any(map(deployment_of(tmp_path).needs_certificate, (far.name, first.name, second.name)))


def test_who_is_sent_pages_may_come_to_ask_for_them(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path)
    one_way = replace(deployment, links=tuple(each for each in deployment.links if each.source == "home"))
    far, first, _ = one_way.pools
    assert "far-pool" in plain_peers_of(one_way, first) and first.name in plain_peers_of(one_way, far)
    assert "far-pool" not in {way.member.name for way in sources_of(one_way, first)}


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    data=st.data(),
)
@settings(max_examples=60)
def test_pages_are_sent_as_one_run_of_bytes(sizes: list[int], data: st.DataObject) -> None:
    pages = [random.Random(at).randbytes(size) for at, size in enumerate(sizes)]
    whole, source = b"".join(pages), PinnedPages([memoryview(page) for page in pages])
    start = data.draw(st.integers(0, len(whole) - 1))
    nbytes = data.draw(st.integers(1, len(whole) - start))
    out = bytearray(nbytes)
    source.read_into(start, memoryview(out))
    assert bytes(out) == whole[start : start + nbytes]
    shown = source.views(start, nbytes)
    assert shown is None or b"".join(shown) == out


@given(num_tokens=st.integers(0, 400), lost=st.integers(0, 60))
@settings(max_examples=100)
def test_what_has_come_in_order_is_usable_as_far_as_it_can_be(num_tokens: int, lost: int) -> None:
    for geometry in (DENSE, HYBRID):
        pages = prefix(geometry, PROMPT[:num_tokens])
        order = [page.page_id for page in pages.pages]
        come = order[: max(len(order) - lost, 0)]
        usable = pages.depth(set(come)).usable_tokens
        if geometry is DENSE:
            assert usable == 16 * len(come)
        else:
            assert usable == (pages.end_tokens if len(come) == len(order) else 0)
        runs = batches(pages.pages, 50 * KIB, 7)
        assert [page for run in runs for page in run] == list(pages.pages)
        assert all(len(run) == 1 or sum(page.nbytes for page in run) <= 50 * KIB for run in runs)
        assert all(len(run) <= 7 for run in runs)
