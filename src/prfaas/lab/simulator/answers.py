"""When the answers of requests begin and end, and what is known of those that ended."""

from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.result import Columns
from prfaas.lab.simulator.scenario import Overheads


class Answers:
    """Writes down the first and the last token of every request.

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
        job.slot_since_s = now_s = self._events.now_s
        if job.has_first:
            return
        job.has_first = True
        overheads, target = self._overheads, job.target
        ttft_s = now_s - job.arrival_s + overheads.request_s
        if job.engine is not target:
            ttft_s += overheads.hop_s
        if overheads.first_step:
            assert target.clock is not None and target.step_s is not None
            ttft_s += target.step_s(target.clock.batch)
        self._columns.ttft_s[job.number] = ttft_s

    def end(self, job: Job) -> None:
        """A request has its last token, and leaves."""
        overheads, target, now_s = self._overheads, job.target, self._events.now_s
        target.answered(now_s - job.slot_since_s)
        view = target.view
        view.in_flight -= 1
        view.decoding -= 1
        e2e_s = now_s - job.arrival_s + overheads.request_s
        if job.engine is not target:
            e2e_s += overheads.hop_s
        self._columns.e2e_s[job.number] = e2e_s
        del self._open[job.number]
        self.count += 1
        tokens = job.left_tokens
        self.tokens += tokens
        self.squares += tokens * tokens
