"""Resume points: numbers of tokens after which an engine can resume from a partial transfer."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """Numbers of tokens after which an engine can resume: any whole block, or checkpoints if it has states or windows.

    Several transfers of a ticket, or ranks, may have broken at different places; `&` gives the points that all have.
    """

    tokens: int = 0
    """The largest one; 0: there is none."""
    ends: tuple[int, ...] = ()
    """All of them, ascending, where they are checkpoints; the last is `tokens`. Empty: any whole blocks up to there."""

    def __and__(self, other: "ResumePoints") -> "ResumePoints":
        """The points that both have."""
        tokens = min(self.tokens, other.tokens)
        if not (self.ends or other.ends) or not tokens:
            return ResumePoints(tokens)
        both = set(self.ends or other.ends) & set(other.ends or self.ends)
        ends = tuple(sorted(end for end in both if end <= tokens))
        return ResumePoints(ends[-1], ends) if ends else ResumePoints()

    def in_blocks(self, block_tokens: int, skip_tokens: int) -> "ResumePoints":
        """The points at which whole blocks end, behind `skip_tokens`."""
        if self.ends:
            ends = tuple(end for end in self.ends if end % block_tokens == 0 and end > skip_tokens)
            return ResumePoints(ends[-1], ends) if ends else ResumePoints()
        tokens = self.tokens - self.tokens % block_tokens
        return ResumePoints(tokens) if tokens > skip_tokens else ResumePoints()

    def allows(self, tokens: int) -> bool:
        """True if the engine can resume after `tokens`, provided that whole blocks end there."""
        return 0 < tokens <= self.tokens and (not self.ends or tokens in self.ends)


def common(points: Iterable[ResumePoints]) -> ResumePoints:
    """The points that all of `points` have; there is at least one."""
    return reduce(ResumePoints.__and__, points)
