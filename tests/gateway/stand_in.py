"""A stand-in for a vLLM server, for tests of the gateway only: the HTTP API that the gateway uses, the real transport.

Its "KV" is the prompt's ids as uint32, and its answer is a function of the prompt's ids alone, so an answer says
nothing about the route, and bytes that arrive can be compared with the ids.
"""

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from prfaas.gateway.chat_template import ChatTemplate
from prfaas.transport.peer import Peer
from prfaas.transport.receiver import Receiver
from prfaas.transport.sender import Sender
from prfaas.transport.source import BytesSource
from prfaas.transport.staging import StagingArena
from prfaas.transport.ticket import Ticket, TicketError, prompt_digest

BLOCK_TOKENS = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> Path:
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
    (directory / "config.json").write_text(json.dumps(HYBRID_CONFIG))
    return directory


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


def kv_of(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def answer_text(ids: Sequence[int]) -> str:
    return hashlib.sha256(kv_of(ids)).hexdigest()[:16]


class IdLayout:
    """One region: four bytes a token."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [4 * (num_tokens - skip_tokens)]


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class StandInEngine:
    """`fails`: prefills answer with that status. `hangs`: prefills never answer. `chunks`: of a streamed answer."""

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
    dies_while_streaming: bool = False
    other_ids: bool = False
    staging_bytes: int = 1 << 20
    seen: list[Seen] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    cancelled: int = 0
    http_port: int = 0
    kv_port: int = 0

    async def start(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        self.template = ChatTemplate.of_model(self.model_dir)
        self.arena = StagingArena(self.staging_bytes, block_bytes=1 << 16)
        self.receiver = Receiver(
            name=f"{self.name}/0",
            key=self.key,
            host="127.0.0.1",
            port=0,
            arena=self.arena,
            layout=IdLayout(),
            fingerprint={"layout": "ids"},
            producers=[f"{producer}/0" for producer in self.producers],
        )
        self.receiver.start()
        self.kv_port = self.receiver.port
        self.sender: Sender | None = None
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
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
            peers={c.name: Peer(f"{c.name}/0", "127.0.0.1", c.kv_port, "link", 2, None) for c in consumers},
            fingerprint={"layout": "ids"},
        )
        self.sender.start()

    async def stop_http(self) -> None:
        await self.runner.cleanup()

    async def stop(self) -> None:
        await self.runner.cleanup()
        if self.sender is not None:
            await asyncio.to_thread(self.sender.close)
        await asyncio.to_thread(self.receiver.close)

    def generated(self) -> list[Seen]:
        """What came besides the gateway's questions about token ids."""
        return [s for s in self.seen if s.path.startswith("/v1/") and not s.body.get("return_token_ids")]

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
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
        if "prompt" in body:
            text = body["prompt"]
        else:
            assert self.template is not None
            text = self.template._template.render(
                messages=[
                    m
                    | {
                        "content": m["content"]
                        if isinstance(m["content"], str)
                        else "\n".join(p["text"] for p in m["content"])
                    }
                    for m in body["messages"]
                ],
                tools=body.get("tools"),
                add_generation_prompt=True,
            )
        ids: list[int] = self.tokenizer.encode(text).ids
        return [*ids, 7] if self.other_ids else ids

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        ids = self._ids(body)
        return web.json_response({"count": len(ids), "max_model_len": 0, "tokens": ids})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(Seen(request.path, dict(request.headers), body))
        ids = self._ids(body)
        try:
            return await self._answered(request, body, ids)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answered(
        self, request: web.Request, body: dict[str, Any], ids: list[int]
    ) -> web.StreamResponse:
        ticket = self._ticket(body)
        if ticket is not None and ticket.producer == self.name:
            if self.hangs:
                await asyncio.Event().wait()
            if self.fails is not None:
                return web.json_response({"error": {"message": "made to fail"}}, status=self.fails)
            assert ticket.prompt_digest == prompt_digest(ids) and len(ids) == ticket.num_tokens
            if self.sends:
                self._send(ticket, body["kv_transfer_params"]["prfaas"], ids)
        elif ticket is not None and ticket.consumer == self.name:
            self._load(ticket, ids)
        text = answer_text(ids)
        if not body.get("stream"):
            return web.json_response(
                {
                    "id": "x",
                    "choices": [
                        {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
                    ],
                    "usage": {"prompt_tokens": len(ids)},
                    "prompt_token_ids": ids if body.get("return_token_ids") else None,
                    "kv_transfer_params": {"leaked": "secret"} if body.get("leak") else None,
                }
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for index in range(self.chunks):
            await response.write(
                b'data: {"choices": [{"index": 0, "text": "%s-%d"}]}\n\n' % (text.encode(), index)
            )
            await asyncio.sleep(self.chunk_s)
            if self.dies_while_streaming:
                assert request.transport is not None
                request.transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _ticket(self, body: dict[str, Any]) -> Ticket | None:
        sealed = (body.get("kv_transfer_params") or {}).get("prfaas")
        try:
            return Ticket.unseal(sealed, self.key, time.time()) if sealed else None
        except TicketError:
            return None

    def _send(self, ticket: Ticket, sealed: str, ids: list[int]) -> None:
        assert self.sender is not None
        outgoing = self.sender.open(
            ticket, sealed, IdLayout().region_bytes(ticket.num_tokens, ticket.skip_tokens)
        )
        payload = kv_of(ids[ticket.skip_tokens :])
        if payload and not self.stalls:
            outgoing.put(0, 0, BytesSource(payload))
        outgoing.end()

    def _load(self, ticket: Ticket, ids: list[int]) -> None:
        staged = self.receiver.take(ticket.transfer_id)
        assert staged is not None, "the gateway came before the bytes"
        assert prompt_digest(ids[:-1]) == ticket.prompt_digest
        nbytes = 4 * (ticket.num_tokens - ticket.skip_tokens)
        received = b"".join(bytes(view) for view in staged.region_views(0, 0, nbytes))
        staged.free()
        assert received == kv_of(ids[ticket.skip_tokens : ticket.num_tokens])
        self.loaded.append(ticket.num_tokens - ticket.skip_tokens)
