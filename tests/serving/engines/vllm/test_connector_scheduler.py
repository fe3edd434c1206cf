"""The scheduler side, driven as vLLM 0.32 drives it (the order of calls is in the connector notes)."""

import secrets
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.link.checkpoints import is_checkpoint_due
from prfaas.core.prefix.hashing import MediaItem
from prfaas.serving.engines.vllm.connector_scheduler import ConnectorScheduler
from prfaas.serving.engines.vllm.metadata import StepReports, TransferMetadata
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TransferAttributes,
    prompt_digest,
)

KEY = b"k" * 32
FULL = KvGroup(1, GroupKind.FULL, 16, 0)
STATE = KvGroup(0, GroupKind.STATE, 16, 0)
WINDOW = KvGroup(2, GroupKind.WINDOW, 8, 20)
GROUPS = (STATE, FULL, WINDOW)


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    kv_cache_report_mode: str = "incremental"
    max_tokens: int = 1
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None


@dataclass
class BlockState:
    tables: dict[str, tuple[list[int], ...]]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        return self.tables.get(request_id)


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: BlockState
    preempted_req_ids: set[str] = field(default_factory=set)


@dataclass
class Blocks:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


def ticket_for(prompt: list[int], skip: int = 0, every_tokens: int = 0, **names: str) -> str:
    ends = {"producer": "east", "consumer": "home", **names}
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        num_tokens=len(prompt),
        skip_tokens=skip,
        prompt_digest=prompt_digest(prompt),
        expires_at_s=1000.0 + 60,
        attributes=TransferAttributes(checkpoint_tokens=every_tokens),
        **ends,
    )
    return ticket.seal(KEY)


def side(name: str) -> ConnectorScheduler:
    return ConnectorScheduler(name, KEY, GROUPS, now_s=lambda: 1000.0)


def live_requests(scheduler: ConnectorScheduler) -> int:
    return len(scheduler._producing) + len(scheduler._consuming)


def tables(num_tokens: int, base: int = 100) -> tuple[list[int], ...]:
    """A block table per group index: block i of group g has id base·(g+1)+i, never the null block."""
    sizes = {0: 16, 1: 16, 2: 8}
    return tuple([base * (g + 1) + i for i in range(-(-num_tokens // sizes[g]))] for g in range(3))


def chunks(
    scheduler: ConnectorScheduler, request: Request, sizes: list[int], base: int = 100
) -> list[TransferMetadata]:
    steps = []
    for size in sizes:
        table = tables(request.num_computed_tokens + size, base)
        output = Output({request.request_id: size}, BlockState({request.request_id: table}))
        steps.append(scheduler.build_metadata(output))  # type: ignore[arg-type]
        request.num_computed_tokens += size
    return steps


@given(
    num_tokens=st.integers(1, 400),
    skip_share=st.floats(0, 1),
    cached_blocks=st.integers(0, 10),
    data=st.data(),
)
def test_every_block_leaves_exactly_once_whatever_the_chunks(
    num_tokens: int, skip_share: float, cached_blocks: int, data: st.DataObject
) -> None:
    """Invariant: streamed runs are adjacent, start at the skipped prefix, end with the tail; state goes once."""
    prompt = list(range(num_tokens))
    skip = int(num_tokens * skip_share)
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt, skip)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    request.num_computed_tokens = min(cached_blocks * 16, (num_tokens - 1) // 16 * 16)
    cached_tokens = request.num_computed_tokens
    left = num_tokens - cached_tokens
    sizes = []
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    sends = [send for step in chunks(scheduler, request, sizes) for send in step.sends]
    positions = {group.index: group.first_block(num_tokens, skip) for group in (FULL, WINDOW)}
    computed = cached_tokens
    for send, tokens in zip(sends, sizes, strict=True):
        computed += tokens
        for run in send.streamed:
            position, base = positions[run.group], 100 * (1 + run.group)
            assert run.first_block == position
            assert run.block_ids == tuple(base + i for i in range(position, position + len(run.block_ids)))
            positions[run.group] += len(run.block_ids)
        # A chunk leaves no block behind that it has completed, of windows neither.
        for group in (FULL, WINDOW):
            complete = computed // group.block_tokens
            assert positions[group.index] >= min(complete, group.end_block(num_tokens))
    for group in (FULL, WINDOW):
        assert positions[group.index] == max(group.end_block(num_tokens), group.first_block(num_tokens, skip))
    assert [send.final for send in sends] == [False] * (len(sends) - 1) + [True]
    closing = {run.group: run for run in sends[-1].closing}
    assert closing.keys() == {0} and closing[0].block_ids == (100 + (num_tokens - 1) // 16,)
    assert not any(send.closing for send in sends[:-1])
    assert {send.cached_tokens for send in sends} == {cached_tokens}


@given(
    num_tokens=st.integers(1, 400),
    skip_share=st.floats(0, 1),
    every_tokens=st.integers(0, 100),
    data=st.data(),
)
def test_checkpoints_are_ordered_at_ends_of_whole_blocks(
    num_tokens: int, skip_share: float, every_tokens: int, data: st.DataObject
) -> None:
    """Invariant: each has the state and the window after its tokens, and they are as far apart as the ticket says."""
    prompt = list(range(num_tokens))
    skip = int(num_tokens * skip_share)
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt, skip, every_tokens)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    sizes, left = [], num_tokens
    while left:
        sizes.append(data.draw(st.one_of(st.integers(1, left), st.just(min(16, left)))))
        left -= sizes[-1]
    sends = [send for step in chunks(scheduler, request, sizes) for send in step.sends]
    last = skip
    for send in sends:
        end = send.checkpoint_tokens
        if not end:
            assert send.checkpoint == ()
            continue
        assert not send.final and end % 16 == 0 and end < num_tokens
        assert end - last >= every_tokens > 0
        assert is_checkpoint_due(every_tokens, last, end, num_tokens)
        last = end
        found = {run.group: run for run in send.checkpoint}
        assert found.keys() == {0, 2}
        assert found[0].block_ids == (100 + end // 16 - 1,)
        first = max(0, end - 20 + 1) // 8
        assert found[2].first_block == first
        assert found[2].block_ids == tuple(300 + block for block in range(first, end // 8))


@pytest.mark.parametrize(("sizes", "ends"), [([64] * 5, [64, 128, 192, 256, 0]), ([50] * 6 + [20], [0] * 7)])
def test_a_chunk_that_ends_inside_a_block_has_no_checkpoint(sizes: list[int], ends: list[int]) -> None:
    prompt = list(range(320))
    for scheduler, expected in (
        (side("east"), ends),
        (ConnectorScheduler("east", KEY, (FULL,), now_s=lambda: 1000.0), [0] * len(ends)),
    ):
        request = Request("r", prompt, {"prfaas": ticket_for(prompt, 0, 64)})
        scheduler.on_new_request(request)  # type: ignore[arg-type]
        steps = chunks(scheduler, request, sizes)
        assert [send.checkpoint_tokens for step in steps for send in step.sends] == expected


def ready(*ranks: tuple[str, int]) -> Any:
    """What ranks tell at the end of a step, each of one request and its last checkpoint."""
    reports = StepReports()
    for place in ranks:
        reports = reports.aggregate(StepReports(ready=Counter({place: 1})))
    return SimpleNamespace(kv_connector_worker_meta=reports, failed_recving=set())


def test_several_ranks_send_a_checkpoint_after_the_same_chunk_or_none_does() -> None:
    scheduler = ConnectorScheduler("east", KEY, GROUPS, now_s=lambda: 1000.0, ranks=2)
    prompt = list(range(640))
    request = Request("r", prompt, {"prfaas": ticket_for(prompt, 0, 64)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]

    def ordered() -> int:
        (step,) = chunks(scheduler, request, [64])
        return step.sends[0].checkpoint_tokens

    # Nothing can be in the way of the first one.
    assert ordered() == 64
    # A report of before that order, as asynchronous scheduling has it.
    scheduler.update(ready(("r", 0), ("r", 0)))
    assert ordered() == 0
    # One rank's first checkpoint is still on its way.
    scheduler.update(ready(("r", 64), ("other", 64)))
    assert ordered() == 0
    scheduler.update(ready(("r", 64), ("r", 64)))
    assert ordered() == 256
    scheduler.update(ready(("r", 256), ("r", 64)))
    assert ordered() == 0
    scheduler.update(ready(("r", 256), ("r", 256)))
    assert ordered() == 384


def test_a_preempted_prefill_resends_nothing() -> None:
    prompt = list(range(100))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    first = chunks(scheduler, request, [50])
    request.num_computed_tokens = 0
    preempting = Output({}, BlockState({}), {"r", "another"})
    assert scheduler.build_metadata(preempting).preempted == ["r"]  # type: ignore[arg-type]
    second = chunks(scheduler, request, [40, 60], base=1000)
    runs = [run for step in first + second for send in step.sends for run in send.streamed]
    assert [(run.group, run.first_block, len(run.block_ids)) for run in runs] == [
        (1, 0, 3),
        (1, 3, 4),
        (2, 10, 3),
    ]
    assert runs[1].block_ids == (2003, 2004, 2005, 2006)


def test_after_the_last_chunk_nothing_is_sent_again() -> None:
    prompt = list(range(40))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    chunks(scheduler, request, [40])
    request.num_computed_tokens = 0
    assert not any(step.sends for step in chunks(scheduler, request, [40]))


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"prfaas": "x" * 50},
        {"prfaas": 7},
        {"prfaas": {"remote_host": "10.0.0.1"}},
        {"prfaas": ticket_for(list(range(40)), producer="west", consumer="west-2")},
        {"prfaas": ticket_for(list(range(39)))},
        {"prfaas": ticket_for(list(range(1, 41)))},
        {"do_remote_decode": True, "remote_host": "10.0.0.1"},
    ],
)
def test_anything_but_its_own_ticket_makes_a_request_local(params: dict[str, Any] | None) -> None:
    scheduler = side("east")
    request = Request("r", list(range(40)), params)
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert live_requests(scheduler) == 0
    assert not any(step.sends for step in chunks(scheduler, request, [40]))
    assert scheduler.num_external_tokens(request, 0) == 0  # type: ignore[arg-type]
    assert scheduler.request_finished(request, aborted=False) is False  # type: ignore[arg-type]


def consumer(skip: int = 0) -> tuple[ConnectorScheduler, Request, Ticket]:
    prompt = list(range(101))
    sealed = ticket_for(prompt[:100], skip)
    scheduler = side("home")
    request = Request("d", prompt, {"prfaas": sealed})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    return scheduler, request, Ticket.unseal(sealed, KEY, 1000.0)


def orders_of(scheduler: ConnectorScheduler) -> TransferMetadata:
    return scheduler.build_metadata(Output({}, BlockState({})))  # type: ignore[arg-type]


def test_a_decode_request_asks_for_what_its_own_hit_lacks_and_loads_once() -> None:
    scheduler, request, ticket = consumer(skip=32)
    assert scheduler.num_external_tokens(request, 16) == 0  # type: ignore[arg-type]
    for _ in range(3):
        assert scheduler.num_external_tokens(request, 48) == 52  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(100)), 52)  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(101)), 0)  # type: ignore[arg-type]
    orders = orders_of(scheduler)
    assert orders.drops == []
    (load,) = orders.loads
    assert (load.ticket, load.local_tokens) == (ticket, 48)
    runs = {run.group: run for run in load.runs}
    assert (runs[1].first_block, len(runs[1].block_ids)) == (3, 4)
    assert runs[0].block_ids == (106,)
    assert runs[2].first_block == 10
    # A preempted request starts again from nothing: its transfer is used up.
    assert scheduler.num_external_tokens(request, 0) == 0  # type: ignore[arg-type]


def test_a_decode_engine_that_lost_the_skipped_prefix_gives_the_staging_up() -> None:
    scheduler, request, ticket = consumer(skip=32)
    assert scheduler.num_external_tokens(request, 0) == 0  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(101)), 0)  # type: ignore[arg-type]
    orders = orders_of(scheduler)
    assert [transfer_id for transfer_id, _ in orders.drops] == [ticket.transfer_id]
    assert orders.loads == []


def test_a_decode_request_that_ends_early_gives_the_staging_up() -> None:
    scheduler, request, ticket = consumer()
    assert scheduler.request_finished(request, aborted=True) is False  # type: ignore[arg-type]
    assert [transfer_id for transfer_id, _ in orders_of(scheduler).drops] == [ticket.transfer_id]
    assert live_requests(scheduler) == 0


def test_vllms_phantom_of_a_rejected_request_gives_the_staging_up() -> None:
    scheduler, request, ticket = consumer()
    scheduler.request_finished(request, aborted=True)  # type: ignore[arg-type]
    orders_of(scheduler)
    phantom = Request("phantom", [0], request.kv_transfer_params)
    scheduler.on_new_request(phantom)  # type: ignore[arg-type]
    assert [transfer_id for transfer_id, _ in orders_of(scheduler).drops] == [ticket.transfer_id]


@pytest.mark.parametrize("aborted", [True, False])
def test_a_started_prefill_keeps_its_blocks_until_the_worker_reports(aborted: bool) -> None:
    prompt = list(range(40))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    chunks(scheduler, request, [16])
    assert scheduler.request_finished(request, aborted=aborted) is True  # type: ignore[arg-type]
    assert orders_of(scheduler).held == {"r": aborted}
    assert live_requests(scheduler) == 0


def test_an_abort_behind_the_last_chunk_ends_the_decoding_and_not_the_transfer() -> None:
    """A gateway stops a request that decodes on when another engine goes on with it, or when its client leaves."""
    prompt = list(range(40))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)}, max_tokens=9)
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    steps = chunks(scheduler, request, [16, 24, 1, 1])
    assert [[(send.final, send.decodes_on) for send in step.sends] for step in steps] == [
        [(False, True)],
        [(True, True)],
        [],
        [],
    ]
    assert scheduler.request_finished(request, aborted=True) is True  # type: ignore[arg-type]
    assert orders_of(scheduler).held == {"r": False}
    assert live_requests(scheduler) == 0


def test_a_prefill_that_never_started_keeps_nothing() -> None:
    prompt = list(range(40))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert scheduler.request_finished(request, aborted=True) is False  # type: ignore[arg-type]


@dataclass
class Adapter:
    lora_name: str


@pytest.mark.parametrize("salt", ["", "a", "b"])
@pytest.mark.parametrize("adapter", ["", "a", "b"])
def test_kv_of_another_tenant_or_adapter_is_refused(salt: str, adapter: str) -> None:
    prompt = list(range(50))
    digest = prompt_digest(prompt, "a", "b")
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=50,
        skip_tokens=0,
        prompt_digest=digest,
        expires_at_s=1000.0 + 60,
    )
    matches = (salt, adapter) == ("a", "b")
    params = {"prfaas": ticket.seal(KEY)}
    lora = Adapter(adapter) if adapter else None
    producer, consumer = side("east"), side("home")
    producer.on_new_request(Request("p", prompt, params, cache_salt=salt or None, lora_request=lora))  # type: ignore[arg-type]
    whole = Request("c", [*prompt, 1], params, cache_salt=salt or None, lora_request=lora)
    consumer.on_new_request(whole)  # type: ignore[arg-type]
    assert live_requests(producer) == live_requests(consumer) == matches
    assert consumer.num_external_tokens(whole, 0) == (50 if matches else 0)  # type: ignore[arg-type]


def image(digest: str, offset: int, tokens: int = 10) -> Any:
    return SimpleNamespace(identifier=digest, mm_position=SimpleNamespace(offset=offset, length=tokens))


@pytest.mark.parametrize(
    ("shown", "is_taken"),
    [
        ([image("cat", 5), image("dog", 20)], True),
        ([image("cat", 5), image("dog", 20), image("owl", 50)], True),
        ([image("dog", 5), image("cat", 20)], False),
        ([image("cat", 5), image("cow", 20)], False),
        ([image("cat", 5), image("dog", 21)], False),
        ([image("cat", 5), image("dog", 20, 9)], False),
        ([image("cat", 5)], False),
        ([], False),
    ],
)
def test_kv_of_other_media_is_refused(shown: list[Any], is_taken: bool) -> None:
    """The last item begins behind what moves."""
    prompt = list(range(51))
    media = [MediaItem("cat", 5, 10), MediaItem("dog", 20, 10)]
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=50,
        skip_tokens=0,
        prompt_digest=prompt_digest(prompt[:50], media=media),
        expires_at_s=1000.0 + 60,
    )
    params = {"prfaas": ticket.seal(KEY)}
    producer = ConnectorScheduler("east", KEY, [FULL], now_s=lambda: 1000.0)
    consumer = ConnectorScheduler("home", KEY, [FULL], now_s=lambda: 1000.0)
    for scheduler in (producer, consumer):
        scheduler.on_new_request(Request("r", prompt, params, mm_features=shown))  # type: ignore[arg-type]
        assert live_requests(scheduler) == is_taken
    # What a state is after exactly 50 tokens is gone when 51 are computed.
    hybrid = side("east")
    hybrid.on_new_request(Request("r", prompt, params, mm_features=shown))  # type: ignore[arg-type]
    assert not live_requests(hybrid)


def test_a_prompt_with_embeddings_takes_no_ticket() -> None:
    prompt = list(range(51))
    for name, length in (("east", 50), ("home", 51)):
        scheduler = side(name)
        params = {"prfaas": ticket_for(prompt[:50])}
        scheduler.on_new_request(Request("r", prompt[:length], params, prompt_embeds=[0.5]))  # type: ignore[arg-type]
        assert not live_requests(scheduler)


@pytest.mark.parametrize("cached", [0, 32, 48])
def test_all_but_the_last_token_of_a_prompt_with_media_leaves(cached: int) -> None:
    """Even where the engine has all that leaves in its cache, and computes the last token alone."""
    prompt = list(range(49))
    media = [MediaItem("cat", 5, 10)]
    fields: dict[str, Any] = {"producer": "east", "consumer": "home", "skip_tokens": 0}
    digest = prompt_digest(prompt[:48], media=media)
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        **fields,
        num_tokens=48,
        prompt_digest=digest,
        expires_at_s=1060.0,
    )
    producer = ConnectorScheduler("east", KEY, [FULL], now_s=lambda: 1000.0)
    request = Request("r", prompt, {"prfaas": ticket.seal(KEY)}, mm_features=[image("cat", 5)])
    producer.on_new_request(request)  # type: ignore[arg-type]
    request.num_computed_tokens = cached
    sends = [send for step in chunks(producer, request, [49 - cached]) for send in step.sends]
    (send,) = sends
    assert send.final and send.cached_tokens == cached
    assert [(run.first_block, len(run.block_ids)) for run in send.streamed] == [(0, 3)]
    assert not chunks(producer, request, [1])[0].sends


def test_a_prefill_may_start_from_what_another_engine_sent() -> None:
    """It loads the first 33 tokens, computes 17 more, and all 50 leave it."""
    prompt = list(range(50))
    first = ticket_for(prompt[:33], producer="home", consumer="east")
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt), "prfaas_from": first})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert live_requests(scheduler) == 2
    assert scheduler.num_external_tokens(request, 0) == 33  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(33)), 33)  # type: ignore[arg-type]
    (load,) = scheduler.build_metadata(Output({}, BlockState({}))).loads  # type: ignore[arg-type]
    assert load.ticket.num_tokens == 33
    request.num_computed_tokens = 33
    (step,) = chunks(scheduler, request, [17])
    (send,) = step.sends
    runs = [(run.group, run.first_block, len(run.block_ids)) for run in send.streamed]
    assert send.final and runs == [(1, 0, 4), (2, 3, 4)]
    assert scheduler.request_finished(request, aborted=False)  # type: ignore[arg-type]
    assert live_requests(scheduler) == 0


def test_no_request_makes_the_engine_announce_its_cache_hits_as_new_blocks() -> None:
    request = Request("r", [1, 2, 3])
    request.kv_cache_report_mode = "full"
    side("east").on_new_request(request)  # type: ignore[arg-type]
    assert request.kv_cache_report_mode == "incremental"


def test_only_a_step_that_computes_nothing_is_idle() -> None:
    prompt = list(range(100))
    scheduler = side("east")
    request = Request("r", prompt, {"prfaas": ticket_for(prompt)})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    (computing,) = chunks(scheduler, request, [32])
    assert not computing.is_idle
    assert orders_of(scheduler).is_idle


def usable(request_id: str, tokens: int) -> Any:
    return SimpleNamespace(
        kv_connector_worker_meta=StepReports({}, {request_id: ResumePoints(tokens)}),
        failed_recving={request_id},
    )


@pytest.mark.parametrize(
    ("kept", "loaded"),
    # A multiple of the blocks, between what the ticket leaves out and what it has; else the ticket alone counts.
    [(64, 64), (32, 100), (16, 100), (40, 100), (100, 100), (112, 100), (-16, 100), (True, 100), ("64", 100)],
)
def test_what_the_gateway_says_has_come_is_loaded_at_once(kept: object, loaded: int) -> None:
    scheduler = ConnectorScheduler("home", KEY, (FULL,), now_s=lambda: 1000.0)
    prompt = list(range(101))
    request = Request("r", prompt, {"prfaas": ticket_for(prompt[:100], 32), "prfaas_kept": kept})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert scheduler.num_external_tokens(request, 32) == loaded - 32  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(101)), loaded - 32)  # type: ignore[arg-type]
    (order,) = scheduler.build_metadata(Output({}, BlockState({}))).loads  # type: ignore[arg-type]
    assert order.usable_tokens == (loaded if loaded < 100 else 0)


@pytest.mark.parametrize(("local", "usable_tokens"), [(0, 64), (32, 48), (64, 64), (80, 64)])
def test_after_a_broken_transfer_what_has_come_is_offered(local: int, usable_tokens: int) -> None:
    """vLLM asks again for a request whose load has failed; it may hold another prefix by then."""
    scheduler = ConnectorScheduler("home", KEY, (FULL,), now_s=lambda: 1000.0)
    prompt = list(range(101))
    request = Request("r", prompt, {"prfaas": ticket_for(prompt[:100])})
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert scheduler.num_external_tokens(request, 0) == 100  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(101)), 100)  # type: ignore[arg-type]
    (whole,) = scheduler.build_metadata(Output({}, BlockState({}))).loads  # type: ignore[arg-type]
    assert whole.usable_tokens == 0
    scheduler.update(usable("somebody else", 16))
    assert scheduler.num_external_tokens(request, 0) == 0  # type: ignore[arg-type]
    scheduler.update(usable("r", usable_tokens + 16))
    # Another rank has less.
    scheduler.update(usable("r", usable_tokens))
    offered = max(usable_tokens - local, 0)
    assert scheduler.num_external_tokens(request, local) == offered  # type: ignore[arg-type]
    scheduler.update_after_alloc(request, Blocks(tables(101, base=300)), offered)  # type: ignore[arg-type]
    orders = scheduler.build_metadata(Output({}, BlockState({})))  # type: ignore[arg-type]
    if not offered:
        assert not orders.loads and len(orders.drops) == 1
        return
    (part,) = orders.loads
    assert (part.usable_tokens, part.local_tokens) == (usable_tokens, local)
    (run,) = part.runs
    assert run.first_block == local // 16
    assert run.block_ids == tuple(600 + block for block in range(local // 16, usable_tokens // 16))
    # It is asked no third time.
    assert scheduler.num_external_tokens(request, 0) == 0  # type: ignore[arg-type]
