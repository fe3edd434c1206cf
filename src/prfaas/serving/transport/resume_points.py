"""From where an engine can go on with what has come of a transfer that broke."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """Of full attention whole blocks are enough; with states or windows it goes on from a checkpoint alone.

    Several parts, or ranks of an engine, may have broken at different places: it goes on from where all of them can.
    """

    tokens: int = 0
    """The most after which it can go on; 0: after none."""
    ends: tuple[int, ...] = ()
    """All of them where they are checkpoints, ascending, `tokens` the last. Empty: any whole blocks up to `tokens`."""

    def __and__(self, other: "ResumePoints") -> "ResumePoints":
        """From where both can go on."""
        tokens = min(self.tokens, other.tokens)
        if not (self.ends or other.ends) or not tokens:
            return ResumePoints(tokens)
        both = set(self.ends or other.ends) & set(other.ends or self.ends)
        ends = tuple(sorted(end for end in both if end <= tokens))
        return ResumePoints(ends[-1], ends) if ends else ResumePoints()

    def in_blocks(self, block_tokens: int, skip_tokens: int) -> "ResumePoints":
        """Of these, where whole blocks end, behind `skip_tokens`."""
        if self.ends:
            ends = tuple(end for end in self.ends if end % block_tokens == 0 and end > skip_tokens)
            return ResumePoints(ends[-1], ends) if ends else ResumePoints()
        tokens = self.tokens - self.tokens % block_tokens
        return ResumePoints(tokens) if tokens > skip_tokens else ResumePoints()

    def allows(self, tokens: int) -> bool:
        """Whether it can go on after so many tokens, if whole blocks end there."""
        return 0 < tokens <= self.tokens and (not self.ends or tokens in self.ends)


def common(points: Iterable[ResumePoints]) -> ResumePoints:
    """From where all of them can go on; there is at least one."""
    return reduce(ResumePoints.__and__, points)
