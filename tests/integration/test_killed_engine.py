"""A real prefill engine dies in the middle of a transfer: the decode engine goes on from what has come."""

import json
import threading
from collections.abc import Iterator

import pytest
from tests.ports import neighbours

from prfaas.core.kv.hf_config import model_from_directory

from .known_pages import with_known_pages
from .stack import (
    MODEL,
    PATIENCE_S,
    DemoAnswer,
    Stack,
    call,
    prompt,
    running,
    wait_until,
    write_deployment,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines die while they prefill, and are started anew"),
    pytest.mark.timeout(1800),
]

TOKENS, CHUNK_TOKENS = 6000, 1024
# Of KV, 6 KiB a token: seven seconds on this link.
BANDWIDTH = "40 Mbit/s"
# Of the models with states and windows: several seconds too.
BANDWIDTHS = {"qwen3-next": "10 Mbit/s", "gpt-oss": "20 Mbit/s"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with full attention only, one engine that prefills elsewhere and one that decodes."""
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-killed"), bandwidth=BANDWIDTH, max_model_len=8192
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = "qwen3"
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path)


@pytest.fixture(scope="module")
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The same with a model that has linear states, or windows; its prefill engine may be taken away.

    The parameter: a model, and the ranks of the prefill engine. Two send a part each.
    """
    model, ranks = request.param
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-killed"), bandwidth=BANDWIDTHS[model], max_model_len=8192
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = model
    document["clusters"][0] |= {"preemptible": True, "kills_per_hour": 3600}
    document["clusters"][1]["instances"].pop(0)
    if ranks > 1:
        (far,) = document["clusters"][0]["instances"]
        far |= {"tensor_parallel": ranks, "kv_port": neighbours(ranks)}
    path.write_text(json.dumps(document))
    yield from running(path, with_known_pages() if ranks > 1 else None)


FAR, HOME = "east-prefill-0", "home-decode-0"
EXTENDED = pytest.mark.extended(
    "each kind of cache is in `make test` with another share of the KV, and every share in the protocol's swarm"
)


def counters(stack: Stack) -> dict[str, float]:
    """What tells how the decode engine came by a prompt's KV."""
    names = ("loads_resumed", "digest_mismatches")
    told = {name: stack.metric(HOME, f"vllm:prfaas_{name}_total") for name in names}
    for source in ("local_compute", "external_kv_transfer"):
        told[source] = stack.metric(HOME, "vllm:prompt_tokens_by_source_total", f'source="{source}"')
    return told | {"kept": stack.metric("gateway", "prfaas_gateway_kept_tokens_total")}


def kill_at(stack: Stack, share: float, *, checkpoints: int) -> dict[str, float]:
    """Kill the prefill engine once that share of a prompt's KV has come; the answer must be a plain engine's.

    Returns:
        What `counters` have risen by.
    """
    if not stack.engines.is_running(FAR):
        stack.engines.start(FAR)
        stack.engines.wait_ready()
        health = stack.url("gateway", "/health")
        wait_until(lambda: call(health).body["instances"][FAR] == "up", PATIENCE_S, f"{FAR} is back")
    ids = prompt(30 + round(100 * share), TOKENS)
    plain = stack.plain(ids, engine=HOME)
    before, stats_before = counters(stack), stack.kv_stats(HOME)
    kv_model = model_from_directory(stack.deployment.model.path, name=MODEL)
    share_bytes = share * kv_model.bytes_to_move(TOKENS - 1)
    answers: list[DemoAnswer] = []
    client = threading.Thread(target=lambda: answers.append(stack.complete(ids)))
    client.start()

    def has_come() -> bool:
        stats = stack.kv_stats(HOME)
        risen = {name: stats[name] - stats_before[name] for name in ("received_bytes", "checkpoints")}
        return risen["received_bytes"] > share_bytes and risen["checkpoints"] >= checkpoints

    # What is left then crosses in less than a tenth of a second.
    wait_until(has_come, PATIENCE_S, f"{share:.0%} of the KV has come", every_s=0.01)
    stack.engines.kill(FAR)
    client.join(PATIENCE_S)
    assert not client.is_alive()
    (answer,) = answers
    # The other engine is dead: nobody can ask whether that is clean.
    wait_until(lambda: stack.kv_stats(HOME)["staging_used_blocks"] == 0, PATIENCE_S, "its staging is free")
    now = counters(stack)
    if stack.deployment.instance(FAR).tensor_parallel == 1:
        stack.check_answer(answer, plain)
    else:
        # Two ranks add up in another order than one.
        stack.check_likely((ids, answer.token_ids), engine=HOME)
    assert (answer.route["prefill"], answer.route["reason"]) == (HOME, "kept"), stack.explain(answer)
    return {name: now[name] - before[name] for name in before}


@pytest.mark.shows(model="qwen3", what="a prefill engine that dies")
@pytest.mark.parametrize("share", [0.25, pytest.param(0.95, marks=EXTENDED)])
def test_what_had_come_is_loaded_and_the_rest_computed(dense: Stack, share: float) -> None:
    risen = kill_at(dense, share, checkpoints=0)
    # Lost is what had not come, and at most what had of the chunk that was on its way.
    assert share * TOKENS - CHUNK_TOKENS <= risen["kept"] < TOKENS
    assert risen["external_kv_transfer"] == risen["kept"]
    assert risen["local_compute"] == TOKENS - risen["kept"]
    assert (risen["loads_resumed"], risen["digest_mismatches"]) == (1, 0)


# Of the KV, by which the prefill engine is killed: the first in `make test`.
CUTS = {("qwen3-next", 1): (0.95, 0.25), ("gpt-oss", 1): (0.5, 0.95), ("qwen3-next", 2): (0.75, 0.25)}


@pytest.mark.shows(model="{cut[0]}", prefill="TP {cut[1]}", what="a prefill engine that dies")
@pytest.mark.parametrize(
    ("cut", "share"),
    [
        case
        for cut, (first, more) in CUTS.items()
        for case in ((cut, first), pytest.param(cut, more, marks=EXTENDED))
    ],
    indirect=["cut"],
    ids=lambda value: value if isinstance(value, float) else f"{value[0]}-{value[1]}",
)
def test_with_states_or_windows_it_goes_on_from_a_checkpoint(cut: Stack, share: float) -> None:
    risen = kill_at(cut, share, checkpoints=cut.deployment.instance(FAR).tensor_parallel)
    print(f"killed at {share:.0%}: {risen['kept']:.0f} of {TOKENS} tokens kept")
    assert CHUNK_TOKENS <= risen["kept"] < TOKENS
    assert risen["kept"] % 128 == 0
    assert risen["external_kv_transfer"] == risen["kept"]
    assert risen["local_compute"] == TOKENS - risen["kept"]
    assert (risen["loads_resumed"], risen["digest_mismatches"]) == (1, 0)
