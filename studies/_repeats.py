"""Runs that differ in nothing but their seed: what they say together, in cells and tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prfaas.lab.studies.study import Key, Outcomes, StudyOutcome, StudyTable, Verdict
from studies._figures import NONE, Difference, SeedMean, difference, seconds, seed_mean
from studies._runs import LengthClasses, of_class

TTFT = "ttft_mean_s"
_TAILS = {"mean": TTFT, "P90": "ttft_p90_s", "P99": "ttft_p99_s", "P99.9": "ttft_p999_s"}


@dataclass(frozen=True, slots=True)
class Repeats:
    """One variant under several seeds, in the order of the seeds."""

    outcomes: Sequence[StudyOutcome]

    @classmethod
    def of(cls, outcomes: Outcomes, keys: Iterable[Key]) -> "Repeats":
        """The runs with these keys, one per seed."""
        return cls([outcomes[key] for key in keys])

    @classmethod
    def seeded(cls, outcomes: Outcomes, seeds: Iterable[int], *key: str | float) -> "Repeats":
        """The runs whose keys are `key` and, last, the seed."""
        return cls.of(outcomes, [(*key, seed) for seed in seeds])

    def values(self, field: str = TTFT) -> list[float]:
        """A number of the summary per seed; NaN where there is none."""
        return [outcome.number(field) for outcome in self.outcomes]

    def mean(self, field: str = TTFT) -> SeedMean:
        """The mean over the seeds with its 95 % interval."""
        return seed_mean(self.values(field))

    def against(self, base: "Repeats", field: str = TTFT) -> Difference:
        """How much it differs from another variant that met the same requests, seed by seed."""
        return difference(self.values(field), base.values(field))

    def of_class(self, index: int, name: str = "mean_s") -> SeedMean:
        """As `_runs.of_class`, over the seeds."""
        return seed_mean([of_class(outcome, index, name) for outcome in self.outcomes])

    @property
    def verdict(self) -> Verdict:
        """Queues grow if they do for one seed; else it is too short to say if it is for one."""
        found = {outcome.verdict for outcome in self.outcomes}
        return "grows" if "grows" in found else "too short to say" if len(found) > 1 else found.pop()

    @property
    def is_stable(self) -> bool:
        """Whether every seed could have gone on without end."""
        return self.verdict == "stable"

    @property
    def grows(self) -> str:
        """ "grows", and for how many seeds if not for all."""
        count = sum(outcome.verdict == "grows" for outcome in self.outcomes)
        return "grows" if count == len(self.outcomes) else f"grows ({count} of {len(self.outcomes)})"

    @property
    def ttft(self) -> str:
        """A cell: mean with its interval, and P90: "3.78 ± 0.12 (6.47)"; no number where queues grow."""
        if self.verdict == "grows":
            return self.grows
        return self._marked(f"{self.mean().seconds} ({seconds(self.mean('ttft_p90_s').mean)})")

    @property
    def ttft_mean(self) -> str:
        """A cell: the mean with its interval; no number where queues grow."""
        return self.grows if self.verdict == "grows" else self._marked(self.mean().seconds)

    def tails(self, classes: LengthClasses) -> list[str]:
        """A row of `tail_table`, without its name."""
        numbers = range(len(classes.labels))
        if self.verdict == "grows":
            return [self.grows, *[NONE] * (len(_TAILS) - 1 + len(numbers))]
        of_all = [self.mean(field).seconds for field in _TAILS.values()]
        return [self._marked(of_all[0]), *of_all[1:], *(self.of_class(number).seconds for number in numbers)]

    def _marked(self, text: str) -> str:
        return text if self.is_stable else f"too short: {text}"


TAIL_TITLE = "TTFT in seconds with 95 % intervals: tails, and means by prompt length"


def tail_table(first: str, rows: Mapping[str, Repeats], classes: LengthClasses) -> StudyTable:
    """TTFT in seconds with 95 % intervals: mean, P90, P99 and P99.9 of all, and the mean of each class of lengths.

    Args:
        first: The title of the first column.
        rows: By the text of the first column.
        classes: Those of the runs.
    """
    return StudyTable(
        [first, *_TAILS, *(f"mean, {label}" for label in classes.labels)],
        [[name, *each.tails(classes)] for name, each in rows.items()],
    )
