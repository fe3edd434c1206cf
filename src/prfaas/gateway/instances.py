"""The engine instances as the gateway knows them: which answer, and how busy they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.deployment import Instance
from prfaas.scheduling import InstanceView, View


class InstancePool:
    """All instances with what changes about them: requests in flight and whether they answer."""

    def __init__(
        self,
        instances: tuple[Instance, ...],
        links: frozenset[tuple[str, str]],
        *,
        is_hybrid: bool,
        can_skip: bool,
    ) -> None:
        self._instances = {instance.name: instance for instance in instances}
        self._links = links
        self._is_hybrid = is_hybrid
        self._can_skip = can_skip
        self._in_flight = dict.fromkeys(self._instances, 0)
        self._suspect_until_s: dict[str, float] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def __getitem__(self, name: str) -> Instance:
        return self._instances[name]

    def view(self) -> View:
        """A snapshot for the routing policy."""
        return View(
            instances=tuple(
                InstanceView(
                    name=i.name,
                    cluster=i.cluster,
                    prefills=i.has_role("prefill"),
                    decodes=i.has_role("decode"),
                    in_flight=self._in_flight[i.name],
                    healthy=i.name not in self._suspect_until_s,
                )
                for i in self._instances.values()
            ),
            links=self._links,
            is_hybrid=self._is_hybrid,
            can_skip=self._can_skip,
        )

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Counts one request in flight at `name`."""
        self._in_flight[name] += 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1

    def in_flight(self, name: str) -> int:
        return self._in_flight[name]

    def suspect(self, name: str, until_s: float) -> None:
        """Take `name` out of routing; it comes back by a good probe, not before the monotonic time
        `until_s`."""
        self._suspect_until_s[name] = until_s

    def absolve(self, name: str, now_s: float) -> bool:
        """A probe of `name` was good: back into routing unless it is too early. True when it came back."""
        until_s = self._suspect_until_s.get(name)
        if until_s is None or now_s < until_s:
            return False
        del self._suspect_until_s[name]
        return True

    def is_suspect(self, name: str) -> bool:
        return name in self._suspect_until_s
