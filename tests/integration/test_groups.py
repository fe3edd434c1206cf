"""A data-parallel group of real engines under `prfaas up`: both ranks are used, and start again as one."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports, neighbours

from prfaas.serving.engines.preparation import ensure_key

from .shimmed import with_shims
from .stack import ENGINE_ENV, LOGITS, PATIENCE_S, DemoAnswer, Stack, prompt, wait_until, write_deployment
from .test_up import child_of, is_gone

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("three engines of its own, two of which are started twice"),
    pytest.mark.timeout(1200),
]

RANKS = ("home-0", "home-1")
PREFILL = "east-prefill-0"
TOKENS = (2300, 2700, 3100)


def written(directory: Path) -> Path:
    """One engine that prefills, and a group of two that decode, with events over local sockets."""
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=8192, policy="offload_all")
    document: dict[str, Any] = json.loads(path.read_text())
    ports = free_ports(2)
    document["clusters"][1]["instances"] = [
        {
            "name": name,
            "roles": ["decode"],
            "host": "127.0.0.1",
            "http_port": ports[rank],
            # Rank 0 waits for the other one at the port behind.
            "kv_port": neighbours(2),
            "data_parallel": "moe",
            "expert_parallel": True,
        }
        for rank, name in enumerate(RANKS)
    ]
    path.write_text(json.dumps(document))
    return path


class Group:
    """The deployment under `prfaas up`."""

    def __init__(self, path: Path) -> None:
        self.stack = Stack(path)
        ensure_key(self.stack.deployment)
        self.told = path.parent / "told.txt"
        with self.told.open("w") as errors:
            self.up = subprocess.Popen(
                [sys.executable, "-m", "prfaas.cli.main", "up", str(path)],
                env={**os.environ, **ENGINE_ENV, **with_shims("with_data_parallel")},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, seed: int) -> tuple[list[int], DemoAnswer]:
        """A prompt of its own; what is refused while nothing can decode is asked again."""
        ids = prompt(seed, TOKENS[seed % len(TOKENS)])
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self.stack.complete(ids, 16, **LOGITS)
            if answer.status == 200 or time.monotonic() > deadline_s:
                return ids, answer
            time.sleep(1.0)

    def close(self) -> None:
        self.up.send_signal(signal.SIGTERM)
        try:
            self.up.wait(PATIENCE_S)
        finally:
            self.up.kill()
            self.up.communicate()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(written(tmp_path_factory.mktemp("prfaas-group")))
    try:
        assert started.up.stdout is not None
        assert started.up.stdout.readline().startswith("ready: "), started.told.read_text()
        yield started
    finally:
        started.close()


@pytest.mark.shows(model="qwen3-next", decode="TP 1, DP 2", what="stand-in for what ranks exchange")
def test_both_ranks_load_and_answer(group: Group) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answered = list(pool.map(group.ask, range(12)))
    routes = [answer.route for _, answer in answered]
    assert {route["decode"] for route in routes} == set(RANKS)
    assert not any("fallback" in route for route in routes), routes
    group.stack.check_likely(*((ids, answer.token_ids) for ids, answer in answered[:4]), engine=PREFILL)
    loaded = [group.stack.metric(name, "vllm:prfaas_loads_completed_total") for name in RANKS]
    assert sum(loaded) == len(answered) and min(loaded) > 0
    # Events of each rank come over its own socket.
    group.stack.settle()
    assert all(group.stack.blocks_known(name) for name in RANKS)


@pytest.mark.extended(
    "both ranks answer in `make test`, and a group that starts anew as one is there without engines"
)
def test_a_killed_rank_takes_its_group_and_all_are_answered(group: Group) -> None:
    before = [
        child_of(group.up.pid, f"--port {group.stack.deployment.instance(name).http_port}") for name in RANKS
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(group.ask, 100 + number) for number in range(12)]
        time.sleep(2.0)
        os.killpg(before[1], signal.SIGKILL)
        answers = [each.result() for each in asked]
    assert [answer.status for _, answer in answers] == [200] * len(answers)
    wait_until(lambda: "group moe is ready again" in group.told.read_text(), PATIENCE_S, "it is back")
    assert "engine group moe has ended (" in group.told.read_text()
    after = [
        child_of(group.up.pid, f"--port {group.stack.deployment.instance(name).http_port}") for name in RANKS
    ]
    assert not set(before) & set(after) and all(map(is_gone, before))
    group.stack.check_likely(*((ids, answer.token_ids) for ids, answer in answers[-2:]), engine=PREFILL)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        routes = [answer.route for _, answer in pool.map(group.ask, range(200, 208))]
    assert {route["decode"] for route in routes} == set(RANKS)
