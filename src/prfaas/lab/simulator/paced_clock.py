"""A batch whose steps take longer or shorter from some moment on: prompts and relayed answers on one instance."""

from collections.abc import Callable, Iterator
from typing import Any

from prfaas.lab.simulator.token_clock import TokenClock


class PacedClock(TokenClock):
    """A `TokenClock` whose steps change, and which tells what its members lack.

    Args: as those of `TokenClock`; steps take `step_s(batch)` until `set_pace` says something else.
    """

    __slots__ = ()

    @property
    def members(self) -> Iterator[Any]:
        """The arguments of those that have a slot."""
        return (argument for _, number, argument in self._members if number not in self._gone)

    @property
    def lacking_tokens(self) -> float:
        """What those that have a slot lack together."""
        self._advance()
        return sum(
            max(end - self._tokens, 0.0) for end, number, _ in self._members if number not in self._gone
        )

    def set_pace(self, step_s: Callable[[int], float]) -> None:
        """Steps over the batch take so many seconds from now on. What of a step is done stays done."""
        self._go_on_at(step_s(batch) for batch in range(1, self._slots + 1))

    def leave(self, number: int) -> float:
        """Take out a request before its end.

        Args:
            number: As `join` gave it; it has a slot, and its end has not come.

        Returns:
            The tokens that it lacks.
        """
        self._advance()
        lacks = next(end - self._tokens for end, each, _ in self._members if each == number)
        self.remove(number)
        return max(lacks, 0.0)
