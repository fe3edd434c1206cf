"""What a failed call says about its engine: only what a dead process does is a death."""

import errno

import pytest

from prfaas.serving.gateway.engine_client import Blame, failed_call
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
