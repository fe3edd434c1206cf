"""Fingerprints of KV layouts: named marks that must be equal at both ends of a connection."""

from collections.abc import Mapping

from prfaas.serving.transport.protocol.sentences import legible

Fingerprint = Mapping[str, str | int]

MAY_DIFFER = "may differ"
"""Of a mark that is told and need not be equal."""

WINDOW_DRAFTS = "num_speculative_tokens"
"""Of engines whose windows are longer for it."""

MEANT_WITHOUT: dict[str, str | int] = {WINDOW_DRAFTS: MAY_DIFFER}
"""Values that older releases mean by leaving a mark out."""


def fingerprint_difference(ours: Fingerprint, theirs: object, name: str, peer: str) -> str | None:
    """A sentence that names a difference between two fingerprints; None: the peer's has all marks of ours.

    A mark that only the peer has is the peer's to judge, since only its release knows what a missing mark means (here:
    `MEANT_WITHOUT`). So two releases compare every mark that either of them knows.

    Fingerprints list the most telling marks first, and the first difference is named.
    """
    if not isinstance(theirs, dict):
        return f"{peer} sent no layout fingerprint"
    reported = MEANT_WITHOUT | theirs
    if all(reported.get(field) == mark for field, mark in ours.items()):
        return None
    places: dict[str, int] = {}
    for marks in (ours, theirs):
        for place, field in enumerate(marks):
            places[str(field)] = min(place, places.get(str(field), place))
    for field in sorted(places, key=lambda field: (places[field], field)):
        mine, other = ours.get(field), reported.get(field)
        if mine != other:
            what, value = legible(repr(field), 60), legible(repr(other), 100)
            return f"KV layout differs in {what}: {name} has {mine!r}, {peer} has {value}"
    return None
