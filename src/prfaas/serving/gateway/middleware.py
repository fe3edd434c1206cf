"""What every request of both ports goes through: a line in the log, and the form of errors."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas.serving.gateway.bodies import ApiError, error_body
from prfaas.serving.gateway.dialects import dialect_of_path
from prfaas.serving.gateway.request_log import RECORD, RequestRecord
from prfaas.serving.logs import PEER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

access_logger = logging.getLogger("prfaas.access")
logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 200


class _MalformedFilter(logging.Filter):
    """aiohttp logs what it can't parse with a traceback that quotes it: only the kind of mistake is kept."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = (
                f"what came from %s is no HTTP request ({type(error).__name__})",
                record.args,
            )
            record.exc_info = record.exc_text = None
        return True


http_logger = logging.getLogger("prfaas.http")
"""For aiohttp's server."""
http_logger.addFilter(_MalformedFilter())


@web.middleware
async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line per request when it has ended. It holds nothing of the query, the headers or the body."""
    began_s = time.perf_counter()
    peer = PEER.set(request.remote)
    status: int | None = None
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        if access_logger.isEnabledFor(logging.INFO):
            _write_line(request, status, time.perf_counter() - began_s)
        PEER.reset(peer)


def _write_line(request: web.Request, status: int | None, duration_s: float) -> None:
    fields: dict[str, object] = {
        "method": request.method[:_SHOWN_CHARACTERS],
        "path": request.rel_url.raw_path[:_SHOWN_CHARACTERS],
        "status": status,
    }
    record: RequestRecord | None = request.get(RECORD)
    if record is not None:
        ttft_s = record.steps_s.get("first_byte")
        fields |= {
            "route": record.route,
            "outcome": record.outcome,
            "prompt_tokens": record.prompt_tokens,
            "answer_tokens": record.answer_tokens,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "request_id": record.request_id,
        }
        if record.trace_id is not None:
            fields["trace_id"] = record.trace_id
    fields["duration_s"] = round(duration_s, 6)
    access_logger.info("answered" if status is not None else "left by its client", extra={"fields": fields})


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that aiohttp or a handler raises, in the form that clients of the path read."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error.status, error.body(), error.headers())
    except web.HTTPException as error:
        sentence = {
            404: f"There is no {request.method} {request.path[:_SHOWN_CHARACTERS]} here.",
            405: f"{request.path[:_SHOWN_CHARACTERS]} does not take {request.method}.",
            413: "The request body is too large.",
        }.get(error.status, f"{error.reason}.")
        return _refusal(request, error.status, error_body(error.status, sentence))
    except (HttpProcessingError, web.RequestPayloadError):
        return _refusal(request, 400, error_body(400, "The request body does not come as its headers say."))
    except ConnectionResetError:
        raise
    except Exception:
        resource = request.match_info.route.resource
        logger.exception("a request for %s failed", resource.canonical if resource is not None else "nothing")
        sentence = "The gateway failed on this request; its log says how."
        return _refusal(request, 500, error_body(500, sentence))


def _refusal(
    request: web.Request, status: int, body: bytes, more_headers: Mapping[str, str] | None = None
) -> web.Response:
    record = request.get(RECORD)
    headers = (record.headers() if record is not None else {}) | dict(more_headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = dialect_of_path(request.path).refusal(body)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
