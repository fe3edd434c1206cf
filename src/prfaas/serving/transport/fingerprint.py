"""What must be equal at both ends of a connection for KVCache to mean the same, by names that an error can give."""

from collections.abc import Mapping

from prfaas.serving.transport.sentences import legible

Fingerprint = Mapping[str, str | int]

MEANT_WITHOUT: dict[str, str | int] = {}
"""Of marks that fingerprints have not had from the first release on: what a release meant that does not tell them."""


def fingerprint_difference(ours: Fingerprint, theirs: object, name: str, peer: str) -> str | None:
    """A sentence naming a field in which two fingerprints differ, or None: the other side's has all marks of ours.

    A mark that only the other side has is for that side to judge: its release knows what the lack of it means, as this
    one does by `MEANT_WITHOUT`. So releases agree as far as both know, and nothing that one knows goes unlooked at.

    Fingerprints have what says most first: of several differences the first one is named, a mark that only one side has
    at its place among those of that side.
    """
    if not isinstance(theirs, dict):
        return f"{peer} sent no layout fingerprint"
    told = MEANT_WITHOUT | theirs
    if all(told.get(field) == mark for field, mark in ours.items()):
        return None
    places: dict[str, int] = {}
    for marks in (ours, theirs):
        for place, field in enumerate(marks):
            places[str(field)] = min(place, places.get(str(field), place))
    for field in sorted(places, key=lambda field: (places[field], field)):
        mine, other = ours.get(field), told.get(field)
        if mine != other:
            what, value = legible(repr(field), 60), legible(repr(other), 100)
            return f"KV layout differs in {what}: {name} has {mine!r}, {peer} has {value}"
    return None
