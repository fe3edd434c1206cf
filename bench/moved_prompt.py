"""A prompt's KV from a prefill engine to a decode engine through the connector's workers, as benches move it."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, SendOrder
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.transport import Ticket

KEY = bytes(32)
CHUNK_TOKENS = 2048
WAIT_S = 120.0


class RankMemory(Protocol):
    """Memory of one rank of an engine that holds one prompt, in one group of blocks."""

    @property
    def group(self) -> EngineGroup: ...

    def run(self, first: int, end: int) -> tuple[BlockRun, ...]:
        """Where blocks [first, end) of the prompt lie."""


def move(
    east: Sequence[tuple[RankMemory, KvProducer]],
    home: Sequence[tuple[RankMemory, KvConsumer]],
    num_tokens: int,
) -> float:
    """Prefill, move and load the prompt at all ranks; processor seconds of all threads.

    Raises:
        RuntimeError: it was not loaded.
        TimeoutError: it took too long.
    """
    ticket = Ticket.issue(
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=0,
        prompt_digest=bytes(16),
        lifetime_s=WAIT_S,
        now_s=time.time(),
    )
    group = east[0][0].group
    began_s, sealed, sent = time.process_time(), ticket.seal(KEY), 0
    for end_tokens in range(CHUNK_TOKENS, num_tokens + CHUNK_TOKENS, CHUNK_TOKENS):
        final = end_tokens >= num_tokens
        end = group.end_block(num_tokens) if final else end_tokens // group.block_tokens
        for memory, producer in east:
            orders = [SendOrder("p", ticket, sealed, memory.run(sent, end), (), final)]
            for name in group.layer_names:
                producer.save_layer(orders, name)
            producer.end_step(orders)
        sent = end
    for _, producer in east:
        producer.hold({"p": False})
        until(producer.finished)
    for memory, consumer in home:
        runs = memory.run(0, memory.group.end_block(num_tokens))
        consumer.order([LoadOrder("d", ticket, 0, runs)], [])
    for _, consumer in home:
        failed: set[str] = set()
        until(partial(_has_ended, consumer, failed))
        if failed:
            raise RuntimeError("a transfer was not loaded")
    return time.process_time() - began_s


def _has_ended(consumer: KvConsumer, failed: set[str]) -> bool:
    ended, failed_now = consumer.results()
    failed |= failed_now
    return bool(ended)


def until(is_so: Callable[[], object]) -> None:
    """Wait for it. Raises TimeoutError: it took too long."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("a transfer took too long")
        time.sleep(0.005)
