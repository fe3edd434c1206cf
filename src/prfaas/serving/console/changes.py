"""What happened between two samples, in sentences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.serving.console.alarms import WELL
from prfaas.serving.console.samples import instances_in

ChangeKind = Literal["threshold", "role", "health", "drain", "link", "pool", "alarm", "member"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two moments."""

    at_s: float
    """Unix time of the later moment."""
    kind: ChangeKind
    about: str
    """The cluster, instance, link or pool."""
    what: str
    """A sentence."""


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """In the order: thresholds, instances, links, pools. What came and went between the two is not seen."""
    at_s = after["at_s"]
    return [
        Change(at_s, kind, about, what)
        for kind, about, what in (
            *_thresholds(before, after),
            *_instances(before, after),
            *_up_or_down("link", before["links"], after["links"]),
            *_conditions(before["links"], after["links"]),
            *_up_or_down("pool", before["pools"], after["pools"]),
        )
    ]


_Told = tuple[ChangeKind, str, str]


def _thresholds(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[_Told]:
    for name, cluster in after["clusters"].items():
        old = before["clusters"].get(name)
        if old is None:
            continue
        was, now = old.get("threshold_tokens"), cluster.get("threshold_tokens")
        if was != now:
            yield "threshold", name, f"The threshold of {name} went from {_tokens(was)} to {_tokens(now)}."
        if old.get("threshold_held") != cluster.get("threshold_held"):
            held = cluster.get("threshold_held")
            text = "is held by an operator" if held else "is searched again"
            yield "threshold", name, f"The threshold of {name} {text}."


def _instances(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[_Told]:
    old, new = instances_in(before), instances_in(after)
    for name in sorted(new.keys() - old.keys()):
        yield "member", name, f"{name} joined."
    for name in sorted(old.keys() - new.keys()):
        yield "member", name, f"{name} left."
    for name in (name for name in new if name in old):
        yield from _instance(name, old[name], new[name])


def _instance(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[_Told]:
    if old["role"] != new["role"]:
        yield "role", name, f"{name} changed from {old['role']} to {new['role']}."
    elif new.get("draining") and not old.get("draining"):
        yield "role", name, f"{name} drains before it changes its role."
    if old["healthy"] and not new["healthy"]:
        why = new.get("suspicion")
        yield "health", name, f"{name} left routing{f': {why}' if why else ''}."
    elif new["healthy"] and not old["healthy"]:
        yield "health", name, f"{name} is back in routing."
    if new.get("leaving"):
        # Who leaves is drained by the file, not by an operator.
        if not old.get("leaving"):
            yield "member", name, f"{name} is not in the file any more, and leaves when its work has ended."
    elif old["drain"] != new["drain"]:
        state = {None: "takes part again", "draining": "is drained by an operator", "drained": "is drained"}
        yield "drain", name, f"{name} {state[new['drain']]}."


def _up_or_down(
    kind: Literal["link", "pool"], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[_Told]:
    for name, new in after.items():
        old = before.get(name)
        if old is not None and old["up"] != new["up"]:
            yield kind, name, f"The {kind} {name} {'is up again' if new['up'] else 'went down'}."


def _conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[_Told]:
    for name, new in after.items():
        old = before.get(name)
        if old is None or not new["up"]:
            continue
        # Between clear and busy it goes to and fro with every transfer.
        was, now = ("clear" if link["condition"] in WELL else link["condition"] for link in (old, new))
        if was != now:
            yield "link", name, f"The condition of the link {name} went from {was} to {now}."


def _tokens(tokens: float | None) -> str:
    return "never" if tokens is None else f"{tokens:,.0f} tokens"
