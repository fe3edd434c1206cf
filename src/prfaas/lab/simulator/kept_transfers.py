"""Partial transfers of prefills that fail: how much has arrived, and which instance goes on from there."""

from prfaas.core.link.checkpoints import checkpoint_count, checkpoint_every_tokens
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.core.scheduling.preemption import goes_on_at_decode
from prfaas.lab.simulator.instance import Job, JobStage
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.transfer import KvMoves


class KeptTransfers:
    """The live rules for a transfer that breaks.

    The decode instance goes on from what has come: with full attention from the last byte, with linear states or
    windows from the newest checkpoint. As live, nothing is kept where prefills give first tokens.
    """

    def __init__(self, scenario: Scenario, kv: KvMoves) -> None:
        self._kv = kv
        self._are_kept = scenario.keeps_transfers and scenario.first_token != "prefill"

    def checkpoint_bytes(self, job: Job, link_bits_per_s: float) -> int:
        """Bytes of the state snapshots that a prefill sends which begins now; the job gets their size and spacing."""
        if not self._are_kept:
            return 0
        engine, kv = job.engine, self._kv if job.link is None else job.link.kv
        size_bytes = kv.facts.checkpoint_bytes
        job.every_tokens = checkpoint_every_tokens(
            job.computed_tokens,
            engine.after_prefix_s(job.computed_tokens, job.tokens - job.computed_tokens),
            job.promised_bytes,
            size_bytes,
            link_bits_per_s,
            engine.cluster.kills_per_s,
        )
        job.checkpoint_bytes = size_bytes * self._count(job)
        return job.checkpoint_bytes

    def decision(self, job: Job, now_s: float, *, is_preempted: bool) -> Decision | None:
        """The decode instance goes on from what has come of a job; None where another one begins again."""
        kept_tokens = self.tokens(job, now_s)
        if not goes_on_at_decode(kept_tokens, job.tokens, is_preempted=is_preempted):
            return None
        before, left_tokens = job.decision, job.tokens - kept_tokens
        return Decision(
            route=Route.LOCAL,
            prefill=before.decode,
            decode=before.decode,
            uncached_tokens=before.uncached_tokens,
            prefill_tokens=left_tokens,
            skip_tokens=0,
            kv_bytes=0,
            reason="kept",
            threshold_tokens=before.threshold_tokens,
            predicted_ttft_s=job.target.after_prefix_s(left_tokens, kept_tokens),
            num_tokens=job.tokens,
        )

    def tokens(self, job: Job, now_s: float) -> int:
        """After how many tokens the decode instance could go on, were the prefill to end now; 0: nothing has come."""
        engine, target = job.engine, job.target
        is_under_way = JobStage.PREFILLING <= job.stage <= JobStage.SENDING
        if not (self._are_kept and is_under_way and engine is not target and target.view.healthy):
            return 0
        all_tokens, skip_tokens = job.tokens - 1, job.decision.skip_tokens
        if job.link is None:
            # Inside of a cluster all has come that has been computed, and no checkpoints are sent.
            share = 1.0 - max(engine.free_at_s - now_s, 0.0) / job.service_s if job.service_s else 1.0
            return 0 if self._kv.facts.checkpoint_bytes else _from_share(share, skip_tokens, all_tokens)
        if job.transfer is None:
            return 0
        sent_bytes = job.link.fluid.sent_bytes(job.transfer)
        if sent_bytes >= job.promised_bytes + job.checkpoint_bytes:
            return all_tokens
        streamed_bytes = job.link.kv.streamed_bytes(all_tokens, skip_tokens)
        if not job.link.kv.facts.checkpoint_bytes:
            return _from_share(sent_bytes / streamed_bytes, skip_tokens, all_tokens) if streamed_bytes else 0
        return self._newest_checkpoint(job, sent_bytes, streamed_bytes)

    def _newest_checkpoint(self, job: Job, sent_bytes: float, streamed_bytes: int) -> int:
        """It is of use once all full attention up to there has come, and the checkpoints before it."""
        all_tokens, skip_tokens, count = job.tokens - 1, job.decision.skip_tokens, self._count(job)
        if not count:
            return 0
        token_bytes = streamed_bytes / (all_tokens - skip_tokens) if all_tokens > skip_tokens else 0.0
        first_tokens, each_bytes = _first_token(job), job.checkpoint_bytes / count
        sent_bytes -= token_bytes * (first_tokens - skip_tokens)
        come = min(int(sent_bytes / (token_bytes * job.every_tokens + each_bytes)), count)
        return first_tokens + come * job.every_tokens if come > 0 else 0

    def _count(self, job: Job) -> int:
        return checkpoint_count(job.every_tokens, job.tokens - 1 - _first_token(job))


def _first_token(job: Job) -> int:
    """Where checkpoints are counted from: what its prefill did not compute, or did not send."""
    return max(job.tokens - job.computed_tokens, job.decision.skip_tokens)


def _from_share(share: float, skip_tokens: int, num_tokens: int) -> int:
    """Tokens that are there once so much has come of those behind `skip_tokens`; 0: nothing has come."""
    come = int(min(share, 1.0) * (num_tokens - skip_tokens))
    return skip_tokens + come if come > 0 else 0
