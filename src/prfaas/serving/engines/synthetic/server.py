"""The HTTP server of one stand-in: the routes of vLLM that a gateway, a controller and a load tool use."""

import asyncio
import contextlib
import math
import re
import resource
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson
from aiohttp import web

import prfaas
from prfaas.serving.engines.synthetic import VERSION
from prfaas.serving.engines.synthetic.api_bodies import (
    AnswerWriter,
    BodyError,
    GenerationRequest,
    ServedModels,
    json_object,
    parse_detokenize,
    parse_generation,
    parse_tokenize,
)
from prfaas.serving.engines.synthetic.cache import RoomError
from prfaas.serving.engines.synthetic.conversation_bodies import (
    MessageWriter,
    ResponseItemWriter,
    parse_count,
    parse_message,
    parse_response,
)
from prfaas.serving.engines.synthetic.engine import GeneratedAnswer, SyntheticEngine, Work
from prfaas.serving.engines.synthetic.text import Text
from prfaas.serving.engines.transfer_counters import COUNTERS
from prfaas.serving.transport.io.tls_identity import TlsIdentity

# Steps faster than this share an event of a stream.
_STREAM_S = 0.02
_INLINE_BYTES = 64 << 10
_MAX_BODY_BYTES = 1 << 28
_JSON = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Parse = Callable[[dict[str, Any], ServedModels, Text], GenerationRequest]


class _Writer(Protocol):
    """Writes one request's answer in the form of its API."""

    def whole(self, generations: Sequence[GeneratedAnswer]) -> bytes: ...

    def piece(self, prompt: int, token_ids: Sequence[int], /, *, first: bool, last: bool) -> bytes: ...

    def end(self, generations: Sequence[GeneratedAnswer]) -> bytes: ...


class EngineServer:
    """Serves one engine at host:port. `on_death` is called once by POST /synthetic/die.

    `stream_interval`: tokens that an event of a stream has at least, but for the first and the last one.
    """

    def __init__(
        self,
        engine: SyntheticEngine,
        models: ServedModels,
        text: Text,
        on_death: Callable[[], None],
        stream_interval: int = 1,
    ) -> None:
        self._engine = engine
        self._models = models
        self._text = text
        self._on_death = on_death
        self._stream_interval = stream_interval
        self._dead = False
        self._ending = False
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        apis: dict[str, tuple[_Parse, Callable[[GenerationRequest, Text], _Writer]]] = {
            "/v1/completions": (partial(parse_generation, chat=False), AnswerWriter),
            "/v1/chat/completions": (partial(parse_generation, chat=True), AnswerWriter),
            "/v1/responses": (parse_response, ResponseItemWriter),
            "/v1/messages": (parse_message, MessageWriter),
        }
        posts: dict[str, Handler] = {
            **{path: partial(self._generate, *api) for path, api in apis.items()},
            **{f"{path}/render": partial(self._render, parse) for path, (parse, _) in apis.items()},
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/reset_prefix_cache": self._reset,
            "/synthetic/die": self._die,
            "/synthetic/link": self._link,
            "/synthetic/stall": self._stall,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/v1/models": self._list_models,
            "/version": self._version,
            "/metrics": self._metrics,
            "/metrics/": self._metrics,
        }
        for path, handler in posts.items():
            app.router.add_post(path, partial(_answered, handler))
        for path, handler in gets.items():
            app.router.add_get(path, handler)
        app.on_response_prepare.append(self._sign)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)

    async def start(self, host: str, port: int, tls: TlsIdentity | None = None) -> None:
        """Listen; with `tls`, to clients with a certificate only. Raises OSError when the port is taken."""
        context = None if tls is None else tls.listening_context()
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024, ssl_context=context).start()

    def end(self) -> None:
        """Refuse new requests as vLLM does after SIGTERM; what runs goes on."""
        self._ending = True

    async def close(self) -> None:
        """Stop listening and end every request; idempotent."""
        await self._runner.cleanup()

    def cut(self) -> None:
        """Break every connection at once, as when the process is killed."""
        server = self._runner.server
        for connection in server.connections if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def _sign(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = VERSION

    async def _generate(
        self,
        parse: _Parse,
        writer_of: Callable[[GenerationRequest, Text], _Writer],
        request: web.Request,
    ) -> web.StreamResponse:
        raw = await request.read()
        if self._ending:
            return _error("cannot schedule new futures after shutdown", 500)
        wanted = await self._read(parse, raw)
        writer = writer_of(wanted, self._text)
        if wanted.stream:
            return await self._stream(request, wanted, writer)
        generations = await asyncio.gather(*map(self._finish, wanted.works))
        return web.Response(body=writer.whole(generations), content_type=_JSON)

    async def _read(self, parse: _Parse, raw: bytes) -> GenerationRequest:
        def read() -> GenerationRequest:
            return parse(json_object(raw), self._models, self._text)

        return read() if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(read)

    async def _finish(self, work: Work) -> GeneratedAnswer:
        async with self._engine.generate(work) as generation:
            await generation.reach(work.max_tokens)
        return generation

    async def _stream(
        self, request: web.Request, wanted: GenerationRequest, writer: _Writer
    ) -> web.StreamResponse:
        """One prompt's answer after the other's; headers go out with the first token."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        generations = []
        for prompt, work in enumerate(wanted.works):
            async with self._engine.generate(work) as generation:
                generations.append(generation)
                sent = 0
                while sent < work.max_tokens:
                    ahead = max(self._stream_interval, int(_STREAM_S / generation.step_s)) if sent else 1
                    await generation.reach(min(work.max_tokens, sent + ahead))
                    now = max(generation.produced(), sent + 1)
                    ids = generation.token_ids[sent:now]
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(
                        writer.piece(prompt, ids, first=sent == 0, last=now == work.max_tokens)
                    )
                    sent = now
        await response.write(writer.end(generations))
        await response.write_eof()
        return response

    async def _render(self, parse: _Parse, request: web.Request) -> web.StreamResponse:
        """The ids of a request's prompts: of text completions a list, else of the only one."""
        wanted = await self._read(parse, await request.read())
        rendered = [{"token_ids": work.token_ids, "features": None} for work in wanted.works]
        return _json(rendered[0] if wanted.chat else rendered)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        ids = parse_tokenize(json_object(await request.read()), self._text)
        answer = {"count": len(ids), "max_model_len": self._models.max_model_len, "tokens": ids}
        return _json(answer | {"token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return _json({"prompt": parse_detokenize(json_object(await request.read()), self._text)})

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        return _json({"input_tokens": parse_count(json_object(await request.read()), self._text)})

    async def _reset(self, _request: web.Request) -> web.StreamResponse:
        self._engine.cache.clear()
        return web.Response()

    async def _die(self, _request: web.Request) -> web.StreamResponse:
        if not self._dead:
            self._dead = True
            self._on_death()
        return web.Response(status=202)

    async def _link(self, request: web.Request) -> web.StreamResponse:
        """Paces a link of this engine at `bits_per_s` from now on; what it reports as its pace stays as configured."""
        try:
            body = await request.json()
            link, bits_per_s = str(body["link"]), float(body["bits_per_s"])
            if not 0 < bits_per_s < math.inf:
                raise ValueError(bits_per_s)
            self._engine.endpoints.sender.set_bandwidth(link, bits_per_s)
        except (KeyError, TypeError, ValueError):
            return _error("`link` must be one that this engine sends on, `bits_per_s` a number above 0.", 400)
        return web.Response()

    async def _stall(self, request: web.Request) -> web.StreamResponse:
        """Streams and prefills stand still for `seconds`; everything else goes on."""
        try:
            seconds = float((await request.json())["seconds"])
            if not 0 < seconds < math.inf:
                raise ValueError(seconds)
        except (KeyError, TypeError, ValueError):
            return _error("`seconds` must be a number above 0.", 400)
        self._engine.stall(seconds)
        return web.Response()

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return _json({"version": f"{VERSION} {prfaas.__version__}"})

    async def _list_models(self, _request: web.Request) -> web.StreamResponse:
        own = self._models.served_name
        rows = [(own, None), *((adapter, own) for adapter in self._models.adapters)]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": VERSION,
                "root": name,
                "parent": parent,
                "max_model_len": self._models.max_model_len,
            }
            for name, parent in rows
        ]
        return _json({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = _exposition(self._models.served_name, self._engine)
        return web.Response(text=_chosen(text, request.query.getall("name[]", [])), content_type="text/plain")


# No middleware: aiohttp keeps the last thousand handlers that have one, with each its engine that has ended.
async def _answered(handler: Handler, request: web.Request) -> web.StreamResponse:
    """What the handler answers, or why it refuses the request."""
    try:
        return await handler(request)
    except BodyError as error:
        return _error(str(error), error.status)
    except RoomError as error:
        return _error(str(error), 400)
    except ConnectionResetError:
        # The client has left: whatever is answered finds nobody.
        return web.Response()


def _json(value: object) -> web.Response:
    # Token ids may be in an array.
    return web.Response(body=orjson.dumps(value, default=list), content_type=_JSON)


def _error(message: str, status: int) -> web.Response:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(body=orjson.dumps(body), status=status, content_type=_JSON)


def _exposition(model: str, engine: SyntheticEngine) -> str:
    """Prometheus text: the vLLM series in which gateways and controllers read counters.

    `model`: label of every series.
    """
    counts, clock, pool = engine.counts, engine.clock, engine.cache.pool
    # The clock's sums are of the steps until now.
    clock.steps()
    block_tokens = engine.cache.layout.block_tokens
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = [
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{block_tokens}",engine="0",'
        f'kv_cache_size_tokens="{pool.capacity * block_tokens}",num_gpu_blocks="{pool.capacity}"}} 1.0',
    ]

    def add(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        lines.extend(f"{name}{suffix}{labels} {value}" for suffix, value in values)

    def gauge(name: str, text: str, value: float) -> None:
        add(f"vllm:{name}", "gauge", text, ("", float(value)))

    def counter(name: str, text: str, value: float) -> None:
        add(f"vllm:{name}_total", "counter", text, ("", float(value)))

    gauge("num_requests_running", "Requests in prefill or decode", counts.running)
    gauge("num_requests_waiting", "Requests that wait for prefill, KV or a decode slot", counts.waiting)
    gauge("kv_cache_usage_perc", "Share of the KV cache that running requests hold", pool.used_ratio)
    counter("prefix_cache_queries", "Prompt tokens looked up", counts.prefix_queries)
    counter("prefix_cache_hits", "Prompt tokens found", counts.prefix_hits)
    counter("prompt_tokens", "Prompt tokens of finished requests", counts.prompt_tokens)
    counter("generation_tokens", "Tokens generated", counts.generated_tokens)
    counter("request_success", "Requests finished", counts.finished)
    add(
        "vllm:inter_token_latency_seconds",
        "summary",
        "Seconds between two tokens of a request",
        ("_sum", clock.request_seconds),
        ("_count", clock.tokens),
    )
    add(
        "vllm:request_generation_tokens",
        "summary",
        "Tokens generated per finished request",
        ("_sum", float(counts.generated_tokens)),
        ("_count", float(counts.finished)),
    )
    # Prometheus's own names for facts of a process, which several stand-ins may share. With no descriptor left its
    # client leaves them out too.
    with contextlib.suppress(OSError):
        lines += [f"process_open_fds {sum(1 for _ in Path('/proc/self/fd').iterdir())}"]
    lines += [f"process_max_fds {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"]
    for name, text in COUNTERS.items():
        counter(f"prfaas_{name}", text, engine.endpoints.counts[name])
    counter("prfaas_damaged_loads", "KV transfers whose bytes were not sound", counts.damaged_loads)
    return "\n".join(lines) + "\n"


def _chosen(text: str, names: Collection[str]) -> str:
    """The samples of these names in an exposition, or all where none is named, as prometheus_client does it."""
    if not names:
        return text
    return "".join(
        line + "\n" for line in text.splitlines() if re.split(r"[{ ]", line, maxsplit=1)[0] in names
    )
