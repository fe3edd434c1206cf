"""A cached prefix that is elsewhere goes to where a prompt is prefilled, before that begins."""

import time

from msgspec.structs import replace

from prfaas.core.scheduling.decision import CacheTransfer, Decision
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.request import ServingRequest, Tenants, TokenizedPrompt
from prfaas.serving.gateway.request_log import TransferredBytes
from prfaas.serving.gateway.ways.hops import PrefillHops, PushHop, TransferSpec
from prfaas.serving.gateway.ways.kv_transfer import (
    EgressBill,
    HopFailedError,
    MovedPrefix,
    TransferDone,
)
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.tracing import AttributeValue
from prfaas.serving.transport.protocol.requests import CopyResult


class PrefixMoves:
    """Carries cache transfers out: instance to instance, or pool to pool."""

    def __init__(
        self,
        hops: PrefillHops,
        copier: PoolCopier,
        tenants: Tenants,
        context: GatewayContext,
    ) -> None:
        self._hops = hops
        self._copier = copier
        self._tenants = tenants
        self._plane = context.plane
        self.bill = EgressBill(context.running, context.metrics)
        self._context = context

    async def move(self, prompt: TokenizedPrompt, decision: Decision) -> MovedPrefix:
        """The cache transfer that `decision` wants, if it wants one. If it fails, more is computed: never raises."""
        wanted = decision.cache_transfer
        if wanted is None:
            return MovedPrefix(decision)
        num_tokens = len(prompt.token_ids)
        if prompt.media:
            # Prefixes are named by their tokens.
            return MovedPrefix(_without_transfer(decision, num_tokens, wanted.skip_tokens))
        if wanted.from_pool:
            result = await self._copied(prompt, decision, wanted)
            left = _without_transfer(decision, num_tokens, result.usable_tokens)
            return MovedPrefix(left, wanted.source, result.copied_bytes)
        transfer = await self._sent(prompt, decision, wanted)
        if transfer is None:
            # The instance holds what would not have been sent.
            return MovedPrefix(_without_transfer(decision, num_tokens, wanted.skip_tokens))
        left = _without_transfer(decision, num_tokens, num_tokens)
        return MovedPrefix(left, wanted.source, transfer.moved.total_bytes, transfer)

    async def _copied(self, prompt: TokenizedPrompt, decision: Decision, wanted: CacheTransfer) -> CopyResult:
        """Pool to pool."""
        request = prompt.request
        pool = self._context.running.current.pool_of(self._plane.members.instance(decision.prefill))
        if pool is None:
            self._note(request, "target", None)
            return CopyResult(0, 0, "target: there is no pool")
        begun_s = time.perf_counter()
        source = self._context.running.current.pool_named(wanted.source)
        service = self._tenants.transfer_class(
            request.salt,
            # Only an abundant link is worth a cache transfer (section 3.4.3). Inside a cluster nothing is held up.
            background=source.cluster != pool.cluster,
        )
        with self._plane.cluster_state.planned(decision):
            result = await self._copier.copy(
                wanted.source,
                pool.name,
                prompt.token_ids[: wanted.num_tokens],
                request.salt,
                request.adapter,
                service,
                kv_bytes=wanted.kv_bytes,
            )
        if result.reason:
            request.record.note(f"a prefix of pool {wanted.source} did not come whole: {result.reason}")
        copied_bytes = result.copied_bytes
        self._note(request, result.outcome, TransferredBytes(copied_bytes, 0) if copied_bytes else None)
        self.bill.add(request.record, source.cluster, pool.cluster, result.copied_bytes)
        told: dict[str, AttributeValue] = {
            "prfaas.kv.producer": wanted.source,
            "prfaas.kv.consumer": pool.name,
            "prfaas.kv.bytes": result.copied_bytes,
            "prfaas.outcome": result.outcome,
        }
        request.record.since("cache_transfer", begun_s, told)
        return result

    async def _sent(
        self, prompt: TokenizedPrompt, decision: Decision, wanted: CacheTransfer
    ) -> TransferDone | None:
        """Instance to instance; None if it failed."""
        request, done, outcome = prompt.request, None, "done"
        # At least one token must be left to compute, and one to leave out.
        prefix_tokens = min(wanted.num_tokens, len(prompt.token_ids) - 2)
        if prefix_tokens <= wanted.skip_tokens:
            outcome = "short"
        elif wanted.kv_bytes > self._context.staging_bytes(decision.prefill):
            outcome = "staging"
        else:
            spec = TransferSpec(
                producer=wanted.source,
                consumer=decision.prefill,
                token_ids=prompt.token_ids[:prefix_tokens],
                skip_tokens=wanted.skip_tokens,
                kv_bytes=wanted.kv_bytes,
                background=True,
            )
            try:
                # Not `measured`: how long it took says nothing about the prefill.
                with self._plane.prefilling(decision):
                    done = await PushHop(self._hops, spec, request).run()
            except HopFailedError as failure:
                outcome = failure.reason
        self._note(request, outcome, None if done is None else done.moved)
        if done is not None:
            source, target = (self._plane.members.instance(name) for name in (spec.producer, spec.consumer))
            self.bill.add(request.record, source.cluster, target.cluster, done.moved.sent_bytes)
            request.record.took("cache_transfer", done.transfer_s)
        return done

    def _note(self, request: ServingRequest, outcome: str, moved: TransferredBytes | None) -> None:
        self._context.metrics.cache_transfers.labels(outcome).inc()
        request.record.prefix_outcome = outcome
        if moved is not None:
            self._context.metrics.cache_transferred_bytes.inc(moved.total_bytes)
            request.record.prefix_moved = moved


def _without_transfer(decision: Decision, num_tokens: int, held_tokens: int) -> Decision:
    """The decision after its cache transfer: the prefill instance need not compute `held_tokens` tokens at most."""
    expected_tokens = num_tokens - decision.prefill_tokens
    left_tokens = num_tokens - min(expected_tokens, held_tokens)
    return replace(decision, cache_transfer=None, prefill_tokens=left_tokens)
