"""What each kind of ready request tells engines and clients, and what of it is freed when nobody loads it."""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.prefix.hashing import PromptChains
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.serving.gateway.prompts.prompt import DirectPrompt
from prfaas.serving.gateway.prompts.request import TokenizedPrompt
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.gateway.ways.first_token import SampledTokens
from prfaas.serving.gateway.ways.kv_transfer import (
    HopFailedError,
    KeptPart,
    MovedPrefix,
    StartedTransfer,
    TransferDone,
)
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.gateway.ways.ready_requests import (
    DirectRequest,
    EarlyRequest,
    KeptRequest,
    LocalRequest,
    MovedRequest,
    MovingRequest,
    ReadyRequest,
)
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

IDS = range(1000)
REQUEST: Any = None
PROMPT = TokenizedPrompt(REQUEST, IDS, PromptChains(1000, {}), takes_ids=False)
TICKET = Ticket(
    transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
    producer="far",
    consumer="near",
    num_tokens=999,
    skip_tokens=256,
    prompt_digest=prompt_digest(IDS[:999]),
    expires_at_s=60.0,
)
FAR = Decision(
    route=Route.OFFLOAD,
    prefill="far",
    decode="near",
    num_tokens=1000,
    uncached_tokens=744,
    prefill_tokens=900,
    skip_tokens=256,
    kv_bytes=4000,
    reason="long",
    threshold_tokens=100.0,
    predicted_ttft_s=0.5,
)
HERE = Decision(
    route=Route.LOCAL,
    prefill="near",
    decode="near",
    num_tokens=1000,
    uncached_tokens=744,
    prefill_tokens=744,
    skip_tokens=0,
    kv_bytes=0,
    reason="short",
    threshold_tokens=100.0,
    predicted_ttft_s=0.5,
)
DONE = TransferDone(
    ticket=TICKET,
    sealed="sealed",
    cached_tokens=512,
    moved=TransferredBytes(4000, 3000),
    prefill_s=0.25,
    transfer_s=0.5,
)
STARTED = StartedTransfer(TICKET, "sealed", None)
FIRST = SampledTokens((7,), "a")
MOVED = MovedRequest(decision=FAR, prompt=PROMPT, prefix=MovedPrefix(FAR), transfer=DONE)
LOCAL = LocalRequest(decision=HERE, prompt=PROMPT, prefix=MovedPrefix(HERE), fallback="died")


async def arrived() -> MovedRequest:
    return MOVED


async def fails() -> MovedRequest:
    raise HopFailedError("died", hopeless=False)


async def takes_long() -> MovedRequest:
    await asyncio.Event().wait()
    return MOVED


def test_a_decode_engine_is_told_of_nothing_where_nothing_waits() -> None:
    for ready in (DirectRequest(asked=REQUEST, decision=HERE, prompt=DirectPrompt("media")), LOCAL):
        assert (ready.kv_params(), ready.given_up(), ready.moves_kv) == ({}, None, False)


def test_what_was_cached_elsewhere_counts_as_cached() -> None:
    cached = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 512}
    assert MOVED.kv_params() == {"prfaas": "sealed", **cached}
    # At least what the decode engine holds itself.
    less = replace(DONE, cached_tokens=16)
    assert replace(MOVED, transfer=less).kv_params()["remote_prefill_cached_tokens"] == 256


def test_without_the_producers_word_the_engines_own_count_stands() -> None:
    assert STARTED.params() == {"prfaas": "sealed"}


def test_a_broken_transfer_tells_how_much_of_it_can_be_used() -> None:
    kept = KeptPart(TICKET, "sealed", 0, 768)
    ready = KeptRequest(decision=HERE, prompt=PROMPT, prefix=MovedPrefix(HERE), transfer=kept)
    assert ready.kv_params()["prfaas_kept"] == 768
    assert (ready.own_prefill_tokens, ready.own_reused_tokens, ready.given_up()) == (744, 256, kept)


def test_only_the_engine_that_prefills_has_tokens_to_prefill() -> None:
    assert (LOCAL.own_prefill_tokens, LOCAL.own_reused_tokens) == (744, 256)
    assert (MOVED.own_prefill_tokens, MOVED.own_reused_tokens) == (0, 0)


def test_the_route_header_tells_what_has_moved() -> None:
    told = MOVED.header()
    assert (told.route, told.prefill, told.decode, told.reason) == ("offload", "far", "near", "long")
    assert (told.cached_tokens, told.kv_bytes, told.hidden_fraction) == (256, 4000, 0.75)
    assert (told.prefill_s, told.transfer_s, told.transfer) == (0.25, 0.5, None)
    assert replace(MOVED, transfer=replace(DONE, sealed="nixl.sealed")).header().transfer == "nixl"
    here = LOCAL.header()
    assert (here.kv_bytes, here.cached_tokens, here.fallback, here.uncached_tokens) == (0, 0, "died", 744)
    direct = DirectRequest(asked=REQUEST, decision=HERE, prompt=DirectPrompt("media")).header()
    assert (direct.uncached_tokens, direct.threshold_tokens, direct.reason) == (None, None, "media")


def test_who_sampled_the_first_token_is_told() -> None:
    assert replace(MOVED, first_token="prefill").header().first_token == "prefill"
    assert MOVED.header().first_token is None


@pytest.mark.parametrize(
    ("work", "moving", "early"),
    [(arrived, DONE, DONE), (fails, STARTED, None), (takes_long, STARTED, None)],
)
def test_what_is_freed_depends_on_how_far_it_came(work: Any, moving: Any, early: Any) -> None:
    """A hop that fails or is cut off frees what it has left itself; the ticket was told to an engine all the same."""

    async def given_up(kind: Any, work: Coroutine[Any, Any, MovedRequest]) -> Any:
        arriving = asyncio.create_task(work)
        await asyncio.sleep(0)
        facts: dict[str, Any] = {
            "decision": FAR,
            "prompt": PROMPT,
            "prefix": MovedPrefix(FAR),
            "arriving": arriving,
        }
        if kind is MovingRequest:
            ready: ReadyRequest = MovingRequest(transfer=STARTED, **facts)
        else:
            soon = asyncio.get_running_loop().create_future()
            ready = EarlyRequest(first=FIRST, soon=soon, **facts)
        transfer = ready.given_up()
        (ended,) = await asyncio.gather(arriving, return_exceptions=True)
        assert ended is MOVED or isinstance(ended, HopFailedError | asyncio.CancelledError)
        return transfer

    assert asyncio.run(given_up(MovingRequest, work())) == moving
    assert asyncio.run(given_up(EarlyRequest, work())) == early


def test_what_has_arrived_is_of_the_prompt_that_waited_for_it() -> None:
    """It may ask its engine for more than the first one did, such as token ids to compare."""

    async def main() -> None:
        record = SimpleNamespace(attempts=[SimpleNamespace(outcome="under way")])
        asked = replace(PROMPT, request=SimpleNamespace(record=record))
        arriving: Any = asyncio.create_task(arrived())
        facts: dict[str, Any] = {"decision": FAR, "prompt": asked, "prefix": MovedPrefix(FAR)}
        moving = MovingRequest(transfer=STARTED, arriving=arriving, **facts)
        context: Any = SimpleNamespace(plane=None)
        nobody: Any = None
        ready = await PrefillOrchestrator(nobody, nobody, nobody, context).arrived(moving)
        assert ready.request is asked.request and ready.kv_params() == MOVED.kv_params()
        assert record.attempts[-1].outcome == "done"

    asyncio.run(main())
