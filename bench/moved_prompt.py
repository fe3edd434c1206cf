"""A prompt's KV from a prefill engine to a decode engine through the connector's workers, as benches move it."""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import region_bytes
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, SendOrder
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import wire_layouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket

KEY = bytes(32)
CHUNK_TOKENS = 2048
WAIT_S = 120.0


class RankMemory(Protocol):
    """Memory of one rank of an engine that holds one prompt, in one group of blocks."""

    @property
    def group(self) -> EngineGroup: ...

    def run(self, first: int, end: int) -> tuple[BlockRun, ...]:
        """Where blocks [first, end) of the prompt lie."""


class OneRank(RankMemory, Protocol):
    """Memory of an engine of one rank."""

    @property
    def layout(self) -> KvLayout: ...


class Way:
    """Two engines and the transport between them."""

    def __init__(
        self,
        east: OneRank,
        home: OneRank,
        num_tokens: int,
        staging_of: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`staging_of`: gives so many bytes of host memory for what arrives; None: any will do."""
        self.east, self.home, self.num_tokens = east, home, num_tokens
        self.kv_bytes = sum(region_bytes(self.east.layout.regions, num_tokens, 0))
        staging_bytes = -(-self.kv_bytes >> 20) + 16 << 20
        sending = wire_layouts(self.east.layout, "east", 0)
        loading = wire_layouts(self.home.layout, "home", 0)
        self.receiver = Receiver(
            name="home/0",
            key=KEY,
            host="127.0.0.1",
            port=0,
            arena=StagingArena(staging_bytes, 1 << 20, staging_of and staging_of(staging_bytes)),
            layout=loading,
            fingerprint={},
            options=ReceiverOptions(uncounted_regions=1),
        )
        self.receiver.start()
        self.sender = Sender(
            name="east/0",
            key=KEY,
            peers={"home/0": Peer("home/0", "127.0.0.1", self.receiver.port, "link", 2, None)},
            fingerprint={},
            options=SenderOptions(),
            layouts=sending,
        )
        self.sender.start()
        until(lambda: self.sender.stats()["peers"]["home/0"]["connections"] == 2)
        stats = ConnectorStats()
        self.producer = KvProducer(self.east.layout, sending, self.sender, WAIT_S, stats)
        self.consumer = KvConsumer(
            loading, self.receiver, TransferLimits(load_wait_s=WAIT_S, staging_ttl_s=WAIT_S), stats
        )

    def close(self) -> None:
        self.consumer.close()
        self.sender.close()
        self.receiver.close()

    def transfer(self) -> float:
        """Prefill, move and load the prompt; processor seconds of all threads."""
        return move([(self.east, self.producer)], [(self.home, self.consumer)], self.num_tokens)


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
    ticket = Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=0,
        prompt_digest=bytes(16),
        expires_at_s=time.time() + WAIT_S,
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
