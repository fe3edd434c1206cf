"""What a gateway takes on: limits, tenants' parts, deadlines, and that all of it is given back."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs
from multidict import CIMultiDict

from prfaas.core.deployment import GatewayLimits
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.serving.gateway.admission import Admission, AdmittedRequest, timeout_of
from prfaas.serving.gateway.bodies import ApiError

from .world import OPTIONS, World

InWorld = Callable[..., None]
LONG = list(range(40, 200)) * 3
JSON = {"Content-Type": "application/json"}
LIMITS = GatewayLimits(requests=10, queue_s=8.0, bodies_bytes=1000)
DECISION = Decision(
    route=Route.OFFLOAD,
    prefill="p",
    decode="d",
    uncached_tokens=500,
    prefill_tokens=500,
    skip_tokens=0,
    kv_bytes=10,
    reason="long",
    threshold_tokens=100.0,
    predicted_ttft_s=4.0,
)


class Waits:
    """What a control plane predicts."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.token_s = 0.0

    def least(self) -> float:
        return self.seconds

    def of(self, _decision: Decision) -> float:
        return self.seconds

    def answer_s(self, _decode: str, max_tokens: int | None) -> float:
        return self.token_s * (max_tokens or 0)


def admission(limits: GatewayLimits = LIMITS, waits_s: float = 0.0) -> tuple[Admission, Waits]:
    waits = Waits(waits_s)
    running = SimpleNamespace(current=SimpleNamespace(gateway=SimpleNamespace(limits=limits)))
    return Admission(running, waits), waits  # type: ignore[arg-type]


NO_HEADERS: CIMultiDict[str] = CIMultiDict()


def in_ms(milliseconds: int) -> CIMultiDict[str]:
    return CIMultiDict({"X-Request-Timeout": str(milliseconds / 1000)})


class AdmissionMachine(RuleBasedStateMachine):
    """Requests of three tenants come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.admission, self.waits = admission()
        self.open: list[tuple[str, Any, AdmittedRequest]] = []

    @property
    def held(self) -> Counter[str]:
        return Counter(tenant for tenant, _, _ in self.open)

    @rule(tenant=st.sampled_from("abc"), wait_s=st.sampled_from([0.0, 5.0, 9.0]), nbytes=st.integers(0, 1200))
    def comes(self, tenant: str, wait_s: float, nbytes: int) -> None:
        self.waits.seconds = wait_s
        entering = self.admission.admitted(tenant, NO_HEADERS, nbytes)
        try:
            request = entering.__enter__()
        except ApiError as error:
            if error.status == 413:
                assert nbytes > LIMITS.bodies_bytes
                return
            assert error.status == 429 and int(error.headers()["Retry-After"]) >= 1
            # An idle gateway takes whatever fits, and a tenant that holds nothing is never told of its part.
            assert self.open
            assert self.held[tenant] or "part of the open requests" not in error.message
            return
        request.begin()
        self.open.append((tenant, entering, request))
        assert not wait_s > LIMITS.queue_s or len(self.open) == 1

    @precondition(lambda self: self.open)
    @rule(nbytes=st.integers(1, 400), data=st.data())
    def sends(self, nbytes: int, data: st.DataObject) -> None:
        _, _, request = data.draw(st.sampled_from(self.open))
        try:
            request.hold(nbytes)
        except ApiError as error:
            assert error.status == 429

    @precondition(lambda self: self.open)
    @rule(answers=st.integers(1, LIMITS.requests + 1), data=st.data())
    def wants_more(self, answers: int, data: st.DataObject) -> None:
        _, _, request = data.draw(st.sampled_from(self.open))
        if request.answers > 1:
            return
        try:
            request.widen(answers)
        except ApiError as error:
            assert error.status == (400 if answers > LIMITS.requests else 429)
            assert request.answers == 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sampled_from(self.open))
        self.open.remove(leaving)
        leaving[1].__exit__(None, None, None)

    @invariant()
    def is_within_limits(self) -> None:
        assert self.admission.open_requests == len(self.open) <= LIMITS.requests
        assert sum(request.answers for _, _, request in self.open) == self.admission._open <= LIMITS.requests
        assert sum(request.held_bytes for _, _, request in self.open) <= LIMITS.bodies_bytes

    def teardown(self) -> None:
        for _, entering, _ in self.open:
            entering.__exit__(None, None, None)
        assert (self.admission._open, self.admission._bytes) == (0, 0)
        assert not (self.admission._taken_of or self.admission._open_of or self.admission._bytes_of)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@contextmanager
def opened(
    limits: Admission, tenant: str, headers: CIMultiDict[str] = NO_HEADERS
) -> Iterator[AdmittedRequest]:
    """A request whose body is complete."""
    with limits.admitted(tenant, headers, 0) as request:
        request.begin()
        yield request


def test_each_answer_counts_as_a_request_and_for_its_tenants_part() -> None:
    limits, _ = admission()
    with opened(limits, "a") as request, opened(limits, "b") as other:
        with pytest.raises(ApiError, match="answers") as refused:
            other.widen(LIMITS.requests + 1)
        assert refused.value.status == 400
        # Alone it might: half of the places are everybody's, of more each tenant has its part.
        with pytest.raises(ApiError, match="part of the open requests"):
            request.widen(LIMITS.requests - 1)
        request.widen(LIMITS.requests // 2 - 1)
        assert limits.open_requests == 2
    with opened(limits, "a") as request:
        request.widen(LIMITS.requests)
        with pytest.raises(ApiError, match="open requests") as refused, opened(limits, "b"):
            pass
        assert refused.value.status == 429


def test_a_request_counts_from_the_end_of_its_body_on() -> None:
    limits, _ = admission()
    with ExitStack() as open_:
        slow = [open_.enter_context(limits.admitted("a", NO_HEADERS, 0)) for _ in range(3 * LIMITS.requests)]
        for _ in range(LIMITS.requests - 1):
            open_.enter_context(opened(limits, "a"))
        slow[0].begin()
        assert limits.open_requests == LIMITS.requests
        for refused in (slow[1].begin, limits.admitted("a", NO_HEADERS, 0).__enter__):
            with pytest.raises(ApiError, match="open requests") as error:
                refused()
            assert (error.value.status, error.value.reason) == (429, "requests")
    assert limits.open_requests == 0


def test_a_tenant_gives_way_when_another_one_comes() -> None:
    limits, _ = admission()
    with ExitStack() as open_:
        for _ in range(8):
            open_.enter_context(opened(limits, "a"))
        # Alone it may have everything; beside another one only as much as that one.
        with ExitStack() as other:
            other.enter_context(opened(limits, "b"))
            with pytest.raises(ApiError, match="tenant") as error:
                other.enter_context(opened(limits, "a"))
        open_.enter_context(opened(limits, "a"))
    assert (error.value.status, error.value.reason) == (429, "share")


def test_the_queue_is_bounded_in_predicted_seconds() -> None:
    limits, waits = admission()
    with opened(limits, "") as first:
        first.check(DECISION, None)
        waits.seconds = 20.0
        with pytest.raises(ApiError) as error:
            first.check(DECISION, None)
        assert (error.value.status, error.value.headers()) == (429, {"Retry-After": "12"})
        assert error.value.reason == "queue"
        with pytest.raises(ApiError, match="more than 8 s"), opened(limits, ""):
            pass


@settings(deadline=None)
@given(
    st.floats(0.001, 50),
    st.floats(0, 7),
    st.one_of(st.just(math.nan), st.floats(0, 100)),
    st.sampled_from([0.0, 5.0]),
    st.integers(0, 300),
)
def test_what_cant_be_done_in_time_is_not_begun(
    timeout_s: float, wait_s: float, ttft_s: float, kv_wait_s: float, max_tokens: int
) -> None:
    limits, waits = admission()
    headers = CIMultiDict({"x-request-timeout": repr(timeout_s)})
    with opened(limits, "", headers) as request:
        waits.seconds, waits.token_s = wait_s, 0.1
        needed_s = max(wait_s, 0.0 if math.isnan(ttft_s) else ttft_s + kv_wait_s) + 0.1 * max_tokens
        try:
            request.check(structs.replace(DECISION, predicted_ttft_s=ttft_s, kv_wait_s=kv_wait_s), max_tokens)
        except ApiError as error:
            assert error.status == 429 and needed_s > (0.8 if wait_s else 1.0) * timeout_s - 1.0
        else:
            # Behind a queue, a fifth of the time is kept for what a mean does not tell.
            assert needed_s <= (0.8 if wait_s else 1.0) * timeout_s


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_is_a_positive_number(value: str) -> None:
    with pytest.raises(ApiError, match="x-request-timeout must be") as error:
        timeout_of(CIMultiDict({"x-request-timeout": value}))
    assert error.value.status == 400
    twice = CIMultiDict([("x-request-timeout", "1"), ("x-request-timeout", "2")])
    with pytest.raises(ApiError, match="one number"):
        timeout_of(twice)
    assert timeout_of(CIMultiDict({"X-Request-Timeout": "2.5"})) == 2.5


def test_beyond_the_limit_of_requests_there_is_a_429_with_retry_after(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.hangs = True
        open_ = [asyncio.create_task(world.post("/v1/completions", {"prompt": LONG})) for _ in range(2)]
        while await world.metric("prfaas_gateway_in_flight_requests") < 2:
            await asyncio.sleep(0.01)
        response, answer = await world.post("/v1/completions", {"prompt": LONG})
        assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        assert answer["error"]["type"] == "TooManyRequestsError" and answer["error"]["code"] == 429
        assert "X-Request-Id" in response.headers
        assert await world.metric('prfaas_gateway_refused_total{reason="requests"}') == 1
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)

    in_world(body, limits=GatewayLimits(requests=2))


def test_without_descriptors_a_request_is_refused(in_world: InWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        monkeypatch.setattr(
            "prfaas.serving.descriptors.DescriptorBudget.has_room", lambda self, requests: False
        )
        response, answer = await world.post("/v1/completions", {"prompt": LONG})
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert "no file descriptors left for another request" in answer["error"]["message"]

    in_world(body)


@pytest.mark.parametrize("told", [True, False])
def test_bodies_beyond_what_is_left_are_not_read(in_world: InWorld, told: bool) -> None:
    async def body(world: World) -> None:
        async def pieces() -> Any:
            yield b'{"prompt": "'
            for _ in range(100):
                yield b"a" * 100
            yield b'"}'

        data: Any = b'{"prompt": "' + b"a" * 10_000 + b'"}' if told else pieces()
        async with world.client.post("/v1/completions", data=data, headers=JSON) as response:
            # Of a body without a length nobody knows yet that it never fits.
            assert response.status == (413 if told else 429)
            assert "bodies" in (await response.json())["error"]["message"]
        assert not world.decode.generated()
        await world.complete([1, 2, 3])

    in_world(body, limits=LIMITS)


def test_a_deadline_ends_the_request_and_both_hops(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.hangs = True
        response, answer = await world.post("/v1/completions", {"prompt": LONG}, headers=in_ms(700))
        assert (response.status, answer["error"]["code"]) == (504, 504)
        assert "0.7 s" in answer["error"]["message"]
        while not world.remote.cancelled:
            await asyncio.sleep(0.01)
        assert not world.decode.generated()

    in_world(body, limits=GatewayLimits())


def test_a_deadline_ends_a_stream_with_an_error_event(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        asked = {"prompt": LONG, "stream": True, "max_tokens": 1000}
        async with world.client.post("/v1/completions", json=asked, headers=in_ms(700)) as response:
            assert response.status == 200
            last = (await response.text()).strip().split("\n\n")[-1]
        assert '"code":504' in last and last.startswith("data: ")
        while not world.decode.cancelled:
            await asyncio.sleep(0.01)
        assert (
            await world.metric('prfaas_gateway_requests_total{endpoint="completions",outcome="engine_error"')
            == 1
        )

    in_world(body, limits=GatewayLimits(), chunk_s=0.05)


def test_a_deadline_that_can_be_kept_changes_nothing(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post("/v1/completions", {"prompt": LONG}, headers=in_ms(60_000))
        assert response.status == 200
        world.plane.waits_s = 70.0
        response, answer = await world.post("/v1/completions", {"prompt": LONG}, headers=in_ms(60_000))
        assert response.status == 429 and response.headers["Retry-After"] in ("22", "23")
        assert "x-request-timeout" in answer["error"]["message"]

    in_world(body, limits=GatewayLimits(queue_s=1000.0), options=OPTIONS)


def test_a_seed_is_refused_where_it_would_end_a_cpu_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for fields, status in (
            ({"seed": 5}, 400),
            ({"seed": 5, "temperature": 0.5}, 400),
            ({"seed": 5, "temperature": 0}, 200),
            ({"seed": -1}, 200),
            ({"seed": None}, 200),
        ):
            response, answer = await world.post("/v1/completions", {"prompt": LONG, **fields})
            assert response.status == status
            assert status == 200 or answer["error"]["param"] == "seed"

    in_world(body, hardware="cpu", limits=GatewayLimits())


def test_what_is_spare_ends_at_half_of_each_limit() -> None:
    for held in ({"requests": 5}, {"bytes": 500}, {"wait_s": 4.0}):
        made, waits = admission()
        with ExitStack() as stack:
            for number in range(held.get("requests", 1)):
                made.check_spare()
                request = stack.enter_context(made.admitted(str(number), CIMultiDict(), None))
                request.begin()
            request.hold(int(held.get("bytes", 0)))
            waits.seconds = held.get("wait_s", 0.0)
            with pytest.raises(ApiError, match="low priority"):
                made.check_spare()
        made.check_spare()
