"""When the answers of requests begin and end, and what is known of those that ended."""

from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.result import Columns
from prfaas.lab.simulator.scenario import Overheads


class Answers:
    """Writes down the first, the second and the last token of every request.

    Args:
        events: The simulated clock.
        columns: Where the times go.
        overheads: What is added to them.
        open_jobs: By request; one that has its answer is taken out.
    """

    __slots__ = ("_columns", "_events", "_open", "_overheads", "count", "squares", "tokens")

    count: int
    """Of answers that ended."""
    tokens: int
    """Of these in all."""
    squares: int
    """Of their tokens, summed."""

    def __init__(
        self, events: Events, columns: Columns, overheads: Overheads, open_jobs: dict[int, Job]
    ) -> None:
        self._events = events
        self._columns = columns
        self._overheads = overheads
        self._open = open_jobs
        self.count = self.tokens = self.squares = 0

    def begin(self, job: Job) -> None:
        """A request has its decode slot: what ends its TTFT, unless it had its first token already."""
        job.slot_since_s = self._events.now_s
        if job.has_first:
            second_s = self._columns.second_token_s
            if second_s is not None and second_s[job.number] != second_s[job.number]:
                second_s[job.number] = self._after_arrival_s(job) + self._step_s(job)
            return
        job.has_first = True
        ttft_s = self._after_arrival_s(job)
        if self._overheads.first_step:
            ttft_s += self._step_s(job)
        self._columns.ttft_s[job.number] = ttft_s
        if self._columns.second_token_s is not None and job.left_tokens > 1:
            self._columns.second_token_s[job.number] = ttft_s + self._step_s(job)

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
        columns.prefilled_first[number] = 1
        if job.left_tokens:
            return False
        columns.e2e_s[number] = columns.ttft_s[number]
        view = job.target.view
        view.in_flight -= 1
        view.decoding -= 1
        self._count(job)
        return True

    def _after_arrival_s(self, job: Job) -> float:
        """From the request's arrival to now, with what comes beside the work itself."""
        overheads = self._overheads
        after_s = self._events.now_s - job.arrival_s + overheads.request_s
        if job.engine is not job.target:
            after_s += overheads.hop_s
        return after_s

    def _step_s(self, job: Job) -> float:
        target = job.target
        assert target.clock is not None and target.step_s is not None
        return target.step_s(target.clock.batch)

    def end(self, job: Job) -> None:
        """A request has its last token, and leaves."""
        target = job.target
        target.answered(self._events.now_s - job.slot_since_s)
        view = target.view
        view.in_flight -= 1
        view.decoding -= 1
        self._columns.e2e_s[job.number] = self._after_arrival_s(job)
        self._count(job)

    def _count(self, job: Job) -> None:
        del self._open[job.number]
        self.count += 1
        tokens = job.left_tokens
        self.tokens += tokens
        self.squares += tokens * tokens
