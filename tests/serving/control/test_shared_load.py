"""N gateways over the same instances: each counts the sum of all, and turns are shared."""

import asyncio
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.deployment import Deployment
from prfaas.core.prefix.hashing import PromptChains
from prfaas.core.scheduling.gateway_share import ClusterShare, GatewayShare, OtherGateways, total
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.prefill_admission import PrefillAdmission

from .world import BYTES_PER_TOKEN, LINK, FakeClock, cluster_state_of, decision, deployment_of

PREFILL = ("far-0", "far-1", "home-p0")
DECODE = ("home-d0", "home-d1")
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["prefill", "decode", "end"]),
        st.sampled_from(PREFILL),
        st.sampled_from(DECODE),
        st.integers(1, 5000),
    ),
    max_size=25,
)


def tell(states: list[ClusterState]) -> list[GatewayShare]:
    """Everybody tells everybody. Returns what each has told."""
    shares = [state.own_share() for state in states]
    for index, state in enumerate(states):
        state.set_others(total(shares[:index] + shares[index + 1 :]))
    return shares


@settings(max_examples=20)
@given(steps=STEPS, dead=st.integers(0, 2))
def test_each_gateway_sees_the_sum_of_all(steps: list[tuple[int, str, str, str, int]], dead: int) -> None:
    clock = FakeClock()
    deployment = made()
    states = [cluster_state_of(deployment, clock) for _ in range(3)]
    open_here: list[list[ExitStack]] = [[] for _ in states]
    requests = [dict.fromkeys(deployment_names(deployment), 0) for _ in states]
    for who, what, prefill, decode, tokens in steps:
        if what == "end":
            if open_here[who]:
                open_here[who].pop().close()
        else:
            stack = ExitStack()
            if what == "prefill":
                stack.enter_context(states[who].prefilling(decision(prefill, decode, prefill_tokens=tokens)))
            else:
                stack.enter_context(states[who].decoding(decode, 0))
            open_here[who].append(stack)
        tell(states)
        clock.now_s += 0.01
    shares = tell(states)
    # What others tell is never told again as one's own.
    assert tell(states) == shares
    for name in requests[0]:
        in_flight = {state.instance(name).in_flight for state in states}
        decoding = {state.instance(name).decoding for state in states}
        prefills = {state.open_prefills(name) for state in states}
        told = [share.instances.get(name) for share in shares]
        assert in_flight == {sum(each.requests for each in told if each is not None)}
        assert decoding == {sum(each.decoding + each.arriving for each in told if each is not None)}
        assert prefills == {sum(each.prefills for each in told if each is not None)}
        for state in states:
            busy_s = state.instance(name).busy_until_s - clock.now_s
            left_s = sum(each.prefill_s for each in told if each is not None)
            assert max(busy_s, 0.0) == pytest.approx(left_s, abs=1e-6)
    residual = sum(share.links.get("->".join(LINK), 0) for share in shares)
    assert {state.residual_bytes(LINK) for state in states} == {residual}
    # One dies: its lease takes its part away.
    rest = [state for index, state in enumerate(states) if index != dead]
    tell(rest)
    for name in requests[0]:
        assert len({state.instance(name).in_flight for state in rest}) == 1
    for stacks in open_here:
        for stack in reversed(stacks):
            stack.close()
    tell(states)
    for state in states:
        assert all(state.instance(name).in_flight == 0 for name in state.names)
        assert all(state.instance(name).decoding == 0 for name in state.names)
        assert state.residual_bytes(LINK) == 0


@cache
def made() -> Deployment:
    """One for all examples: reading a profile takes longer than an example."""
    with TemporaryDirectory() as folder:
        return deployment_of(Path(folder))


def deployment_names(deployment: Deployment) -> list[str]:
    return [instance.name for instance in deployment.instances]


def test_what_a_link_delivers_comes_off_all_promises(deployment: Deployment, clock: FakeClock) -> None:
    states = [cluster_state_of(deployment, clock) for _ in range(2)]
    with (
        states[0].prefilling(decision("far-0", "home-d0", prefill_tokens=3000)),
        states[1].prefilling(decision("far-1", "home-d1", prefill_tokens=1000)),
    ):
        tell(states)
        for state in states:
            assert state.residual_bytes(LINK) == 4000 * BYTES_PER_TOKEN
            state.set_link(
                LINK, delivered_bytes=2000 * BYTES_PER_TOKEN, measured_bytes=0, capacity_bits_per_s=1e9
            )
        tell(states)
        assert [state.residual_bytes(LINK) for state in states] == [2000 * BYTES_PER_TOKEN] * 2
        expected_s = clock.now_s + 8 * 2000 * BYTES_PER_TOKEN / 1e9
        assert [state.view.links[LINK].drained_s for state in states] == [pytest.approx(expected_s)] * 2


def test_what_gateways_tell_is_not_guessed_as_well(deployment: Deployment, clock: FakeClock) -> None:
    one, other = (cluster_state_of(deployment, clock) for _ in range(2))
    with other.decoding("home-d0", 0), other.decoding("home-d0", 0):
        for _ in range(2):
            one.set_engine_load("home-d0", 2)
        assert one.instance("home-d0").decoding == 2  # guessed
        tell([one, other])
        assert one.instance("home-d0").decoding == 2  # told
        for _ in range(2):
            one.set_engine_load("home-d0", 3)
        assert one.instance("home-d0").decoding == 3  # two are told of, one is a stranger's


def test_time_in_which_others_prefill_counts_as_busy(deployment: Deployment, clock: FakeClock) -> None:
    one, other = (cluster_state_of(deployment, clock) for _ in range(2))
    with other.prefilling(decision("far-0", "home-d0")):
        tell([one, other])
        clock.now_s += 0.4
        tell([one, other])
    clock.now_s += 5.0
    tell([one, other])
    assert one.prefill_busy_s("far-0") == pytest.approx(5.4)
    clock.now_s += 5.0
    tell([one, other])
    assert one.prefill_busy_s("far-0") == pytest.approx(5.4)


class Yard:
    """Several gateways' admissions at the same instances. A prefill takes a second per 1000 tokens."""

    def __init__(self, deployment: Deployment, clock: FakeClock, gateways: int) -> None:
        self.clock = clock
        self.states = [cluster_state_of(deployment, clock) for _ in range(gateways)]
        self.admissions = [
            PrefillAdmission(state, batch_tokens=2048, reusable_at=lambda *_: 0) for state in self.states
        ]
        self.at_work: dict[str, list[tuple[float, int, asyncio.Event]]] = {}
        self.done = [0] * gateways
        self.most = 0

    def asks(self, who: int, *, tokens: int, only: str | None = None) -> "asyncio.Task[None]":
        what = decision(only or "far-0", "home-d0", prefill_tokens=tokens)
        what = structs.replace(what, urgency_s=0.0, is_bound=only is not None)

        async def whole() -> None:
            async with self.admissions[who].admit(what, PromptChains(tokens, {})) as mine:
                over = asyncio.Event()
                here = self.at_work.setdefault(mine.prefill, [])
                # An engine works on one after the other.
                begin_s = max([self.clock.now_s, *(end_s for end_s, _, _ in here)])
                here.append((begin_s + tokens / 1000, tokens, over))
                self.most = max(self.most, len(here))
                await over.wait()
            self.done[who] += tokens

        return asyncio.create_task(whole())

    async def pass_time(self, seconds: float, step_s: float = 0.1) -> None:
        """Everybody tells everybody, every tenth of a second."""
        for _ in range(round(seconds / step_s)):
            self.clock.now_s += step_s
            for here in self.at_work.values():
                for each in [each for each in here if each[0] <= self.clock.now_s + 1e-9]:
                    here.remove(each)
                    each[2].set()
            await settled()
            for index, admission in enumerate(self.admissions):
                others = {
                    str(other): self.admissions[other].own_share()
                    for other in range(len(self.admissions))
                    if other != index
                }
                admission.set_others(OtherGateways(others))
                await settled()


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_an_instance_that_another_gateway_uses_is_not_free(deployment: Deployment, clock: FakeClock) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock, 2)
        first = [yard.asks(0, tokens=5000) for _ in range(2)]
        await yard.pass_time(0.1)
        late = yard.asks(1, tokens=5000)
        await settled()
        assert yard.admissions[1].waiting("far") == 1
        await yard.pass_time(0.1)
        # The other gateway knows that it waits.
        assert yard.admissions[0].waiting("far") == 1
        assert yard.states[0].view.clusters["far"].waiting_s == pytest.approx(5.0)
        assert yard.most == 1
        await yard.pass_time(5.0)
        assert (yard.done, yard.most) == ([10_000, 0], 1)
        await yard.pass_time(6.0)
        assert yard.done == [10_000, 5000]
        await asyncio.gather(*first, late)
        assert yard.states[1].view.clusters["far"].waiting_s == 0.0

    asyncio.run(main())


@pytest.mark.parametrize("tokens", [(3000, 3000), (12_000, 3000)])
def test_gateways_that_always_want_more_get_the_same(
    deployment: Deployment, clock: FakeClock, tokens: tuple[int, int]
) -> None:
    """Whoever is told last that there is room would otherwise never get it."""

    async def main() -> None:
        yard = Yard(deployment, clock, 2)
        tasks = [yard.asks(0, tokens=tokens[0]) for _ in range(60)]
        await yard.pass_time(5.0)
        tasks += [yard.asks(1, tokens=tokens[1]) for _ in range(200)]
        before = list(yard.done)
        await yard.pass_time(180.0)
        work = [now - then for now, then in zip(yard.done, before, strict=True)]
        # The late one may catch up on what it is remembered to have had less.
        assert 0.8 < work[0] / work[1] < 1.25, work
        # 2 instances of 1000 tokens/s for 180 s; what is left idle is small.
        assert sum(work) > 0.9 * 2 * 180 * 1000, work
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert yard.most <= 2

    asyncio.run(main())


def test_room_is_not_kept_for_a_gateway_that_does_not_take_it(
    deployment: Deployment, clock: FakeClock
) -> None:
    async def main() -> None:
        yard = Yard(deployment, clock, 1)
        admission = yard.admissions[0]
        tasks = [yard.asks(0, tokens=20_000) for _ in range(2)]
        await yard.pass_time(0.1)
        # Another gateway is said to wait, has had nothing, and never takes what is free.
        waiting = GatewayShare(clusters={"far": ClusterShare(waiting=1)})
        tasks += [yard.asks(0, tokens=3000) for _ in range(2)]
        for here in yard.at_work.values():
            here.pop()[2].set()
        admission.set_others(OtherGateways({"silent": waiting}))
        await settled()
        assert admission.waiting("far") == 2 + 1
        clock.now_s += 0.4
        admission.set_others(OtherGateways({"silent": waiting}))
        await settled()
        assert admission.waiting("far") == 2 + 1
        clock.now_s += 0.2
        admission.set_others(OtherGateways({"silent": waiting}))
        await settled()
        assert admission.waiting("far") == 0 + 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
