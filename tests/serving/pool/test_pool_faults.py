"""Faults: what survived is served, no wrong byte is, nobody else dies, and nothing takes more than it may."""

import os
import random
from pathlib import Path

import pytest

from prfaas.serving.pool.client import PoolClient

from .faulty_pool import (
    PROMPT_PAGES,
    PROMPT_TOKENS,
    PROMPTS,
    FaultyPool,
    load,
    reconnect,
    store,
    surviving_client,
)
from .pool_daemon import wait_until

OTHERS = range(1000, 1010)
FAULTS = (
    "daemon killed",
    "engine killed",
    "both killed",
    "arena deleted",
    "pages truncated",
    "byte of the pages",
    "byte of the journal",
    "disk full",
    "disk full, then killed",
    "folder deleted",
)
SEEDS = 100
# One of each fault, and two more.
FAST_SEEDS = len(FAULTS)
TEST_SEEDS = 3 * len(FAULTS)


def figure(client: PoolClient, name: str) -> object:
    return (client.stats() or {}).get(name)


def is_written(client: PoolClient) -> bool:
    return figure(client, "ssd_pages") == figure(client, "memory_pages")


def tokens(client: PoolClient) -> list[int]:
    return [load(client, number) for number in PROMPTS]


def _marks(seed: int) -> list[pytest.MarkDecorator]:
    if seed >= TEST_SEEDS:
        return [pytest.mark.extended("more moments for the same faults")]
    return [pytest.mark.slow("more moments for the same faults")] * (seed >= FAST_SEEDS)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=_marks(seed)) for seed in range(SEEDS)])
def test_a_fault_costs_pages_and_nothing_else(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    is_rebooted = chosen.random() < 0.7
    with FaultyPool(tmp_path) as pool, surviving_client(pool) as client:
        for number in PROMPTS:
            assert store(client, number) == PROMPT_PAGES
        if chosen.random() < 0.7:
            wait_until(lambda: is_written(client))
        was_written, recovers = is_written(client), False

        match fault:
            case "daemon killed":
                pool.kill()
                pool.start()
                reconnect(client)
                assert tokens(client) == [PROMPT_TOKENS] * len(PROMPTS)
            case "engine killed" | "both killed":
                engine = pool.start_engine(100_000)
                wait_until(lambda: figure(client, "stored_pages") != PROMPT_PAGES * len(PROMPTS))
                engine.join(chosen.random() * 0.05)
                assert engine.exitcode is None
                engine.kill()
                if fault == "both killed":
                    pool.kill()
                    pool.start()
                    reconnect(client)
                engine.join()
                wait_until(lambda: figure(client, "writing_pages") == 0)
            case "arena deleted":
                pool.kill()
                pool.options.arena.unlink()
                pool.start()
                reconnect(client)
                if was_written:
                    assert tokens(client) == [PROMPT_TOKENS] * len(PROMPTS)
            case "pages truncated":
                pool.kill()
                path = pool.files(".pages")
                os.truncate(path, chosen.randrange(min(path.stat().st_size, 600_000)))
                if is_rebooted:
                    pool.options.arena.unlink()
                pool.start()
                reconnect(client)
            case "byte of the pages" | "byte of the journal":
                suffix = ".pages" if fault == "byte of the pages" else ".journal"
                is_running = chosen.random() < 0.3
                if is_running:
                    pool.flip_a_byte(suffix, chosen)
                pool.kill()
                if not is_running:
                    pool.flip_a_byte(suffix, chosen)
                if is_rebooted:
                    pool.options.arena.unlink()
                pool.start()
                reconnect(client)
                found = tokens(client)
                if was_written:
                    # A byte is of one page, and so of one prompt; or of the journal's header.
                    assert sum(each < PROMPT_TOKENS for each in found) <= 1 or found == [0] * len(PROMPTS)
            case "disk full" | "disk full, then killed":
                pool.fill_disk(chosen.randrange(1, 300_000))
                for number in OTHERS:
                    assert store(client, number) > 0
                if fault == "disk full, then killed":
                    pool.kill()
                    if is_rebooted:
                        pool.options.arena.unlink()
                    pool.start()
                    reconnect(client)
                else:
                    assert tokens(client).count(PROMPT_TOKENS) > 0
                    pool.fill_disk(None)
                    recovers = True
            case "folder deleted":
                for file in pool.disk.iterdir():
                    file.unlink()
                pool.disk.rmdir()
                for number in OTHERS:
                    assert store(client, number) > 0
                recovers = True

        for number in [*PROMPTS, *OTHERS]:
            for limit_tokens in range(16, PROMPT_TOKENS + 1, 16):
                assert load(client, number, limit_tokens) in range(0, limit_tokens + 1, 16)
        # Life goes on.
        for number in PROMPTS:
            store(client, number)
        assert tokens(client).count(PROMPT_TOKENS) > 0
        if recovers:
            wait_until(lambda: figure(client, "ssd_state") == "writable")
            before = figure(client, "ssd_written_bytes")
            assert store(client, 5000) == PROMPT_PAGES
            wait_until(lambda: figure(client, "ssd_written_bytes") != before)
        pool.check_caps()
        verified = client.verify()
        assert verified is not None
        assert verified["wrong_pages"] == 0
        pool.stop()
