"""Messages of any content at the pool's socket: they end their own session at most."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mutations import mutated, no_exception_logged

from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.daemon import DaemonOptions
from prfaas.serving.pool.protocol import PROTOCOL_VERSION

from .pool_daemon import HYBRID, chain_of, connected, packed_chain, pool_options, running_daemon, store_prompt
from .test_pool_daemon import IDENTITY, PROMPT, exchanged, first_match, raw_connection

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

numbers = st.sampled_from([0, 1, -1, 2, 224, 1 << 31, 1 << 63, (1 << 64) - 1]) | st.floats()
scalars = numbers | st.none() | st.booleans() | st.text(max_size=8) | st.binary(max_size=40)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=6
)
kinds = "open goodbye match unpin reserve commit abort discard stats verify"
CHAIN = packed_chain(chain_of(HYBRID, PROMPT))
PAGE = b"x" * 16 + b"\x00"
GOOD: list[list[Any]] = [
    ["match", CHAIN, 0, 256, True, b"", True],
    ["unpin", 1],
    ["reserve", b"", PAGE * 2, [IDENTITY, None]],
    ["commit", bytes(8), bytes(8)],
    ["abort", bytes(8)],
    ["discard", PAGE],
    ["stats"],
    ["goodbye"],
]
messages = (
    st.tuples(st.sampled_from(kinds.split()), st.lists(values, max_size=6)).map(
        lambda said: [said[0], *said[1]]
    )
    | st.sampled_from(GOOD)
).map(msgspec.msgpack.encode) | mutated([msgspec.msgpack.encode(each) for each in GOOD])
sessions = st.sampled_from(["scheduler", "worker", "tool"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonOptions, PoolClient]]:
    options = pool_options(tmp_path_factory.mktemp("pool"))
    with running_daemon(options), connected(options) as client:
        store_prompt(client, PROMPT)
        yield options, client


@pytest.fixture(autouse=True)
def no_exception() -> Iterator[None]:
    with no_exception_logged():
        yield


@FUZZ
@given(kind=sessions, said=st.lists(messages, max_size=6))
def test_a_client_may_say_anything(
    daemon: tuple[DaemonOptions, PoolClient], kind: str, said: list[bytes]
) -> None:
    options, honest = daemon
    geometry = None if kind == "tool" else HYBRID.encode()
    opened = msgspec.msgpack.encode(["open", PROTOCOL_VERSION, kind, 0, b"fuzzfuzz", geometry])
    with raw_connection(options) as connection, suppress(ConnectionError, socket.timeout):
        for message in (opened, *said):
            if not exchanged(connection, message):
                break
    assert first_match(honest, pin=False).usable_tokens == 256
    figures = honest.stats()
    assert figures is not None and figures["pinned_pages"] == 0
