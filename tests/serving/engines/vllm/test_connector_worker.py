"""A worker whose requests wait for transfers, for the pool, or for both; and whole engines at a pool's daemon."""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.serving.engines.vllm.test_pool_worker import awaited
from tests.serving.pool.pool_daemon import (
    TENANT,
    connected,
    packed_chain,
    pages_of,
    pool_options,
    running_daemon,
)
from tests.serving.pool.pool_daemon import chain_of as keys_of
from vllm.config import SpeculativeConfig, VllmConfig

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout
from prfaas.core.pool.depth import needed_blocks
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.vllm.connector import _check_parallelism
from prfaas.serving.engines.vllm.connector_worker import ConnectorWorker, PoolWorker
from prfaas.serving.engines.vllm.fingerprint import fingerprint, pool_fingerprint
from prfaas.serving.engines.vllm.layout import (
    EngineGroup,
    KvLayout,
    read_elements,
)
from prfaas.serving.engines.vllm.metadata import (
    CheckpointPlace,
    LoadOrder,
    PoolLoad,
    PoolLoadTime,
    PoolPages,
    PoolStore,
    StepReports,
    TransferMetadata,
)
from prfaas.serving.engines.vllm.pages import HostPages
from prfaas.serving.engines.vllm.rank_kv import drops_last_block, own_last_tokens
from prfaas.serving.engines.vllm.rank_pages import pool_geometry
from prfaas.serving.engines.vllm.settings import SettingsError
from prfaas.serving.engines.vllm.stages import regions_of
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.protocol import PoolMatch
from prfaas.serving.transport.protocol.fingerprint import fingerprint_difference
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket


class Half:
    """The transfers' or the pool's part of a worker: what a test says has ended."""

    def __init__(self) -> None:
        self.stats = ConnectorStats()
        self.ended: set[str] = set()
        self.failed: set[str] = set()
        self.free: set[str] = set()

    def order(self, *orders: Any) -> None: ...

    def hold(self, held: Any) -> None: ...

    def results(self) -> tuple[set[str], set[str]]:
        results = self.ended, self.failed
        self.ended, self.failed = set(), set()
        return results

    def finished(self) -> set[str]:
        free, self.free = self.free, set()
        return free

    def ready_for_checkpoints(self) -> dict[CheckpointPlace, int]:
        return {}

    def take_usable(self) -> dict[str, ResumePoints]:
        return {}


class PoolHalf:
    def __init__(self) -> None:
        self.reader = self.writer = Half()


def worker_of(transfers: Half, pool: PoolHalf | None) -> ConnectorWorker:
    return ConnectorWorker(None, None, transfers, transfers, pool)  # type: ignore[arg-type]


def load_orders(transfer: Sequence[str] = (), pool: Sequence[str] = ()) -> TransferMetadata:
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=9,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=9,
    )
    return TransferMetadata(
        loads=[LoadOrder(name, ticket, 0, ()) for name in transfer],
        pool_loads=[PoolLoad(name, 1, 1, ()) for name in pool],
    )


def test_a_request_with_two_sources_is_loaded_once_both_are() -> None:
    transfers, pool = Half(), PoolHalf()
    worker = worker_of(transfers, pool)
    worker.order_loads(load_orders(transfer=["both", "transfer"], pool=["both", "pool"]))
    transfers.ended = {"both", "transfer"}
    assert worker.loaded() == ({"transfer"}, set())
    pool.reader.ended = {"both", "pool"}
    assert worker.loaded() == ({"both", "pool"}, set())
    assert worker.loaded() == (set(), set())


def test_a_rest_ends_with_a_load_or_after_its_time() -> None:
    worker = worker_of(Half(), None)
    worker.order_loads(load_orders(transfer=["open"]))
    worker._load_ended.set()
    worker.rest(600.0)
    assert not worker._load_ended.is_set()
    worker.rest(0.001)


def test_nothing_rests_where_nothing_is_open() -> None:
    """The time limit of the test ends it otherwise."""
    transfers = Half()
    worker = worker_of(transfers, None)
    worker.rest(86_400.0)
    worker.order_loads(load_orders(transfer=["a"]))
    worker.hold(TransferMetadata(held={"b": False}))
    transfers.ended, transfers.free = {"a"}, {"b"}
    assert (worker.loaded(), worker.finished()) == (({"a"}, set()), {"b"})
    worker.rest(86_400.0)


@pytest.mark.parametrize("failing", ["transfer", "pool", "both"])
def test_a_request_fails_if_one_of_its_sources_did(failing: str) -> None:
    transfers, pool = Half(), PoolHalf()
    worker = worker_of(transfers, pool)
    for _ in range(2):  # the same request again: nothing is left of the first time
        worker.order_loads(load_orders(["r"], ["r"]))
        transfers.ended, transfers.failed = {"r"}, {"r"} if failing != "pool" else set()
        assert worker.loaded() == (set(), set())
        pool.reader.ended, pool.reader.failed = {"r"}, {"r"} if failing != "transfer" else set()
        assert worker.loaded() == ({"r"}, {"r"})
    worker.order_loads(load_orders(["r"], ["r"]))
    transfers.ended, pool.reader.ended = {"r"}, {"r"}
    assert worker.loaded() == ({"r"}, set())


def test_blocks_are_free_once_neither_a_transfer_nor_a_copy_reads_them() -> None:
    transfers, pool = Half(), PoolHalf()
    worker = worker_of(transfers, pool)
    worker.hold(TransferMetadata(held={"a": False, "b": True}))
    transfers.free = {"a", "b"}
    pool.writer.free = {"b"}
    assert worker.finished() == {"b"}
    pool.writer.free = {"a"}
    assert worker.finished() == {"a"}
    assert worker.finished() == set()


def test_without_a_pool_transfers_are_as_ever_and_loads_from_one_fail_at_once() -> None:
    transfers = Half()
    worker = worker_of(transfers, None)
    worker.hold(TransferMetadata(held={"a": False}))
    transfers.free = {"a"}
    assert worker.finished() == {"a"}
    worker.order_loads(load_orders(transfer=["t", "both"], pool=["p", "both"]))
    assert worker.loaded() == ({"p"}, {"p"})
    transfers.ended = {"t", "both"}
    assert worker.loaded() == ({"t", "both"}, {"both"})
    worker.store(TransferMetadata(pool_stores=[PoolStore("s", 1, (), False)]))
    worker.settle(TransferMetadata(preempted=["s"]))
    assert worker.take_reports() is None


def test_times_of_two_ranks_are_those_of_the_slower_one() -> None:
    one = StepReports({"r": PoolLoadTime(10, 0.1, 0.5, 0.9), "one": PoolLoadTime(5, 0, 0, 0)})
    two = StepReports({"r": PoolLoadTime(30, 0.2, 0.4, 1.0), "failed": PoolLoadTime(0, 0, 0, 0)})
    joined = one.aggregate(two)
    assert joined.loads["r"] == PoolLoadTime(40, 0.2, 0.5, 1.0)
    assert joined.loads.keys() == {"r", "one", "failed"}
    failed = joined.aggregate(StepReports({"r": PoolLoadTime(0, 0, 0, 2.0)}))
    assert failed.loads["r"] == PoolLoadTime(0, 0.2, 0.5, 2.0)


# ---- with a daemon

FULL = EngineGroup(0, GroupKind.FULL, 32, 0, ("a0", "a1"))
STATE = EngineGroup(1, GroupKind.STATE, 32, 0, ("g0",))
WINDOW = EngineGroup(2, GroupKind.WINDOW, 16, 40, ("w0",))
GROUPS = (FULL, STATE, WINDOW)
PAGE_BYTES = {"a0": 512, "a1": 300, "g0": 5000, "w0": 256}
RANKS = 2
PROMPT = list(range(7, 7 + 256))
SHIFT = 30


class Engine:
    """Two ranks with their KV, and the blocks that a request has: block b of any group lies in block base + b."""

    def __init__(self, socket: Path, name: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.kv = [
            {key: random.integers(0, 256, (80, size), dtype=np.uint8) for key, size in PAGE_BYTES.items()}
            for _ in range(RANKS)
        ]
        self.pools: list[PoolWorker] = []
        for rank, memory in enumerate(self.kv):
            layout = KvLayout(
                GROUPS, {key: [HostPages(torch.from_numpy(each))] for key, each in memory.items()}
            )
            self.geometry = pool_geometry(layout, "weights", RANKS)
            client = PoolClient(socket, "worker", self.geometry, rank, engine_id=name)
            assert client.connect()
            self.pools.append(PoolWorker(layout, self.geometry, rank, client, 20.0, ConnectorStats()))

    def store(self, scheduler: PoolClient, base: int) -> None:
        pages = pages_of(self.geometry, PROMPT)
        refs = scheduler.reserve(TENANT, pages)
        assert refs is not None
        places = dict(zip([page for page, _ in pages], refs, strict=True))
        ids = {group.index: [page for page, _ in pages if page[-1] == group.index] for group in GROUPS}
        for group in GROUPS:
            parts = [
                PoolPages(group.index, block, (base + block,), (ref,))
                for block, page in enumerate(ids[group.index])
                if (ref := places[page]) is not None
            ]
            urgent = group is not FULL
            for pool in self.pools:
                pool.writer.order([PoolStore("s", scheduler.epoch, tuple(parts), urgent)])
                pool.writer.settle(())

    def load(self, match: PoolMatch, base: int) -> list[tuple[set[str], set[str]]]:
        parts = tuple(
            PoolPages(
                pages.group,
                pages.first_block,
                tuple(range(base + pages.first_block, base + pages.first_block + len(pages.refs))),
                pages.refs,
            )
            for pages in match.pages
        )
        for pool in self.pools:
            pool.reader.order([PoolLoad("r", match.pin, match.epoch, parts)])
        return [awaited(pool.reader.results, lambda results: bool(results[0])) for pool in self.pools]

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


@contextlib.contextmanager
def engine_at(socket: Path, name: str, seed: int) -> Iterator[Engine]:
    engine = Engine(socket, name, seed)
    try:
        yield engine
    finally:
        engine.close()


def found(scheduler: PoolClient, geometry: PoolGeometry) -> PoolMatch | None:
    chain = packed_chain(keys_of(geometry, PROMPT))
    match = scheduler.match(chain, 0, 255, whole=True, tenant=TENANT, pin=True)
    return match if match is not None and match.usable_tokens == 224 else None


def test_two_ranks_store_for_another_engine_whose_loads_fail_after_a_restart_of_the_daemon(
    tmp_path: Path,
) -> None:
    options = pool_options(tmp_path, keep_arena=True)
    with (
        running_daemon(options) as daemon,
        engine_at(options.socket, "one", 1) as one,
        connected(options, "scheduler", one.geometry, engine_id="one") as scheduler,
        engine_at(options.socket, "two", 2) as two,
    ):
        one.store(scheduler, 1)
        match = awaited(lambda: found(scheduler, one.geometry), bool)
        assert match is not None
        before = [{name: pages.copy() for name, pages in memory.items()} for memory in two.kv]
        assert two.load(match, SHIFT) == [({"r"}, set())] * RANKS
        needed = dict(needed_blocks(GROUPS, 0, 224))
        for rank in range(RANKS):
            for group in GROUPS:
                for name in group.layer_names:
                    expected = before[rank][name]
                    for block in needed[group.index]:
                        expected[SHIFT + block] = one.kv[rank][name][1 + block]
                    assert np.array_equal(two.kv[rank][name], expected), (rank, name)
        daemon.stop()
        with running_daemon(options):
            assert two.load(match, SHIFT) == [({"r"}, {"r"})] * RANKS


# ---- what engines compare


SETTINGS: dict[str, Any] = {
    "layers": 4,
    "vocab_size": 320,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    "transformers_version": "5.0",
    "_name_or_path": "/models/ours",
    "text_config": {"_name_or_path": "/models/ours"},
}


def marks(
    identity: ModelIdentity = ModelIdentity("w", "t"),
    *,
    page_digests: bool = True,
    settings: dict[str, Any] = SETTINGS,
    architecture: str = "Qwen3ForCausalLM",
    quantization: str | None = None,
    cache_dtype: str = "auto",
    layout: KvLayout | None = None,
    convert_kv: bool = False,
    looked_ahead: int = 0,
) -> dict[str, str | int]:
    hf_config = SimpleNamespace(to_dict=lambda: settings, architectures=[architecture])
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf_config, hf_text_config=hf_config, dtype="bf16", quantization=quantization
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        num_prefill_lookahead_tokens=looked_ahead,
    )
    regions = regions_of(layout or kept())
    return fingerprint(regions, config, identity, "DS", page_digests=page_digests, convert_kv=convert_kv)


def kept(groups: Sequence[EngineGroup] = GROUPS, element: str = "") -> KvLayout:
    pages = {
        name: [HostPages(torch.zeros((4, size), dtype=torch.uint8))] for name, size in PAGE_BYTES.items()
    }
    layouts = {
        name: [
            PageLayout(
                group.kind,
                group.block_tokens,
                group.block_tokens,
                PAGE_BYTES[name],
                element="" if group.kind is GroupKind.STATE else element,
            )
        ]
        for group in groups
        for name in group.layer_names
    }
    return KvLayout(groups, pages, page_layouts=layouts)


def test_dtypes_of_caches_may_differ_where_the_deployment_asks_for_it() -> None:
    wide, narrow = kept(element="bfloat16"), kept(element="fp8_e4m3")
    refused = fingerprint_difference(
        marks(layout=wide), marks(layout=narrow, cache_dtype="fp8"), "home", "east"
    )
    assert refused == "KV layout differs in 'kv_cache_dtype': home has 'auto', east has 'fp8'"
    asked = [
        marks(layout=layout, cache_dtype=dtype, convert_kv=True)
        for layout, dtype in ((wide, "auto"), (narrow, "fp8"))
    ]
    assert fingerprint_difference(*asked, "home", "east") is None
    assert pool_fingerprint(asked[0], wide, 1) != pool_fingerprint(asked[1], narrow, 1)
    # What is not known to be convertible must be equal all the same.
    unknown = [marks(layout=kept(), cache_dtype=dtype, convert_kv=True) for dtype in ("auto", "fp8")]
    assert fingerprint_difference(*unknown, "home", "east") is not None


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "scales", "element"),
    [
        ("auto", torch.bfloat16, (1.0, 1.0), "bfloat16"),
        ("bfloat16", torch.bfloat16, (1.0, 1.0), "bfloat16"),
        ("auto", torch.float16, (1.0, 1.0), "float16"),
        ("auto", torch.float32, (1.0, 1.0), ""),
        ("fp8", torch.bfloat16, (1.0, 1.0), "fp8_e4m3"),
        ("fp8_e4m3", torch.bfloat16, (1.0, 1.0), "fp8_e4m3"),
        ("fp8_e5m2", torch.float16, (1.0, 1.0), "fp8_e5m2"),
        ("fp8", torch.bfloat16, (1.0, 0.5), ""),
        ("fp8", torch.bfloat16, (2.0, 1.0), ""),
        ("int8_per_token_head", torch.bfloat16, (1.0, 1.0), ""),
    ],
)
def test_elements_are_known_where_nothing_but_they_must_travel(
    cache_dtype: str, dtype: torch.dtype, scales: tuple[float, float], element: str
) -> None:
    layer = SimpleNamespace(_k_scale_float=scales[0], _v_scale_float=scales[1])
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype=dtype),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": layer}),
    )
    assert read_elements(config) == {"layers.0": element}


def test_engines_that_keep_kv_otherwise_share_no_pool() -> None:
    wider = [dataclasses.replace(group, block_tokens=64) if group is FULL else group for group in GROUPS]
    assert pool_fingerprint(marks(), kept(), 1) != pool_fingerprint(marks(), kept(wider), 1)
    assert pool_fingerprint(marks(), kept(), 1) != pool_fingerprint(marks(), kept(), 2)


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_engines_with_other_weights_or_tokenizers_neither_send_nor_share_a_pool(field: str) -> None:
    ours = ModelIdentity("ours", "ours")
    theirs = dataclasses.replace(ours, **{field: "theirs"})
    difference = fingerprint_difference(marks(ours), marks(theirs), "home", "east")
    assert difference == f"KV layout differs in '{field}': home has 'ours', east has 'theirs'"
    assert pool_fingerprint(marks(ours), kept(), 1) != pool_fingerprint(marks(theirs), kept(), 1)


def rotary_base(base: float) -> dict[str, Any]:
    return {"full_attention": {"rope_theta": base}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"settings": SETTINGS | {"rope_parameters": rotary_base(5e5)}},
            "'rope_parameters.full_attention.rope_theta': home has '1000000.0', east has '500000.0'",
        ),
        ({"settings": SETTINGS | {"vocab_size": 512}}, "'vocab_size': home has '320', east has '512'"),
        (
            {"architecture": "LlamaForCausalLM", "settings": SETTINGS | {"layers": 5}},
            "'architecture': home has 'Qwen3ForCausalLM', east has 'LlamaForCausalLM'",
        ),
        ({"quantization": "fp8"}, "'quantization': home has 'None', east has 'fp8'"),
    ],
)
def test_another_model_is_refused_with_the_setting_and_both_values(other: dict[str, Any], told: str) -> None:
    sentence = fingerprint_difference(marks(), marks(**other), "home", "east")
    assert sentence == f"KV layout differs in {told}"
    assert pool_fingerprint(marks(), kept(), 1) != pool_fingerprint(marks(**other), kept(), 1)


def test_a_setting_that_has_no_name_of_its_own_is_told_too() -> None:
    sentence = fingerprint_difference(marks(), marks(settings=SETTINGS | {"layers": 5}), "home", "east")
    assert sentence is not None and sentence.startswith("KV layout differs in 'model_config': home has ")


def test_a_setting_that_only_one_side_has_is_told() -> None:
    scaled = SETTINGS | {"rope_scaling": {"factor": [1.5] * 48}}
    sentence = fingerprint_difference(marks(), marks(settings=scaled), "home", "east")
    assert sentence is not None and "'rope_scaling.factor': home has None, east has " in sentence
    assert len(marks(settings=scaled)["rope_scaling.factor"]) == 16  # type: ignore[arg-type]


def test_where_a_model_lies_and_who_reads_its_settings_do_not_matter() -> None:
    elsewhere = {"_name_or_path": "/mnt/theirs", "text_config": {"_name_or_path": "/mnt/theirs"}}
    assert marks(settings=SETTINGS | elsewhere | {"transformers_version": "5.1"}) == marks()


def test_what_belongs_to_transfers_alone_does_not_part_pools() -> None:
    identity = ModelIdentity("w", "t")
    silent = marks(identity, page_digests=False)
    assert pool_fingerprint(marks(identity), kept(), 1) == pool_fingerprint(silent, kept(), 1)


@pytest.mark.parametrize(
    ("drops", "marked", "expected"),
    [(True, [0], True), (True, [2], False), (True, [], True), (False, [0], False), (None, [], False)],
)
def test_an_engine_tells_whether_it_drops_the_last_block_of_a_hit(
    drops: bool | None, marked: list[int], expected: bool
) -> None:
    """Full attention is group 0, windows are group 2; None: it does not speculate."""
    regions = [SimpleNamespace(group=group) for group in (FULL, WINDOW)]
    speculative = None if drops is None else SimpleNamespace(use_eagle_block_drop=lambda: drops)
    groups = [SimpleNamespace(is_eagle_group=index in marked) for index in range(3)]
    told = drops_last_block(
        SimpleNamespace(speculative_config=speculative),
        SimpleNamespace(kv_cache_groups=groups),
        SimpleNamespace(regions=regions),  # type: ignore[arg-type]
    )
    assert told is expected


@pytest.mark.parametrize(
    ("modules", "drafts", "own"),
    [(0, 0, 1), (1, 1, 1), (1, 3, 1), (3, 1, 1), (3, 2, 1), (3, 3, 2), (3, 6, 5)],
)
def test_several_modules_that_draft_need_more_last_tokens_of_a_prompt(
    modules: int, drafts: int, own: int
) -> None:
    """By vLLM's own property of a configuration."""
    told = {"num_nextn_predict_layers": modules}
    speculative = SimpleNamespace(
        method="mtp",
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**told)),
        num_speculative_tokens=drafts,
        use_eagle=lambda: True,
    )
    speculative.use_multi_module_mtp = partial(SpeculativeConfig.use_multi_module_mtp, speculative)
    of_engine = SimpleNamespace(
        speculative_config=speculative if modules else None, num_speculative_tokens=drafts
    )
    of_engine.num_prefill_lookahead_tokens = VllmConfig.num_prefill_lookahead_tokens.fget(of_engine)
    assert own_last_tokens(of_engine) == own


def test_windows_that_are_longer_for_drafts_are_refused_with_both_numbers_of_drafts() -> None:
    theirs = marks(looked_ahead=3)
    for ours, told in ((marks(looked_ahead=2), "2"), (marks(), "may differ")):
        assert fingerprint_difference(ours, theirs, "home", "east") == (
            f"KV layout differs in 'num_speculative_tokens': home has '{told}', east has '3'"
        )
    # One module looks a token ahead, and full attention keeps all tokens in any case.
    assert fingerprint_difference(marks(), marks(looked_ahead=1), "home", "east") is None
    full = kept([FULL])
    assert (
        fingerprint_difference(marks(layout=full), marks(layout=full, looked_ahead=3), "home", "east") is None
    )
    # An older release tells nothing of it: its windows are in `regions`.
    older = {name: mark for name, mark in marks().items() if name != "num_speculative_tokens"}
    assert fingerprint_difference(marks(), older, "home", "east") is None
    assert fingerprint_difference(older, marks(), "east", "home") is None


def parallel(**changed: object) -> SimpleNamespace:
    sizes = {f"{each}_parallel_size": 1 for each in ("pipeline", "decode_context", "prefill_context")}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | {"use_ubatching": False} | changed), speculative_config=None
    )


@pytest.mark.parametrize("option", ["decode_context", "prefill_context"])
def test_engines_whose_ranks_have_parts_of_tokens_are_refused(option: str) -> None:
    _check_parallelism(parallel())
    given = f"--{option.replace('_', '-')}-parallel-size 2"
    with pytest.raises(SettingsError, match=f"KVCache is not moved with {given}; start the engine with 1"):
        _check_parallelism(parallel(**{f"{option}_parallel_size": 2}))
    with pytest.raises(SettingsError, match="with --enable-dbo or --ubatch-size; start the engine without"):
        _check_parallelism(parallel(use_ubatching=True))


def test_stages_have_no_drafter() -> None:
    staged = parallel(pipeline_parallel_size=2)
    _check_parallelism(staged)
    staged.speculative_config = object()
    with pytest.raises(SettingsError, match="stages is not moved with --speculative-config"):
        _check_parallelism(staged)
