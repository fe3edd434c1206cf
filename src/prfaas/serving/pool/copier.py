"""Orders for copies of prefixes from pool to pool: by the gateway before a prefill, and for hot prefixes."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.requests import MAX_COPIED_TOKENS, CopyOrder, CopyResult
from prfaas.serving.transport.protocol.ticket import (
    TRANSFER_ID_BYTES,
    Ticket,
    TransferAttributes,
    TransferClass,
    prompt_digest,
)
from prfaas.serving.transport.protocol.wire import WireError, read_body

logger = logging.getLogger(__name__)

# Links are shared, and copies get what others leave.
_SLACK = 4.0
_GRACE_S = 30.0
_ABANDON_S = 5.0


class PoolCopier:
    """Seals tickets for copies, has the target carry them out, and waits. It belongs to one event loop."""

    def __init__(self, running: RunningDeployment, key: bytes, ports: Mapping[str, Observer]) -> None:
        """
        Args:
            running: has the pools and the links between their clusters.
            key: seals tickets.
            ports: the pools' KV ports, by name.
        """
        self._key = key
        self._ports = ports
        self._running = running
        self._abandoning = BackgroundTasks()

    async def copy(
        self,
        source: str,
        target: str,
        token_ids: Sequence[int],
        salt: str,
        adapter: str,
        service: TransferClass,
        *,
        kv_bytes: int,
        grace_s: float = _GRACE_S,
    ) -> CopyResult:
        """Have the pool `target` get a prefix from the pool `source`, and wait until it has it.

        Failures do not raise: the result has the reason. A copy is given up when its waiting is cancelled.

        Args:
            source: name of the pool that holds the prefix.
            target: name of the pool that lacks it.
            token_ids: the prefix.
            salt: the tenant's.
            adapter: name of the LoRA adapter.
            service: its class on the link.
            kv_bytes: expected size.
            grace_s: allowed time besides that of the bytes on the link.
        """
        if len(token_ids) > MAX_COPIED_TOKENS:
            return CopyResult(0, 0, f"long: at most {MAX_COPIED_TOKENS} tokens can be copied")
        timeout_s = grace_s + self._moving_s(source, target, kv_bytes)
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer=source,
            consumer=target,
            num_tokens=len(token_ids),
            skip_tokens=0,
            prompt_digest=prompt_digest(token_ids, salt, adapter),
            expires_at_s=time.time() + timeout_s,
            attributes=TransferAttributes(service=service),
        )
        order = CopyOrder.of(ticket.seal(self._key), token_ids, salt, adapter)
        is_over = False
        try:
            answer = await self._ports[target].request(ticket.transfer_id, order, timeout_s)
            is_over = True
            return read_body(CopyResult, answer)
        except TimeoutError:
            return CopyResult(0, 0, f"deadline: not complete within {timeout_s:.0f} s")
        except (OSError, WireError) as error:
            return CopyResult(0, 0, f"target: {error}")
        finally:
            if not is_over:
                self._abandon(target, ticket.transfer_id)

    async def close(self) -> None:
        """Wait for what is being given up (each is bounded), and end the connections."""
        await self._abandoning.finish()
        for port in self._ports.values():
            await port.close()

    def _moving_s(self, source: str, target: str, kv_bytes: int) -> float:
        current = self._running.current
        link = current.link(current.pool_named(source).cluster, current.pool_named(target).cluster)
        return 0.0 if link is None else _SLACK * BITS_PER_BYTE * kv_bytes / link.bandwidth_bits_per_s

    def _abandon(self, target: str, transfer_id: bytes) -> None:
        async def abandon() -> None:
            try:
                async with asyncio.timeout(_ABANDON_S):
                    await self._ports[target].abandon(transfer_id, "nobody waits for the copy any more")
            except (OSError, TimeoutError) as error:
                # Its ticket expires.
                logger.info("could not give up a copy at %s: %s", target, error)

        # In the background, since it must also happen when the waiting task is being cancelled.
        self._abandoning.start(abandon())
