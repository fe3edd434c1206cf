"""Reports of engines and etcd, tickets, ledgers, of any content: read within their bounds, or refused by one error."""

import json
import math
import secrets
import time
from base64 import urlsafe_b64encode
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from tests.mutations import mutated

from prfaas.serving.control.engine_reading import SERIES, read_exposition
from prfaas.serving.fleet.etcd import _decoded
from prfaas.serving.fleet.messages import Announcement, Decisions, Reloaded
from prfaas.serving.fleet.store import StoreError
from prfaas.serving.ledger_file import open_ledger
from prfaas.serving.secret_files import LedgerFileError
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, TicketError, _mac

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

EXPOSITION = "".join(
    (
        "# HELP x y\n",
        *(f'{name}{{engine="0"}} 12.5\n' for name in SERIES),
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\nprocess_start_time_seconds 1.7e9\n',
    )
).encode()
KEY = bytes(32)
TICKET = Ticket(
    transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
    producer="far-0",
    consumer="home-0",
    num_tokens=9,
    skip_tokens=1,
    prompt_digest=bytes(16),
    expires_at_s=60,
)
ANSWERS = [
    json.dumps(answer).encode()
    for answer in (
        {"header": {"revision": "7"}, "ID": "9", "result": {"TTL": "5"}, "succeeded": True},
        {
            "kvs": [{"key": "YQ==", "value": "e30=", "create_revision": "3", "mod_revision": "4"}],
            "count": "1",
        },
        {
            "result": {
                "events": [{"type": "DELETE", "kv": {"key": "YQ=="}}],
                "compact_revision": "1",
                "canceled": True,
            }
        },
        {"error": "x", "code": 3, "message": "y"},
    )
]
VALUES = [
    b'{"file":"a","share":{},"applied":4,"out":["home-0"]}',
    b'{"leader":"a","file":"b","thresholds":{"home":8192.5,"other":null},"roles":{"home-0":{"to_role":"prefill"}}}',
    b'{"by":"a","file":"b"}',
]


@FUZZ
@given(text=mutated([EXPOSITION]))
def test_an_engine_may_tell_any_metrics(text: bytes) -> None:
    reading = read_exposition(text)
    numbers = [value for value in astuple(reading) if value is not None]
    assert all(math.isfinite(value) and 0 <= value <= 1 << 53 for value in numbers)


@FUZZ
@given(text=mutated(ANSWERS))
def test_etcd_may_answer_anything(text: bytes) -> None:
    with suppress(StoreError):
        answer = _decoded(text)
        [each.entry for each in answer.kvs], [event.change for event in answer.result.events]


@FUZZ
@given(value=mutated(VALUES))
def test_a_value_in_etcd_may_be_anything(value: bytes) -> None:
    for kind in (Announcement, Decisions, Reloaded):
        with suppress(ValueError):
            msgspec.json.decode(value, type=kind)


@FUZZ
@given(text=mutated([TICKET.seal(KEY).encode()]))
def test_a_ticket_is_whole_or_none(text: bytes) -> None:
    sealed = text.decode("latin-1")
    try:
        found = Ticket.unseal(sealed, KEY, now_s=1.0)
    except TicketError as error:
        assert "\n" not in str(error)
    else:
        assert found == TICKET and sealed == TICKET.seal(KEY)


@FUZZ
@given(body=mutated([msgspec.msgpack.encode(TICKET)]))
def test_who_has_the_key_may_seal_anything(body: bytes) -> None:
    sealed = urlsafe_b64encode(body + _mac(KEY, body)).rstrip(b"=").decode()
    with suppress(TicketError):
        found = Ticket.unseal(sealed, KEY, now_s=time.time())
        assert found.skip_tokens <= found.num_tokens and math.isfinite(found.expires_at_s)


@FUZZ
@given(written=mutated([b"SQLite format 3\x00\x10\x00\x01\x01\x00\x40\x20\x20" + bytes(80) + bytes(4000)]))
def test_a_ledger_may_be_any_file(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(written)
    for read_only in (True, False):
        with suppress(LedgerFileError):
            open_ledger(path, read_only=read_only).close()
