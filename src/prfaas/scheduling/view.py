"""The instances and links as routing sees them."""

from collections.abc import Iterable
from dataclasses import dataclass


class NoDecodeInstanceError(LookupError):
    """No instance can decode."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One engine instance. `in_flight`: requests the gateway has open there, any role."""

    name: str
    cluster: str
    prefills: bool
    decodes: bool
    in_flight: int = 0
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class View:
    """All instances, the directed links as (source cluster, target cluster), and whether the model is hybrid.

    A hybrid model has layers whose state cannot be cut at an arbitrary token (linear or sliding-window): what
    such an instance holds of a prompt's attention blocks spares bytes, not computing. `can_skip`: it does spare
    bytes; not so with sliding windows, since an engine keeps window blocks only near the end of a prompt and
    doesn't count a prefix without them as held.
    """

    instances: tuple[InstanceView, ...]
    links: frozenset[tuple[str, str]]
    is_hybrid: bool
    can_skip: bool = True

    def decoders(self) -> list[InstanceView]:
        """Decode instances: the healthy ones, or all when none is, since nothing else can answer a client."""
        decoders = [i for i in self.instances if i.decodes]
        return [i for i in decoders if i.healthy] or decoders

    def local_prefillers(self, decode: InstanceView) -> list[InstanceView]:
        """Healthy prefill instances beside `decode` in its cluster; not `decode` itself, which needs no
        transfer."""
        return [
            i
            for i in self.instances
            if i.healthy and i.prefills and i.cluster == decode.cluster and i.name != decode.name
        ]

    def remote_prefillers(self, decode: InstanceView) -> list[InstanceView]:
        """Healthy prefill instances of other clusters with a link to the cluster of `decode`."""
        return [
            i
            for i in self.instances
            if i.healthy
            and i.prefills
            and i.cluster != decode.cluster
            and (i.cluster, decode.cluster) in self.links
        ]

    def without(self, names: Iterable[str]) -> "View":
        """The same view less `names`: how a request looks for another way after a failure."""
        gone = frozenset(names)
        return View(
            instances=tuple(i for i in self.instances if i.name not in gone),
            links=self.links,
            is_hybrid=self.is_hybrid,
            can_skip=self.can_skip,
        )
