"""What a fleet asks of its store: the double of the tests and the real etcd do the same."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.core.deployment import FleetConfig
from prfaas.serving.fleet import etcd
from prfaas.serving.fleet.etcd import EtcdStore
from prfaas.serving.fleet.store import Entry, StoreChange, StoreError
from prfaas.serving.issuing import certificate_pem, new_authority, new_certificate
from prfaas.serving.secret_files import TlsFileError

from .etcd_process import needs_etcd, running_etcd
from .memory_store import MemoryEtcd, MemoryStore

LIMIT_S = 30.0


@asynccontextmanager
async def two_stores(kind: str, folder: Path) -> AsyncIterator[tuple[EtcdStore, EtcdStore]]:
    if kind == "memory":
        etcd = MemoryEtcd(time.monotonic)
        yield MemoryStore(etcd), MemoryStore(etcd)  # type: ignore[misc]
        return
    with running_etcd(folder / "etcd") as real:
        stores = [EtcdStore(FleetConfig((real.url,))) for _ in range(2)]
        try:
            yield stores[0], stores[1]
        finally:
            for store in stores:
                await store.close()


@pytest.mark.slow("starts etcd, and waits for the end of a lease")
@pytest.mark.parametrize("kind", ["memory", pytest.param("etcd", marks=needs_etcd)])
def test_a_store_does_what_a_fleet_needs(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * LIMIT_S), two_stores(kind, tmp_path) as (one, other):
            await creates_once(one, other)
            await writes_only_while_the_holder_is_there(one, other)
            await tells_all_changes_in_order(one, other)
            await takes_away_what_a_lease_had(one, other)

    asyncio.run(main())


async def creates_once(one: EtcdStore, other: EtcdStore) -> None:
    lease = await one.grant(30)
    created = await one.create("/f/gateways/a", b"\x00first", lease)
    assert created is not None
    assert await other.create("/f/gateways/a", b"second", await other.grant(30)) is None
    await one.put("/f/gateways/a", b"third", lease)
    entries, revision = await other.read("/f/")
    assert [(each.key, each.value) for each in entries] == [("/f/gateways/a", b"third")]
    assert entries[0].created == created < entries[0].changed <= revision
    assert await other.read("/g/") == ([], revision)


async def writes_only_while_the_holder_is_there(one: EtcdStore, other: EtcdStore) -> None:
    (own,), _ = await one.read("/f/gateways/a")
    assert await other.put_while("/f/decisions", b"no", own.key, own.created + 1) is None
    assert await other.put_while("/f/decisions", b"no", "/f/gateways/nobody", own.created) is None
    revision = await one.put_while("/f/decisions", b"yes", own.key, own.created)
    (found,), _ = await other.read("/f/decisions")
    assert (found.value, found.changed) == (b"yes", revision)
    assert await one.put_while("/f/decisions", None, own.key, own.created)
    assert (await other.read("/f/decisions"))[0] == []


async def tells_all_changes_in_order(one: EtcdStore, other: EtcdStore) -> None:
    _, revision = await one.read("/f/")
    lease = await one.grant(30)
    await one.create("/f/drained/x", b"1", lease)
    await one.create("/other/y", b"not of this fleet", lease)
    told: list[StoreChange] = []

    async def follow() -> None:
        async for changes in other.watch("/f/", revision + 1):
            told.extend(changes)
            if len(told) >= 3:
                return

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    await one.put("/f/drained/x", b"2", lease)
    await one.revoke(lease)
    await asyncio.wait_for(following, LIMIT_S)
    values = [(each.key, None if each.entry is None else each.entry.value) for each in told]
    assert values == [("/f/drained/x", b"1"), ("/f/drained/x", b"2"), ("/f/drained/x", None)]
    assert revision < told[0].revision < told[1].revision < told[2].revision


async def takes_away_what_a_lease_had(one: EtcdStore, other: EtcdStore) -> None:
    lease = await one.grant(2)
    await one.create("/f/gateways/b", b"", lease)
    assert await one.keep(lease)
    until_s = time.monotonic() + LIMIT_S
    while (await other.read("/f/gateways/b"))[0]:
        assert time.monotonic() < until_s
        await asyncio.sleep(0.05)
    assert not await one.keep(lease)
    with pytest.raises(StoreError):
        await one.put("/f/gateways/b", b"", lease)


@needs_etcd
def test_etcd_behind_certificates(tmp_path: Path) -> None:
    authority, key = new_authority("etcd")
    ca, own, client = (tmp_path / name for name in ("ca.crt", "etcd.pem", "client.pem"))
    ca.write_bytes(certificate_pem(authority))
    own.write_bytes(new_certificate(["127.0.0.1"], authority, key, 1))
    client.write_bytes(new_certificate(["gateway"], authority, key, 1))

    async def main() -> None:
        with running_etcd(tmp_path / "etcd", (ca, own)) as etcd:
            stores = [
                EtcdStore(FleetConfig((etcd.url,), ca_file=ca, certificate_file=client)),
                EtcdStore(FleetConfig((etcd.url,), ca_file=ca)),
                EtcdStore(FleetConfig((etcd.url,), certificate_file=client)),
            ]
            try:
                assert await stores[0].grant(3)
                for stranger in stores[1:]:
                    with pytest.raises(StoreError):
                        await stranger.grant(3)
            finally:
                for store in stores:
                    await store.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca_file": "missing"}, "fleet.ca_file .*missing can't be used: No such file"),
        ({"certificate_file": "missing"}, "fleet.certificate_file .*missing can't be used: No such file"),
        ({"certificate_file": "empty"}, "it must hold a certificate and its private key"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "empty").touch()

    async def main() -> None:
        with pytest.raises(TlsFileError, match=message):
            EtcdStore(FleetConfig(("https://e:1",), **{k: tmp_path / v for k, v in files.items()}))  # type: ignore[arg-type]

    asyncio.run(main())


def test_who_does_not_answer_is_a_store_error_and_the_next_one_is_asked(tmp_path: Path) -> None:
    """Neither of these addresses has an etcd: one refuses, one is no etcd at all."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(True)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    asked: list[bool] = []

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        refusing = await asyncio.start_server(answer, "127.0.0.1", 0)
        gone = refusing.sockets[0].getsockname()[1]
        refusing.close()
        await refusing.wait_closed()
        store = EtcdStore(FleetConfig((f"http://127.0.0.1:{gone}", f"http://127.0.0.1:{port}")))
        try:
            with pytest.raises(StoreError, match="does not answer"):
                await store.grant(3)
            assert not asked
            with pytest.raises(StoreError, match="another form than expected"):
                await store.grant(3)
            assert asked
        finally:
            await store.close()
            server.close()
            await server.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    ['{"kvs": 3}', '{"kvs": [{"key": "%%%"}]}', '{"kvs": [{"mod_revision": "x"}]}', "[]", '{"error": "no"}'],
)
def test_an_answer_of_another_form_is_refused(answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
        writer.write((head + answer).encode())
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        store = EtcdStore(FleetConfig((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",)))
        try:
            with pytest.raises(StoreError):
                await store.read("/f/")
        finally:
            await store.close()
            server.close()
            await server.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{",
        b'{"header": {"revision": "x"}}',
        b'{"message": "\xff", "error": 1}',
        b'{"header": {"revision": "-1"}}',
        b'{"header": {"revision": "99999999999999999999999999"}}',
        b'{"header": {"revision": NaN}}',
        b'{"kvs": {}}',
        b'{"kvs": [{"key": "not base64"}]}',
        b'{"kvs": [{"key": "YQ==", "mod_revision": "%d"}]}' % 10**300,
        b'{"result": {"events": [7]}}',
        b'{"error": ' + b"[" * 100_000,
        b'{"error": "refused", "message": "why"}',
    ],
)
def test_absurd_answers_of_etcd_are_failures_of_the_store(answer: bytes) -> None:
    with pytest.raises(StoreError):
        etcd._decoded(answer)


def test_what_etcd_leaves_out_is_nothing() -> None:
    told = etcd._decoded(
        b'{"header": {"revision": "7", "raft_term": "2"}, "kvs": [{"key": "L2Y=", "lease": "5"}]}'
    )
    assert (told.header.revision, told.ID, told.succeeded, told.result.TTL) == (7, 0, False, 0)
    assert [each.entry for each in told.kvs] == [Entry("/f", b"", 0, 0)]
    event = etcd._decoded(
        b'{"result": {"events": [{"type": "DELETE", "kv": {"key": "L2Y=", "mod_revision": "9"}}]}}'
    )
    assert [each.change for each in event.result.events] == [StoreChange("/f", None, 9)]


def test_a_watch_that_says_nothing_without_end_leaves_the_loop_to_others() -> None:
    lines = 20_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"{}\n" * lines)
        await writer.drain()
        writer.close()

    async def main() -> int:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        store = EtcdStore(FleetConfig((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",)))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            with pytest.raises(StoreError, match="ended the watch"):
                async for _ in store.watch("/f/", 1):
                    raise AssertionError("nothing was told")
        finally:
            counting.cancel()
            await store.close()
            server.close()
            await server.wait_closed()
        return turns

    assert asyncio.run(main()) > lines
