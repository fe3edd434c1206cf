"""When the answers of requests begin and end, and what is known of those that ended."""

from prfaas.core.scheduling.decoders import learnt_slot_s
from prfaas.lab.simulator.columns import Columns
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.scenario import Overheads


class Answers:
    """Writes down the first, the second and the last token of every request.

    Args:
        events: The simulated clock.
        columns: Where the times go.
        overheads: What is added to them.
        open_jobs: By request; one that has its answer is taken out.
    """

    count: int
    """Of answers that ended."""
    tokens: int
    """Of these in all."""

    def __init__(
        self, events: Events, columns: Columns, overheads: Overheads, open_jobs: dict[int, Job]
    ) -> None:
        self._events = events
        self._columns = columns
        self._request_s = overheads.request_s
        self._hop_s = overheads.hop_s
        self._has_first_step = overheads.first_step
        self._open = open_jobs
        self._behind_s: dict[int, float] = {}
        self.count = self.tokens = 0

    def begin(self, job: Job) -> None:
        """A request has its decode slot: what ends its TTFT, unless it had its first token already."""
        job.slot_since_s = self._events.now_s
        behind_s = self._behind_s.get(job.number, 0.0) if self._behind_s else 0.0
        late_s = 0.0
        if job.target.chunk_s:
            late_s, uncounted_s = job.target.late_s(self._events.now_s)
            self._behind_s[job.number] = behind_s + uncounted_s
        if job.has_first:
            if self._columns.first_from_prefill:
                self._tell_next(job, self._after_arrival_s(job) + behind_s + late_s + self._step_s(job))
            return
        job.has_first = True
        ttft_s = self._after_arrival_s(job) + late_s
        if self._has_first_step:
            ttft_s += self._step_s(job)
        self._columns.ttft_s[job.number] = ttft_s
        if self._columns.first_from_prefill:
            self._columns.last_token_s[job.number] = ttft_s
            if job.left_tokens > 1:
                self._tell_next(job, ttft_s + self._step_s(job))

    def end_with_prefill(self, job: Job) -> bool:
        """Its prefill has ended and sampled a first token, which goes back to the client while the KV moves on.

        Of a link the token needs the round trip, and nothing of its bandwidth. Nothing happens where the client has a
        first token, or where the instance that prefills decodes too.

        Returns:
            Whether that token was the whole answer, so that the request leaves.
        """
        if job.has_first or job.engine is job.target:
            return False
        job.has_first = True
        job.tokens += 1
        job.left_tokens = max(job.left_tokens - 1, 0)
        columns, number = self._columns, job.number
        rtt_s = 0.0 if job.link is None else job.link.view.rtt_s
        columns.ttft_s[number] = self._after_arrival_s(job) + rtt_s
        columns.last_token_s[number] = columns.ttft_s[number]
        columns.prefilled_first[number] = 1
        if not job.left_tokens:
            # No decode instance has written any.
            self._leave(job, columns.ttft_s[number])
        return not job.left_tokens

    def break_off(self, job: Job) -> None:
        """Its decode instance is gone: the client has what was written until now."""
        if self._columns.first_from_prefill:
            self._columns.last_token_s[job.number] = self._after_arrival_s(job)

    def _tell_next(self, job: Job, at_s: float) -> None:
        """The first token of a decode instance, so long after the arrival; the others come a step apart."""
        columns, number = self._columns, job.number
        longest_s, second_s = columns.longest_gap_s, columns.second_token_s
        gap_s = max(at_s - columns.last_token_s[number], 0.0)
        # Without one it is NaN, which is less than nothing.
        if not longest_s[number] >= gap_s:
            longest_s[number] = gap_s
        if second_s[number] != second_s[number]:
            second_s[number] = at_s
        columns.last_token_s[number] = at_s

    def _after_arrival_s(self, job: Job) -> float:
        """From the request's arrival to now, with what comes beside the work itself."""
        after_s = self._events.now_s - job.arrival_s + self._request_s
        if job.engine is not job.target:
            after_s += self._hop_s
        return after_s

    def _step_s(self, job: Job) -> float:
        target = job.target
        assert target.clock is not None and target.step_s is not None
        return target.step_s(target.clock.batch)

    def end(self, job: Job) -> None:
        """A request has its last token, and leaves."""
        cluster = job.target.cluster
        # What anybody sees of an engine.
        cluster.slot_s = learnt_slot_s(cluster.slot_s, 1, self._events.now_s - job.slot_since_s)
        behind_s = self._behind_s.pop(job.number, 0.0) if self._behind_s else 0.0
        self._leave(job, self._after_arrival_s(job) + behind_s)

    def _leave(self, job: Job, e2e_s: float) -> None:
        self._columns.e2e_s[job.number] = e2e_s
        view = job.target.view
        view.in_flight -= 1
        view.decoding -= 1
        del self._open[job.number]
        self.count += 1
        self.tokens += job.left_tokens
