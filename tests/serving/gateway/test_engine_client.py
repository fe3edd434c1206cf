"""What a failed call says about its engine: only what a dead process does is a death."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.serving.gateway.answers.streams import EngineAnswerError, WholeAnswer
from prfaas.serving.gateway.engine_client import Blame, EngineCallError, accuse, failed_call
from prfaas.serving.gateway.http_pool import AnswerCutError, AnswerLateError, ServerSilentError


@pytest.mark.parametrize(
    ("error", "reason", "blame"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "unreachable", Blame.DEAD),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "unreachable", Blame.DEAD),
        (AnswerCutError("the server closed the connection", by_server=True), "unreachable", Blame.DEAD),
        (AnswerCutError("what came is not an HTTP answer"), "unreachable", Blame.FAILED),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable", Blame.FAILED),
        (TimeoutError(), "connect-timeout", Blame.NONE),
        (OSError(errno.ETIMEDOUT, "timed out"), "connect-timeout", Blame.NONE),
        (OSError(errno.EMFILE, "too many open files"), "gateway-resources", Blame.NONE),
        (OSError(errno.ENFILE, "too many open files"), "gateway-resources", Blame.NONE),
        (ServerSilentError("frozen: it is"), "frozen", Blame.NONE),
        (AnswerLateError("first-byte", 3.0), "first-byte", Blame.FAILED),
        (AnswerLateError("idle", 3.0), "idle", Blame.FAILED),
    ],
    ids=str,
)
def test_whom_a_failure_blames(error: OSError, reason: str, blame: Blame) -> None:
    failure = failed_call("far-0", error, begun=False)
    assert (failure.instance, failure.reason, failure.blame) == ("far-0", reason, blame)
    begun = failed_call("far-0", error, begun=True)
    assert begun.reason == ("died" if reason == "unreachable" else reason)
    assert begun.blame is blame


# As vLLM 0.32 answers between SIGTERM and its end.
ENDING = b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","code":500}}'


class Plane:
    """What failures have told it."""

    def __init__(self) -> None:
        self.ending: list[str] = []
        self.suspected: list[tuple[str, bool]] = []
        self.drains = SimpleNamespace(is_ending=self.ending.append)
        self.health = self

    def suspect(self, name: str, _reason: str, *, lost_cache: bool) -> None:
        self.suspected.append((name, lost_cache))


def accused(failure: EngineCallError) -> Plane:
    plane: Any = Plane()
    accuse(plane, "far-0", failure)
    found: Plane = plane
    return found


def test_an_engine_that_is_to_end_is_no_suspect() -> None:
    for failure in (
        EngineAnswerError("far-0", 500, answer=WholeAnswer(500, ENDING, "application/json")),
        EngineAnswerError("far-0", 500, event=b"data: " + ENDING),
    ):
        assert accused(failure).ending == ["far-0"] and accused(failure).suspected == []
    # What the request itself may have caused says nothing of the engine, and clients' words in it do not.
    for status, content in ((500, b"out of memory"), (400, ENDING)):
        failure = EngineAnswerError("far-0", status, answer=WholeAnswer(status, content, "application/json"))
        plane = accused(failure)
        assert plane.ending == plane.suspected == []
    for blame, lost_cache in ((Blame.FAILED, False), (Blame.DEAD, True)):
        plane = accused(EngineCallError("far-0", "died", "it is gone", blame=blame))
        assert (plane.ending, plane.suspected) == ([], [("far-0", lost_cache)])
