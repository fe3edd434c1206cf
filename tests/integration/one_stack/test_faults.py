"""What goes wrong costs time, never a token, and leaves nothing behind."""

import concurrent.futures
import itertools
import json
import random
import secrets
import socket
import threading
import time

import pytest

from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest

from ..stack import PATIENCE_S, DemoAnswer, Stack, call, completion_body, prompt, wait_until

# More than any machine decodes while a test looks once.
ANSWER_TOKENS = 4000

HEAD = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("long prompts over a link on which they take a while, some of them many times"),
    pytest.mark.timeout(1800),
]


def abort_after(stack: Stack, ids: list[int], delay_s: float) -> None:
    """A client that sends a streaming request and goes away."""
    body = json.dumps(completion_body(ids, 200, stream=True)).encode()
    with socket.create_connection(("127.0.0.1", stack.deployment.gateway.port), timeout=10) as client:
        head = [*HEAD, f"Content-Length: {len(body)}", "", ""]
        client.sendall("\r\n".join(head).encode() + body)
        time.sleep(delay_s)


def test_fifty_mixed_requests_with_ten_aborts_end_right_and_leave_nothing(stack: Stack) -> None:
    stack.wait_clean()
    before = {i.name: stack.kv_stats(i.name) for i in stack.deployment.instances}
    rng = random.Random(5)
    jobs = [prompt(2000 + i, rng.choice([40, 300, 700, 1500, 2300, 3000])) for i in range(50)]
    aborted = set(rng.sample(range(50), 10))

    def run(index: int) -> DemoAnswer | None:
        if index in aborted:
            abort_after(stack, jobs[index], rng.uniform(0.0, 6.0))
            return None
        return stack.complete(jobs[index], max_tokens=16)

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(run, range(50)))
    for index, answer in enumerate(answers):
        if answer is not None:
            assert answer.status == 200, (index, answer.body)
            assert len(answer.token_ids) == 16
    stack.wait_clean()
    after = {i.name: stack.kv_stats(i.name) for i in stack.deployment.instances}
    for name, stats in after.items():
        assert stats["thread_errors"] == 0
        assert stats["threads"] <= before[name]["threads"] + 1  # the observer that asks
        assert stats["producer_connections"] == before[name]["producer_connections"]
        assert stats["checksum_failures"] == 0


def test_concurrent_answers_are_right(stack: Stack) -> None:
    jobs = [prompt(3000 + i, 2100 + 150 * i) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(stack.complete, jobs))
        for answer in answers:
            assert answer.status == 200
            assert answer.route["route"] == "offload"
        # Other requests in a batch change chunks, and so the last bits.
        list(pool.map(stack.check_likely, zip(jobs, (answer.token_ids for answer in answers), strict=True)))


DECODED = ("home-decode-0", "vllm:generation_tokens_total")


@pytest.mark.parametrize("moment", ["at once", "prefilling", "transferring", "decoding"])
def test_a_client_that_leaves_frees_everything(stack: Stack, moment: str) -> None:
    stack.wait_clean()
    before = {i.name: stack.kv_stats(i.name) for i in stack.deployment.instances}
    decoded = stack.metric(*DECODED)
    ended = {outcome: requests_ended(stack, outcome) for outcome in ("ok", "cancelled")}

    def has_come() -> bool:
        # Each also holds later: a quick machine may be past the moment between two looks.
        if stack.metric(*DECODED) > decoded or moment == "at once":
            return True
        if moment == "prefilling":
            return stack.metric("east-prefill-0", "vllm:num_requests_running") > 0
        return bool(
            moment == "transferring" and stack.kv_stats("home-decode-0")["transfers"]["receiving"] > 0
        )

    ids = prompt(60 + len(moment), 5000)
    body = json.dumps(completion_body(ids, ANSWER_TOKENS, stream=True)).encode()
    with socket.create_connection(("127.0.0.1", stack.deployment.gateway.port), timeout=60) as client:
        head = [*HEAD, f"Content-Length: {len(body)}", "", ""]
        client.sendall("\r\n".join(head).encode() + body)
        wait_until(has_come, PATIENCE_S, f"the request is {moment}")
    if moment != "at once":  # then the gateway may never have read it
        wait_until(
            lambda: requests_ended(stack, "cancelled") == ended["cancelled"] + 1,
            PATIENCE_S,
            "the request is cancelled",
        )
    stack.wait_clean()
    assert requests_ended(stack, "ok") == ended["ok"]
    assert stack.metric(*DECODED) - decoded < ANSWER_TOKENS
    for name, stats in ((name, stack.kv_stats(name)) for name in before):
        assert stats["thread_errors"] == before[name]["thread_errors"] == 0
        assert stats["threads"] <= before[name]["threads"] + 1  # the observer that asks
        assert stats["producer_connections"] == before[name]["producer_connections"]
    # What was left half done is in nobody's way.
    again = stack.complete(ids, max_tokens=16)
    assert again.status == 200, again.body
    stack.check_likely((ids, again.token_ids))


def requests_ended(stack: Stack, outcome: str) -> float:
    return stack.metric("gateway", "prfaas_gateway_requests_total", f'outcome="{outcome}"')


def ticket_for(ids: list[int], salt: str = "") -> Ticket:
    """A well-made ticket of a transfer that never happens."""
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east-prefill-0",
        consumer="home-decode-0",
        num_tokens=len(ids) - 1,
        skip_tokens=0,
        prompt_digest=prompt_digest(ids[:-1], salt),
        expires_at_s=time.time() + 60,
    )


def test_forged_and_foreign_parameters_change_nothing(stack: Stack) -> None:
    ids = prompt(20, 600)
    plain = call(stack.url("home-decode-0", "/v1/completions"), completion_body(ids, 8, cache_salt="a"))
    other_key = ticket_for(ids).seal(b"x" * 32)
    forged = (
        {"prfaas": other_key},
        {"prfaas": {"remote_host": "192.0.2.1", "remote_port": 1}},
        {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_block_ids": [1, 2]},
    )
    for index, params in enumerate(forged):
        # A salt for each, so that none starts from what another left in the cache and is split otherwise.
        body = completion_body(ids, 8, cache_salt=f"forged {index}", kv_transfer_params=params)
        direct = call(stack.url("home-decode-0", "/v1/completions"), body)
        assert direct.status == 200
        assert direct.token_ids == plain.token_ids
        through = call(stack.url("gateway", "/v1/completions"), body)
        assert through.status == 200
        assert not through.body.get("kv_transfer_params")


def test_a_ticket_that_nobody_honours_ends_in_a_local_prefill(stack: Stack) -> None:
    ids = prompt(21, 600)
    sealed = ticket_for(ids, "b").seal(load_key(stack.deployment.security.key_file))
    body = completion_body(ids, 8, cache_salt="b", kv_transfer_params={"prfaas": sealed})
    failed = stack.metric("home-decode-0", "vllm:prfaas_loads_failed_total")
    answer = call(stack.url("home-decode-0", "/v1/completions"), body)
    plain = call(stack.url("home-decode-0", "/v1/completions"), completion_body(ids, 8, cache_salt="c"))
    assert answer.token_ids == plain.token_ids
    wait_until(
        lambda: stack.metric("home-decode-0", "vllm:prfaas_loads_failed_total") > failed,
        PATIENCE_S,
        "the failure is counted",
    )
    stack.wait_clean()


def test_prefix_caches_and_gateway_survive_a_full_staging(stack: Stack) -> None:
    """More transfers at once than staging holds: they wait for room, and all end right."""
    jobs = [prompt(4000 + i, 6000) for i in range(6)]  # 6 × 6.5 MiB into 32 MiB
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda ids: stack.complete(ids, max_tokens=2), jobs))
    assert [answer.status for answer in answers] == [200] * 6
    stack.wait_clean()


def test_killing_the_prefill_engine_in_the_middle_of_a_transfer(stack: Stack) -> None:
    """Runs last: the engine is started again afterwards."""
    ids, following = prompt(30, 9000), prompt(31, 3000)
    reference, next_reference = stack.reference(ids, salt="kill"), stack.reference(following, salt="kill")
    answers: list[DemoAnswer] = []
    client = threading.Thread(target=lambda: answers.append(stack.complete(ids)))
    client.start()
    wait_until(
        lambda: stack.kv_stats("home-decode-0")["transfers"]["receiving"] > 0, PATIENCE_S, "the transfer runs"
    )
    stack.engines.kill("east-prefill-0")
    client.join(PATIENCE_S)
    assert not client.is_alive()
    # The decode engine prefills in one piece what it was asked for when most bytes had come.
    whole = answers[0].route["prefill"] == answers[0].route["decode"]
    stack.check_answer(answers[0], stack.plain(ids) if whole else reference)
    assert answers[0].route["route"] == "local"
    assert "fallback" in answers[0].route
    after = stack.complete(following)
    stack.check_answer(after, next_reference)
    assert after.route["route"] == "local"
    stack.engines.start("east-prefill-0")
    fresh = itertools.count(40_000)  # a prompt that is cached anywhere may rightly stay at home
    stack.engines.wait_ready()
    wait_until(
        lambda: stack.complete(prompt(next(fresh), 2500), 1).route["route"] == "offload",
        PATIENCE_S,
        "the engine is used again",
    )
