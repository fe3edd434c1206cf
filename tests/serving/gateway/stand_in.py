"""A stand-in for a vLLM server, for tests of the gateway only: the HTTP API that the gateway uses, the real transport.

Its "KV" is the prompt's ids as uint32, and every token of its answer is a function of all ids before it alone: an
answer says nothing about the route, bytes that arrive can be compared with the ids, and an engine that goes on from
prompt and half an answer ends it as the first one would have.
"""

import asyncio
import functools
import hashlib
import itertools
import json
import re
import socket
import time
import uuid
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from prfaas.core.prefix.hashing import MediaItem
from prfaas.serving.gateway.prompts.tokenizers import ChatTemplate
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.handover import NIXL_MARK, Handover, is_by_nixl, ticket_of
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import Ticket, TicketError, prompt_digest
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus

from . import stand_in_apis

BLOCK_TOKENS = 16
_OWN_PREFILL_S = 0.05
CACHED_TOKENS = 48
"""What an engine that `lingers` says it had cached."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


HYBRID_CONFIG = {
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

DENSE_CONFIG = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def write_tokenizer(directory: Path, config: Mapping[str, object] = HYBRID_CONFIG) -> Path:
    """A byte-level tokenizer with two special tokens and a chat template, as a checkpoint has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def kv_of(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


ANSWER_TOKENS = 16
DERENDER = "/v1/chat/completions/derender"
_SAMPLING = ("max_tokens", "min_tokens", "temperature", "stop_token_ids", "ignore_eos")
# As vLLM writes it.
COMPACT = functools.partial(json.dumps, separators=(",", ":"))
_CHARACTERS = "0123456789abcdef"
_ID_OF = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def answer_tokens(ids: Sequence[int]) -> Iterator[str]:
    """One character, which is one token, after the other; there is no end to it."""
    state = hashlib.sha256(kv_of(ids))
    while True:
        character = _CHARACTERS[state.digest()[0] % 16]
        yield character
        state.update(kv_of([_ID_OF[character]]))


def answer_text(ids: Sequence[int], tokens: int = ANSWER_TOKENS) -> str:
    return "".join(itertools.islice(answer_tokens(ids), tokens))


@dataclass(frozen=True)
class Generated:
    """An answer by vLLM's rules: the text that comes with each token, all tokens, and why it ended."""

    pieces: list[str]
    token_ids: list[int]
    reason: str
    stop_reason: int | str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def generated(
    ids: Sequence[int], body: dict[str, Any], limit: int, end: str | None = None, blank: str = ""
) -> Generated:
    """What the model answers to `ids`, `limit` tokens at most.

    `end`: the character whose token ends an answer. `blank`: characters whose tokens have no text.
    """
    given = body.get("stop") or []
    stops = [given] if isinstance(given, str) else given
    includes, least = bool(body.get("include_stop_str_in_output")), body.get("min_tokens") or 0
    own_end = _ID_OF[end] if end is not None and not body.get("ignore_eos") else None
    ends = {own_end, *(body.get("stop_token_ids") or [])} - {None}
    lag = 0 if includes else max(map(len, stops), default=1) - 1
    state, text, shown = hashlib.sha256(kv_of(ids)), "", 0
    pieces: list[str] = []
    token_ids: list[int] = []
    reason: str | None = None
    stop_reason: int | str | None = None
    while reason is None:
        place = state.digest()[0] % 16
        while len(token_ids) < least and _ID_OF[_CHARACTERS[place]] in ends:
            place = (place + 1) % 16
        character = _CHARACTERS[place]
        token_ids.append(_ID_OF[character])
        state.update(kv_of(token_ids[-1:]))
        if token_ids[-1] in ends:
            reason, stop_reason = "stop", None if token_ids[-1] == own_end else token_ids[-1]
        # A model's own end is a special token, which no engine writes.
        if (reason is None or (includes and token_ids[-1] != own_end)) and character not in blank:
            text += character
            looks = len(token_ids) > least
        else:
            # Where no text came, no stop string ends with it.
            looks = False
        found = next((stop for stop in stops if looks and stop in text[-len(stop) :]), None)
        if found is not None:
            reason, stop_reason = "stop", found
            text = text if includes else text.removesuffix(found)
        elif reason is None and len(token_ids) == limit:
            reason = "length"
        until = max(shown, len(text) if reason is not None else len(text) - lag)
        pieces.append(text[shown:until])
        shown = until
    return Generated(pieces, token_ids, reason, stop_reason)


class IdLayout:
    """One region: four bytes a token."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [4 * (num_tokens - skip_tokens)]


class PartLayout(IdLayout):
    """The same, and every token that has come is of use."""

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        return skip_tokens + covered_end(0, 0) // 4 if covered_end(0, 0) >= 4 else 0


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class StandInEngine:
    """`fails`: prefills answer with that status. `hangs`: prefills never answer. `chunks`: tokens of a streamed answer
    that no limit was given for.

    `whole_s`: how long a whole answer takes; `garbles`: it is another prompt's.

    `refuses_in_stream`: whether what is refused of a stream is said in it, as vLLM does for what it finds late.

    `other_ids`: its tokenizer is not the model's. `renders`: whether it tells token ids of requests.

    `dies`: at which point of decoding it loses its connection ("before-headers", "after-headers", "in-body",
    "mid-stream", "mid-event"), or says that it failed ("http-500", "error-event", "early-end"); streams after
    `dies_after` tokens. `deaths`: how often yet. `freezes`: in place of dying it says nothing more over HTTP until
    `frozen` is false again. `mute`: its KV port accepts connections and never says a word.
    `mulls`: it does nothing until `goes_on` says so.

    `lingers`: three quarters of its KV leave; the rest of it, and of its prefill, wait for `goes_on`, and then do what
    `lingers` says: "ends" well, "aborts" the transfer, or the prefill "fails" too. `trails`: the prefill answers at
    once all the same.

    `calls_after`: of an answer with tools, the tokens from that one on are arguments of calls; see `delta_of`.

    `end`, `blank`: as in `generated`. `keeps`: it goes on from what has come of a transfer that broke.

    `joins`: tokens of one event of a stream. `sends_after`: `goes_on` is set with that token of a stream, or at an
    answer's end.
    `hands_over`: whether it lets others read its KV by NIXL. `reads`: how its own such reads go: "well", "fails" or
    "hangs"; `queues`: they begin when `goes_on` says so.
    """

    name: str
    model_dir: Path
    key: bytes
    producers: tuple[str, ...] = ()
    model: str = "stand-in"
    fails: int | None = None
    hangs: bool = False
    sends: bool = True
    stalls: bool = False
    chunks: int = 3
    chunk_s: float = 0.0
    dies: str | None = None
    dies_after: int = 1
    deaths: int = 0
    freezes: bool = False
    frozen: bool = False
    mute: bool = False
    mulls: bool = False
    lingers: str | None = None
    trails: bool = False
    calls_after: int | None = None
    end: str | None = None
    blank: str = ""
    joins: int = 1
    sends_after: int | None = None
    refuses_in_stream: bool = True
    refuses_user: bool = False
    other_ids: bool = False
    renders: bool = True
    whole_s: float = 0.0
    garbles: bool = False
    layout: str = "ids"
    keeps: bool = False
    staging_bytes: int = 1 << 20
    seen: list[Seen] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    """Tokens whose KV it has read by NIXL."""
    early: int = 0
    """Requests that came before their KV was complete."""
    lost: int = 0
    """Requests whose KV did not come, which it prefilled."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    hands_over: bool = True
    reads: str = "well"
    queues: bool = False
    prefixes: list[int] = field(default_factory=list)
    cancelled: int = 0
    http_port: int = 0
    kv_port: int = 0

    async def start(self) -> None:
        self._trailing: set[asyncio.Task[None]] = set()
        self.tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        self.template = ChatTemplate.of_model(self.model_dir)
        self.arena = StagingArena(self.staging_bytes, block_bytes=1 << 16)
        self.receiver = Receiver(
            name=f"{self.name}/0",
            key=self.key,
            host="127.0.0.1",
            port=0,
            arena=self.arena,
            layout=PartLayout() if self.keeps else IdLayout(),
            fingerprint={"layout": self.layout},
            peer_list=PeerList(producers=frozenset([f"{producer}/0" for producer in self.producers])),
        )
        self.sender: Sender | None = None
        self.receiver.start()
        self.kv_port = self.receiver.port
        self.mute_port = socket.create_server(("127.0.0.1", 0))
        if self.mute:
            self.kv_port = self.mute_port.getsockname()[1]
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        for path, handler in (
            (stand_in_apis.RESPONSES, self._generate),
            (stand_in_apis.MESSAGES, self._generate),
            ("/v1/messages/count_tokens", self._count_tokens),
            *((f"{path}/render", self._render) for path in stand_in_apis.GENERATING),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/inference/v1/generate", self._tokens),
            (DERENDER, self._derender),
            *((path, self._echoed) for path in stand_in_apis.FORWARDED if path != DERENDER),
        ):
            app.router.add_post(path, stand_in_apis.refusing(handler))
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.http_port)
        await site.start()
        self.http_port = self.runner.addresses[0][1]

    def connect(self, consumers: Sequence["StandInEngine"]) -> None:
        self.sender = Sender(
            name=f"{self.name}/0",
            key=self.key,
            peers={
                c.name: Peer(f"{c.name}/0", "127.0.0.1", c.kv_port, "link", 2, None, on_demand=i > 0)
                for i, c in enumerate(consumers)
            },
            fingerprint={"layout": self.layout},
        )
        self.receiver._sender = self.sender
        self.sender.start()

    async def stop_http(self) -> None:
        await self.runner.cleanup()

    async def stop(self) -> None:
        for task in self._trailing:
            task.cancel()
        await self.runner.cleanup()
        if self.sender is not None:
            await asyncio.to_thread(self.sender.close)
        await asyncio.to_thread(self.receiver.close)
        self.mute_port.close()

    async def thawed(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.01)

    def generated(self) -> list[Seen]:
        """What came besides questions about token ids."""
        return [s for s in self.seen if s.path in stand_in_apis.GENERATING]

    def rendered(self) -> list[Seen]:
        """What it was asked for the token ids of."""
        return [s for s in self.seen if s.path.endswith("/render")]

    async def _health(self, _request: web.Request) -> web.Response:
        await self.thawed()
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        await self.thawed()
        return web.Response(
            text="# HELP vllm:cache_config_info x\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",engine="0",kv_cache_size_tokens="64000"}} 1.0\n'
        )

    def _ids(self, body: dict[str, Any]) -> list[int]:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is not None and "messages" in body:
            return list(given)
        if isinstance(body.get("prompt"), list):
            first = body["prompt"][0]
            return list(body["prompt"]) if isinstance(first, int) else self._ids({"prompt": first})
        if "prompt_embeds" in body:
            return [7]
        if "prompt" in body:
            text = body["prompt"][-(body.get("truncate_prompt_tokens") or 0) :]
        else:
            assert self.template is not None
            text = self.template._template.render(
                messages=[
                    m
                    | {
                        "content": m.get("content") or ""
                        if isinstance(m.get("content") or "", str)
                        else "\n".join(p.get("text", _SHOWN) for p in m["content"])
                    }
                    for m in body["messages"]
                ],
                tools=body.get("tools"),
                add_generation_prompt=True,
            )
        ids: list[int] = self.tokenizer.encode(text).ids
        return [*ids, 7] if self.other_ids else ids

    async def _render(self, request: web.Request) -> web.Response:
        await self.thawed()
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        if not self.renders:
            return web.json_response({"error": {"message": "not enabled", "code": 403}}, status=403)
        path = request.path.removesuffix("/render")
        chat = stand_in_apis.as_chat(path, body)
        # It looks at no grammar.
        refusal = refusal_of(chat | {"structured_outputs": None})
        if chat.get("use_beam_search"):
            refusal = "Beam search is not supported by the render endpoint"
        if refusal is not None:
            return web.json_response({"error": {"message": refusal, "code": 400}}, status=400)
        prompt, each = chat.get("prompt"), [chat]
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            each = [chat | {"prompt": one} for one in prompt]
        params = {name: chat[name] for name in _SAMPLING if chat.get(name) is not None}
        if chat.get("max_completion_tokens"):
            params["max_tokens"] = chat["max_completion_tokens"]
        rendered: list[dict[str, Any]] = [
            {"token_ids": self._ids(one), "sampling_params": params, "features": None} for one in each
        ]
        if shown_in(chat):
            items = media_of(chat, rendered[0]["token_ids"])
            rendered[0]["features"] = {
                "mm_hashes": {"image": [item.digest for item in items]},
                "mm_placeholders": {"image": [{"offset": i.offset, "length": i.tokens} for i in items]},
                "kwargs_data": None,
            }
        return web.json_response(rendered if path == "/v1/completions" else rendered[0])

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        ids = self._ids(body)
        return web.json_response({"count": len(ids), "max_model_len": 0, "tokens": ids})

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        """Token ids in, token ids out."""
        body = await request.json()
        if body.get("stream"):
            return await self._generate(request)
        self.seen.append(Seen(request.path, dict(request.headers), body))
        choices = [{"index": 0, "token_ids": body["token_ids"][-2:], "finish_reason": "length"}]
        return web.json_response({"choices": choices, "kv_transfer_params": {"host": self.name}})

    async def _derender(self, request: web.Request) -> web.Response:
        """What tokens say to the client of a chat, by those before them."""
        body = await request.json()
        if "stream_state" not in body:
            return await self._echoed(request)
        self.seen.append(Seen(request.path, dict(request.headers), body))
        if not self.renders:
            return web.json_response({"error": {"message": "not enabled", "code": 403}}, status=403)
        state, (choice,) = body["stream_state"], body["generate_chunk"]["choices"]
        before, ids, called = state["output_token_ids"], choice["token_ids"], [*state["last_tool_call_ids"]]
        assert sum(state["output_chunk_lens"]) == len(before) and 0 not in state["output_chunk_lens"]
        assert body["prompt_token_ids"] == self._ids(body["chat_request"])
        pieces = [self.tokenizer.decode([one]) for one in ids]
        delta = delta_of(pieces, len(before), self.calls_after, called)
        state = state | {
            "output_token_ids": before + ids,
            "output_chunk_lens": [*state["output_chunk_lens"], *filter(None, [len(ids)])],
            "last_tool_call_ids": called,
        }
        said = {"index": 0, "delta": {"role": None, "content": None} | delta}
        return web.json_response({"chunk": {"choices": [said]}, "stream_state": state})

    async def _echoed(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        return web.json_response({"by": self.name, "of": body})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        ids = self._ids(stand_in_apis.as_chat(request.path, body))
        return web.json_response({"input_tokens": len(ids)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        return web.json_response({"prompt": self.tokenizer.decode(body["tokens"])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await self.thawed()
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        if self.mulls:
            await self.goes_on.wait()
        body = stand_in_apis.as_chat(request.path, body)
        if "token_ids" in body:
            body = {**body["sampling_params"], **body, "prompt": body["token_ids"]}
        ids = self._ids(body) if refusal_of(body) is None else []
        try:
            return await self._answered(request, body, ids)
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.sends_after is not None:
                self.goes_on.set()
            raise

    async def _answered(
        self, request: web.Request, body: dict[str, Any], ids: list[int]
    ) -> web.StreamResponse:
        refusal = refusal_of(body) or ("no such user" if self.refuses_user and body.get("user") else None)
        if refusal is not None:
            error = {"message": refusal, "type": "BadRequestError", "param": None, "code": 400}
            is_late = self.refuses_in_stream and not stand_in_apis.speaks(request.path)
            if not (body.get("stream") and is_late):
                return web.json_response({"error": error}, status=400)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await stream.prepare(request)
            await stream.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
            return stream
        params = body.get("kv_transfer_params") or {}
        told: str = params.get("prfaas") or ""
        by_nixl = is_by_nixl(told)
        ticket = self._ticket(ticket_of(told) if by_nixl else told)
        prefix = self._ticket(params.get("prfaas_from"))
        sends = ticket is not None and ticket.producer == self.name
        if not sends and self.dies == "before-headers":
            self.deaths += 1
            await self._die(request)
        if prefix is not None and prefix.consumer == self.name:
            self.prefixes.append(self._load(prefix, body, ids))
        if sends:
            if self.hangs:
                await asyncio.Event().wait()
            if self.fails is not None:
                # As engines do, it quotes what it was asked.
                return web.json_response(
                    {"error": {"message": f"made to fail: {json.dumps(body)}"}}, status=self.fails
                )
            assert ticket is not None and len(ids) - bool(shown_in(body)) == ticket.num_tokens
            ids = ids[: ticket.num_tokens]
            assert ticket.prompt_digest == digest(body, ids)
            if by_nixl:
                assert told == NIXL_MARK + ticket_of(told)
                return web.json_response(
                    self._whole_answer(body, ids) | self._handed_over(ticket_of(told), ids)
                )
            if self.sends:
                await self._send(ticket, params["prfaas"], ids)
            if self.lingers == "fails":
                return web.json_response({"error": {"message": "made to fail late"}}, status=500)
        elif ticket is not None and ticket.consumer == self.name and by_nixl:
            await self._read(ticket, told, body, ids)
        elif ticket is not None and ticket.consumer == self.name:
            if await self._arrived(ticket):
                self.loaded.append(self._load(ticket, body, ids))
            else:
                self.lost += 1
                # A prefill takes a while, in which the engine sees whether its client has left.
                await asyncio.sleep(_OWN_PREFILL_S)
        if not sends and self.dies is not None:
            self.deaths += 1
            if self.dies == "http-500":
                return web.json_response(
                    {"error": {"message": f"EngineDeadError: {json.dumps(body)}"}}, status=500
                )
            if self.dies == "in-body" and not body.get("stream"):
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"id": ')
                await self._die(request)
        if stand_in_apis.speaks(request.path):
            return await self._answered_otherwise(request, body, ids)
        if not body.get("stream"):
            await asyncio.sleep(self.whole_s)
            if self.sends_after is not None:
                self.goes_on.set()
            return web.json_response(self._whole_answer(body, ids), dumps=COMPACT)
        return await self._streamed(request, body, ids)

    async def _answered_otherwise(
        self, request: web.Request, body: dict[str, Any], ids: list[int]
    ) -> web.StreamResponse:
        path, limit = request.path, stand_in_apis.answer_limit(request.path, body)
        text = answer_text(ids, limit or ANSWER_TOKENS)
        if not body.get("stream"):
            return web.json_response(stand_in_apis.whole(path, body, ids, text))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def ends_before(index: int) -> bool:
            await asyncio.sleep(self.chunk_s)
            if self.dies == "error-event" and index == self.dies_after:
                error = b'{"type":"error","error":{"type":"internal_error","message":"EngineDeadError"}}'
                await response.write(b"event: error\ndata: %b\n\n" % error)
                return True
            return (
                bool(self.dies) and index == self.dies_after and await self._fail_in_stream(request, response)
            )

        await stand_in_apis.write(response, stand_in_apis.events(path, body, ids, text), ends_before)
        return response

    def _whole_answer(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        count = body.get("max_completion_tokens") or body.get("max_tokens") or ANSWER_TOKENS
        answer = generated(ids[::-1] if self.garbles else ids, body, count, self.end, self.blank)
        text, ended = answer.text, {"finish_reason": answer.reason, "stop_reason": answer.stop_reason}
        return {
            "id": "x",
            "choices": [
                {
                    "index": 0,
                    "text": text,
                    "message": {"role": "assistant", "content": text},
                    **ended,
                    "token_ids": answer.token_ids if body.get("return_token_ids") else None,
                }
                | (
                    {"logprobs": _logprobs(text, answer.token_ids)}
                    if body.get("logprobs") is not None and body["logprobs"] is not False
                    else {}
                )
            ],
            "usage": {
                "prompt_tokens": len(ids),
                "completion_tokens": len(answer.token_ids),
                "total_tokens": len(ids) + len(answer.token_ids),
            },
            "prompt_token_ids": ids if body.get("return_token_ids") else None,
            "kv_transfer_params": {"leaked": "secret"} if body.get("leak") else None,
        }

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], ids: list[int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.dies == "after-headers":
            await asyncio.sleep(0.02)
            await self._die(request)
        chat, in_tokens = "messages" in body, "token_ids" in body
        calls_after = self.calls_after if body.get("tools") else None
        count = body.get("max_completion_tokens") or body.get("max_tokens") or self.chunks
        usage = (body.get("stream_options") or {}).get("include_usage")
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.headers.get('X-Request-Id')}-{self.name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.http_port,
            "model": body.get("model") or self.model,
        }

        if in_tokens:
            head = {"request_id": "x"}

        async def say(choices: list[dict[str, Any]], **more: Any) -> None:
            told = head | {"choices": choices} | ({"usage": None} if usage else {}) | more
            await response.write(b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n")

        tells_ids = body.get("return_token_ids")
        if chat:
            opens = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            await say([opens], prompt_token_ids=ids if tells_ids else None)
        answer = generated(ids, body, count, self.end, self.blank)
        count = len(answer.pieces)
        called: list[str] = []
        names_tokens = body.get("return_tokens_as_token_ids")
        for first in range(0, count, self.joins):
            indices = range(first, min(first + self.joins, count))
            ends_here = self.dies and self.dies_after in indices
            if self.sends_after is not None and (self.sends_after < indices.stop or ends_here):
                self.goes_on.set()
            if ends_here and await self._fail_in_stream(request, response):
                return response
            piece, ids_said = (
                "".join(answer.pieces[first : indices.stop]),
                answer.token_ids[first : indices.stop],
            )
            reason = answer.reason if indices.stop == count else None
            if reason == "stop" and calls_after is not None and count > calls_after:
                reason = "tool_calls"
            said: dict[str, Any] = {"text": piece}
            if chat:
                said = {"delta": delta_of(answer.pieces[first : indices.stop], first, calls_after, called)}
            said |= {
                "logprobs": _logprobs(piece, ids_said, first, chat=chat) if names_tokens else None,
                "finish_reason": reason,
            }
            if not chat or reason is not None:
                said["stop_reason"] = answer.stop_reason if reason is not None else None
            if not chat:
                said["prompt_token_ids"] = ids if tells_ids and not first else None
            if in_tokens:
                said = {"finish_reason": reason, "stop_reason": answer.stop_reason if reason else None}
            await say([{"index": 0, **said, "token_ids": ids_said if tells_ids or in_tokens else None}])
            await asyncio.sleep(self.chunk_s)
        if self.sends_after is not None:
            self.goes_on.set()
        if self.dies == "before-usage":
            await self._die(request)
        if usage:
            told = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            await say([], usage=told)
            await asyncio.sleep(self.chunk_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _fail_in_stream(self, request: web.Request, response: web.StreamResponse) -> bool:
        """Whether the stream is at an end now."""
        # Chunks are on their way one by one before the connection goes.
        await asyncio.sleep(0.02)
        if self.dies == "mid-event":
            await response.write(b'data: {"id": "x", "choi')
            await asyncio.sleep(0.02)
        if self.dies in ("mid-stream", "mid-event"):
            await self._die(request)
        if self.dies == "error-event":
            error = {"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        return self.dies in ("error-event", "early-end")

    async def _die(self, request: web.Request) -> None:
        assert request.transport is not None
        if self.freezes:
            self.frozen = True
        else:
            request.transport.abort()
        await asyncio.Event().wait()

    def _ticket(self, sealed: str | None) -> Ticket | None:
        try:
            return Ticket.unseal(sealed, self.key, time.time()) if sealed else None
        except TicketError:
            return None

    async def _send(self, ticket: Ticket, sealed: str, ids: list[int]) -> None:
        assert self.sender is not None
        sizes = IdLayout().region_bytes(ticket.num_tokens, ticket.skip_tokens)
        outgoing = self.sender.open(
            ticket, sealed, sizes, cached_tokens=CACHED_TOKENS if self.lingers else None
        )
        payload = kv_of(ids[ticket.skip_tokens :])
        first = 0
        if self.lingers:
            first = len(payload) // 4 * 3
            outgoing.put(0, 0, BytesSource(payload[:first]))
        rest = self._send_rest(outgoing, payload, first)
        if not self.trails:
            await rest
            return
        task = asyncio.create_task(rest)
        self._trailing.add(task)
        task.add_done_callback(self._trailing.discard)

    async def _send_rest(self, outgoing: Any, payload: bytes, first: int) -> None:
        if self.lingers:
            try:
                await self.goes_on.wait()
            except asyncio.CancelledError:
                outgoing.abort("the prefill was cancelled")
                raise
        if self.lingers == "fails":
            return
        if self.lingers == "aborts":
            outgoing.abort("made to abort")
        if payload and not self.stalls:
            outgoing.put(0, first, BytesSource(payload[first:]))
        outgoing.end()

    def _handed_over(self, sealed: str, ids: list[int]) -> dict[str, Any]:
        """What vLLM's answer has besides, if the prompt was prefilled for a read by NIXL."""
        if not self.hands_over:
            return {}
        place = {"remote_host": "127.0.0.1", "remote_port": 9, "blocks": kv_of(ids)}
        return {"kv_transfer_params": {"prfaas": Handover(sealed, place, time.time() + 60).seal(self.key)}}

    async def _read(self, ticket: Ticket, told: str, body: dict[str, Any], ids: list[int]) -> None:
        handover = Handover.unseal(told, self.key)
        assert len(ids) == ticket.num_tokens and digest(body, ids) == ticket.prompt_digest
        if self.queues:
            await self.goes_on.wait()
        nbytes = 4 * len(ids)

        def tell(phase: TransferPhase, received_bytes: int = 0) -> None:
            reason = "made to fail" if phase is TransferPhase.FAILED else ""
            status = TransferStatus(phase, reason, received_bytes, nbytes, 0, len(ids), 0)
            self.receiver.transfers.report(ticket.transfer_id, status)

        tell(TransferPhase.RECEIVING)
        if self.reads == "hangs":
            await asyncio.Event().wait()
        if self.reads == "fails":
            self.lost += 1
            tell(TransferPhase.FAILED)
            return
        assert handover.params["blocks"] == kv_of(ids)
        self.read.append(len(ids))
        tell(TransferPhase.COMPLETE, nbytes)

    async def _arrived(self, ticket: Ticket) -> bool:
        """Wait for a transfer as engines do; False: it failed."""
        status = self.receiver.transfers.state(ticket.transfer_id)
        is_early = status is not None and not status.phase.terminal
        self.early += is_early
        while status is not None and not status.phase.terminal:
            await asyncio.sleep(0.01)
            status = self.receiver.transfers.state(ticket.transfer_id)
        # One that was sent early may come after its transfer has failed. A request with no transfer at all is the
        # gateway's fault, which `_load` says.
        return status is None or status.phase is TransferPhase.COMPLETE or status.usable_tokens > 0

    def _load(self, ticket: Ticket, body: dict[str, Any], ids: list[int]) -> int:
        status = self.receiver.transfers.state(ticket.transfer_id)
        kept = status.usable_tokens if status is not None else 0
        staged = self.receiver.transfers.take(ticket.transfer_id, broken_tokens=kept)
        assert staged is not None, "the gateway came before the bytes"
        assert digest(body, ids[: ticket.num_tokens]) == ticket.prompt_digest
        num_tokens = kept or ticket.num_tokens
        nbytes = 4 * (num_tokens - ticket.skip_tokens)
        received = b"".join(bytes(view) for view in staged.region_views(0, 0, nbytes))
        staged.free()
        assert received == kv_of(ids[ticket.skip_tokens : num_tokens])
        return num_tokens - ticket.skip_tokens


def refusal_of(body: dict[str, Any]) -> str | None:
    """Why vLLM would refuse a request, in words like its own; None if it would not."""
    model = body.get("model")
    prompt = body.get("prompt") or body.get("messages") or body.get("prompt_embeds")
    if model is not None and not isinstance(model, str):
        return "1 validation error: model: Input should be a valid string"
    if not prompt:
        return "Either prompt or prompt_embeds must be provided and non-empty."
    temperature = body.get("temperature")
    if temperature is not None and not 0 <= temperature <= 2:
        return f"temperature must be non-negative, got {temperature}."
    if temperature == 0 and (body.get("n") or 1) > 1:
        return f"n must be 1 when using greedy sampling, got {body['n']}."
    tokens = body.get("max_tokens")
    if tokens is not None and not 0 < tokens <= 4000:
        return f"max_tokens={tokens} cannot be greater than max_model_len=4000."
    try:
        re.compile((body.get("structured_outputs") or {}).get("regex", ""))
    except re.error as error:
        return f"Failed to transform regex into an FSM: {error}"
    return None


CALL_TOKENS = 5
"""Of the arguments of each call."""


def delta_of(pieces: Sequence[str], first: int, calls_after: int | None, called: list[str]) -> dict[str, Any]:
    """What a parser makes of the tokens of an answer from the `first` on: content, then calls of a tool.

    `called`: the ids of calls that have begun; more are added.
    """
    delta: dict[str, Any] = {}
    for index, piece in enumerate(pieces, first):
        if calls_after is None or index < calls_after:
            delta["content"] = delta.get("content", "") + piece
            continue
        number, place = divmod(index - calls_after, CALL_TOKENS)
        call: dict[str, Any] = {"index": number, "function": {"arguments": piece}}
        if not place:
            called.append(f"call-{uuid.uuid4().hex}")
            call = {"id": called[-1], "type": "function", "index": number, "function": {"name": "f"}}
            call["function"]["arguments"] = piece
        delta.setdefault("tool_calls", []).append(call)
    return delta


def _logprobs(text: str, token_ids: list[int], first: int = 0, *, chat: bool = False) -> dict[str, Any]:
    """A token per character, each sure of itself. `first`: how many came before."""
    names = [f"token_id:{token}" for token in token_ids]
    if chat:
        return {"content": [{"token": name, "logprob": -0.01, "top_logprobs": []} for name in names]}
    return {
        "tokens": names,
        "text_offset": [len("token_id:00") * (first + index) for index in range(len(names))],
        "token_logprobs": [-0.01] * len(text),
        "top_logprobs": [{name: -0.01} for name in names],
    }


def digest(body: dict[str, Any], ids: list[int]) -> bytes:
    """As an engine computes it: with the salt and the adapter of the request."""
    model = body.get("model") or "stand-in"
    adapter = "" if model == "stand-in" else model
    return prompt_digest(ids, body.get("cache_salt", ""), adapter, media_of(body, ids))


# An image is sixteen tokens, each of one character that no text has.
_IMAGE_TOKENS = 16
_SHOWN = "\x01" * _IMAGE_TOKENS


def shown_in(body: dict[str, Any]) -> list[str]:
    """The URLs of a chat's images."""
    return [
        part["image_url"]["url"]
        for message in body.get("messages") or ()
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if "image_url" in part
    ]


def media_of(body: dict[str, Any], ids: Sequence[int]) -> list[MediaItem]:
    """The images of a chat within the ids."""
    mark = _ID_OF["\u0101"]
    firsts = [i for i, one in enumerate(ids) if one == mark and ids[i - 1] != mark]
    return [
        MediaItem(hashlib.sha256(url.encode()).hexdigest(), first, _IMAGE_TOKENS)
        for url, first in zip(shown_in(body), firsts, strict=False)
    ]
