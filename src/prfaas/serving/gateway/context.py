"""What the parts of one gateway share: whom they ask, what they count, their limits, and threads for large work."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from prfaas.serving.control.plane import LivePlane
from prfaas.serving.descriptors import DescriptorBudget
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.engine_client import EngineClient
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.running_deployment import RunningDeployment

P = ParamSpec("P")
T = TypeVar("T")


# Whoever answers in place of this gateway is there by then, or this one again.
_RETRY_AFTER_S = 5.0


class Draining:
    """Whether new requests are refused, and how many are still open. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.active = False
        """Whether the gateway is about to end: it serves what it has and takes nothing new."""
        self.open_requests = 0
        """Requests to generate that have begun and not ended."""
        self._settled = asyncio.Event()

    def begin(self) -> None:
        """Take nothing new from now on. Idempotent."""
        self.active = True
        if not self.open_requests:
            self._settled.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """While one request is open. Raises ApiError 503 where it comes too late."""
        if self.active:
            raise ApiError(
                503,
                "The gateway is about to end and takes no new requests; send this one again in a moment.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            if self.active and not self.open_requests:
                self._settled.set()

    async def settled(self, within_s: float) -> bool:
        """True once nothing is open; False if that takes longer than `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True


class ThreadOffload:
    """Runs small work in place, and work that would block the event loop in a bounded pool of threads."""

    def __init__(self, threads: int, inline_size: int) -> None:
        """`inline_size`: up to this size (bytes or characters) a hop to a thread costs more than the work."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prfaas-gateway")
        self._inline_size = inline_size

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args)`, in a thread when `size` is above the inline size."""
        if size <= self._inline_size:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """End the threads when their current work is done."""
        self._executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The defaults are generous: they are meant to end what is stuck, not what is slow."""

    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 600.0
    # After the prefill has answered: the queue of bytes still on the link, besides what bandwidth explains.
    transfer_grace_s: float = 30.0
    announce_grace_s: float = 3.0
    # A ticket outlives the prefill, the transfer and the decode engine's queue.
    ticket_lifetime_s: float = 1800.0
    tokenize_timeout_s: float = 60.0
    abandon_timeout_s: float = 5.0
    # A request that kills engines must not kill them all.
    decode_attempts: int = 3
    kept_records: int = 10_000
    max_body_bytes: int = 128 << 20
    # A body may take so long, and longer for what has come of it.
    body_grace_s: float = 10.0
    least_body_bytes_per_s: float = 16 << 10
    # JSON below this size costs less than the hop to a thread and back.
    inline_json_bytes: int = 256 << 10
    inline_text_chars: int = 4096
    tokenizer_threads: int = 2
    # vLLM's server closes idle connections after 5 s: ours must be gone before, or a request meets a closing
    # one.
    engine_keepalive_s: float = 2.0
    # Those behind TLS are told to wait longer (engines/command.py): a new connection costs two round trips.
    tls_engine_keepalive_s: float = 30.0


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """Handed to every part that talks to engines or decides."""

    running: RunningDeployment
    plane: LivePlane
    client: EngineClient
    metrics: Metrics
    options: GatewayOptions
    json_threads: ThreadOffload
    """For JSON bodies and hashes of long prompts."""
    max_model_len: int
    """Tokens of a prompt and its answer together, at most."""
    draining: Draining
    descriptors: DescriptorBudget

    def staging_bytes(self, name: str) -> int:
        """Of all ranks of an instance together."""
        instance = self.plane.members.instance(name)
        return self.running.current.engine.staging_bytes * instance.tensor_parallel
