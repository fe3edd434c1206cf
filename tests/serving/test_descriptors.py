"""File descriptors: the limit is raised, and what is known to be open decides whether one more request fits."""

import resource
import subprocess
import sys
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.descriptors import DescriptorBudget, raise_descriptor_limit


def test_the_limit_becomes_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "from prfaas.serving.descriptors import raise_descriptor_limit\n"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == ["200", "200", "200"]
    assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@given(st.integers(10, 500), st.integers(0, 50), st.lists(st.booleans(), max_size=300))
def test_what_is_admitted_stays_under_the_limit(limit: int, reserved: int, steps: list[bool]) -> None:
    """True: a client connects and asks, for at most two more descriptors. False: time passes and one leaves."""
    now_s, clients = 0.0, 0
    budget = DescriptorBudget(limit, reserved, lambda: clients, lambda: now_s)
    for comes in steps:
        if comes:
            if budget.has_room(clients + 1):
                clients += 1
        elif clients:
            clients -= 1
            now_s += 0.2
        # An eighth stays for connections that wait for their refusal.
        assert 3 * clients <= max(limit - reserved, 0) * 7 / 8 + 1


def test_room_comes_back() -> None:
    now_s, clients = 0.0, 90
    budget = DescriptorBudget(100, 10, lambda: clients, lambda: now_s)
    assert not budget.has_room(1)
    clients = 10
    assert not budget.has_room(1)
    now_s = 0.2
    assert budget.has_room(1)


@given(st.integers(0, 60), st.integers(0, 40), st.lists(st.booleans(), max_size=80))
def test_the_oldest_idle_connections_beyond_what_is_left_are_closed(
    limit: int, reserved: int, serving: list[bool]
) -> None:
    budget = DescriptorBudget(limit, reserved)
    with ExitStack() as open_requests:
        for number in (number for number, has_request in enumerate(serving) if has_request):
            open_requests.enter_context(budget.serving(number))
        closed = budget.too_idle(range(len(serving)))
        idle = [number for number, has_request in enumerate(serving) if not has_request]
        assert list(closed) == idle[: len(closed)]
        room = max(limit - reserved, 0)
        allowed = max(min(room // 2, room - 3 * (len(serving) - len(idle)) - room // 16), room // 16)
        assert len(closed) == max(len(idle) - allowed, 0)


def test_who_is_refused_finds_a_place_to_wait_for_it() -> None:
    """All that requests may have is open, and many more connections come: they and the rest fit under the limit."""
    clients: list[object] = []
    budget = DescriptorBudget(512, 100, lambda: len(clients), lambda: float(len(clients)))
    with ExitStack() as open_requests:
        served = 0
        for number in range(500):
            clients.append(number)
            if budget.has_room(served + 1):
                served += 1
                open_requests.enter_context(budget.serving(number))
            for closed in budget.too_idle(tuple(clients)):
                clients.remove(closed)
            assert 100 + len(clients) + 2 * served <= 512 - 20
        assert served > 100 and len(clients) > served
