"""The console's history: what a frame holds, which alarms it raises, what changed, and how much is kept."""

import asyncio
import copy
import itertools
import json
from typing import Any

import pytest

from prfaas.serving.console.alarms import alarms_of
from prfaas.serving.console.changes import changes_between
from prfaas.serving.console.history import StateHistory
from prfaas.serving.console.samples import instances_in, sample_of

Json = dict[str, Any]


def instance(role: str = "decode", **facts: Any) -> Json:
    return {
        "role": role,
        "draining": False,
        "healthy": True,
        "drain": None,
        "suspicion": None,
        "age_s": 0.1,
        "engine": {"running": 1, "waiting": 0, "kv_usage": 0.5, "output_tokens": 3.0},
        "events": {"gaps": 0},
    } | facts


def state() -> Json:
    """A deployment with nothing to complain of, in the form of `state_of`."""
    return {
        "clusters": {
            "far": {"kind": "prfaas", "hardware": "any", "instances": {"far-0": instance("prefill")}},
            "pd": {
                "kind": "pd",
                "hardware": "any",
                "threshold_tokens": 4000.0,
                "threshold_held": False,
                "instances": {"pd-0": instance(), "pd-1": instance("prefill")},
            },
        },
        "links": {
            "far->pd": {
                "source": "far",
                "target": "pd",
                "up": True,
                "condition": "clear",
                "drain_s": 0.0,
                "carried_bytes": 7,
            }
        },
        "pools": {"far-pool": {"cluster": "far", "up": True, "daemon": {"wrong_pages": 0, "epoch": 3}}},
        "incompatible": [],
        "routes": {"offload": {"long": 3}},
        "requests": {"routed": 3},
        "index": {"blocks": 5},
    }


def put(whole: Json, path: str, value: Any) -> Json:
    """A copy with another value at a path, its steps separated by slashes."""
    changed = copy.deepcopy(whole)
    *steps, last = path.split("/")
    place = changed
    for step in steps:
        place = place[step]
    place[last] = value
    return changed


PD_0 = "clusters/pd/instances/pd-0"
PD_1 = "clusters/pd/instances/pd-1"


def test_a_frame_has_what_is_drawn_and_nothing_else() -> None:
    frame = sample_of(state(), 12.3456)
    assert frame["at_s"] == 12.346
    assert frame["clusters"]["pd"]["instances"]["pd-0"]["kv_usage"] == 0.5
    assert "events" not in frame["clusters"]["pd"]["instances"]["pd-0"]
    assert frame["pools"]["far-pool"] == {"cluster": "far", "up": True, "wrong_pages": 0}
    assert "carried_bytes" not in frame["links"]["far->pd"] and "index" not in frame
    assert list(instances_in(frame)) == ["far-0", "pd-0", "pd-1"]


def test_a_control_plane_that_tells_less_has_frames_too() -> None:
    least = {"clusters": {"pd": {"instances": {"a": {"role": "decode", "healthy": True, "drain": None}}}}}
    frame = sample_of(least, 1.0)
    assert frame["links"] == {} and alarms_of(frame) == []


@pytest.mark.parametrize(
    ("path", "value", "kind", "severity"),
    [
        (f"{PD_0}/age_s", 5.5, "silent", "warning"),
        (f"{PD_0}/engine/kv_usage", 0.96, "kv-full", "warning"),
        (f"{PD_1}/healthy", False, "down", "critical"),
        (f"{PD_0}/drain", "draining", "no-decode", "critical"),
        ("served", {"now": {"ended": 1000, "refused": 3, "failed": 0}}, "refused", "warning"),
        ("served", {"now": {"ended": 10, "refused": 0, "failed": 3}}, "failed", "critical"),
        ("links/far->pd/up", False, "link-down", "critical"),
        ("links/far->pd/condition", "congested", "link-condition", "warning"),
        ("links/far->pd/drain_s", 5.1, "link-queue", "warning"),
        ("pools/far-pool/up", False, "pool-down", "warning"),
        ("pools/far-pool/daemon/wrong_pages", 2, "wrong-pages", "warning"),
        (
            "incompatible",
            [{"producer": "a", "consumer": "b", "reason": "other pages"}],
            "incompatible",
            "warning",
        ),
    ],
)
def test_alarms(path: str, value: Any, kind: str, severity: str) -> None:
    assert alarms_of(sample_of(state(), 1.0)) == []
    (alarm,) = alarms_of(sample_of(put(state(), path, value), 1.0))
    assert (alarm.kind, alarm.severity) == (kind, severity)
    assert alarm.what.endswith(".")


@pytest.mark.parametrize("condition", ["clear", "busy"])
def test_a_link_that_works_is_no_alarm(condition: str) -> None:
    assert alarms_of(sample_of(put(state(), "links/far->pd/condition", condition), 1.0)) == []


def test_requests_are_only_said_to_be_refused_where_nothing_can_decode() -> None:
    """A prefill instance of a PD cluster stands in."""
    drained = put(state(), f"{PD_0}/drain", "drained")
    (alarm,) = alarms_of(sample_of(drained, 1.0))
    assert "refused" not in alarm.what
    alarms = alarms_of(sample_of(put(drained, f"{PD_1}/drain", "drained"), 1.0))
    assert [alarm.kind for alarm in alarms] == ["no-decode"] and "refused" in alarms[0].what


def test_critical_alarms_come_first() -> None:
    worse = put(put(state(), f"{PD_1}/age_s", 60.0), "links/far->pd/up", False)
    assert [alarm.severity for alarm in alarms_of(sample_of(worse, 1.0))] == ["critical", "warning"]


@pytest.mark.parametrize(
    ("path", "value", "kind", "words"),
    [
        ("clusters/pd/threshold_tokens", 6000.0, "threshold", "from 4,000 tokens to 6,000 tokens"),
        ("clusters/pd/threshold_tokens", None, "threshold", "to never"),
        ("clusters/pd/threshold_held", True, "threshold", "held by an operator"),
        (f"{PD_1}/role", "decode", "role", "pd-1 changed from prefill to decode"),
        (f"{PD_1}/draining", True, "role", "pd-1 drains"),
        (f"{PD_1}/healthy", False, "health", "pd-1 left routing"),
        (f"{PD_1}/drain", "drained", "drain", "pd-1 is drained"),
        ("links/far->pd/up", False, "link", "far->pd went down"),
        ("links/far->pd/condition", "slow", "link", "from clear to slow"),
        ("pools/far-pool/up", False, "pool", "far-pool went down"),
        ("clusters/pd/instances/pd-2", instance(), "member", "pd-2 joined"),
    ],
)
def test_changes(path: str, value: Any, kind: str, words: str) -> None:
    before, after = sample_of(state(), 1.0), sample_of(put(state(), path, value), 2.0)
    assert changes_between(before, before) == []
    (change,) = changes_between(before, after)
    assert (change.kind, change.at_s) == (kind, 2.0)
    assert words in change.what


def test_a_link_between_clear_and_busy_has_not_changed() -> None:
    before = sample_of(state(), 1.0)
    assert changes_between(before, sample_of(put(state(), "links/far->pd/condition", "busy"), 2.0)) == []


class Recorded:
    """A history of a state that the test changes."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        self.told = state()
        self.history = StateHistory(lambda: self.told, wall_clock=lambda: self.now_s, **options)

    def take(self, told: Json | None = None) -> Json:
        self.told, self.now_s = told or self.told, self.now_s + 1
        return self.history.take()

    def document(self, **query: int) -> Json:
        found: Json = json.loads(self.history.document(**query))
        return found


def test_an_alarm_says_since_when_and_that_it_ended() -> None:
    recorded = Recorded()
    assert recorded.take()["alarms"] == []
    down = put(state(), "links/far->pd/up", False)
    recorded.take(down)
    (alarm,) = recorded.take(down)["alarms"]
    assert alarm["since_s"] == 102.0
    assert recorded.take(state())["alarms"] == []
    changes = recorded.document()["changes"]
    assert [change["kind"] for change in changes] == ["link", "alarm", "link", "alarm"]
    assert changes[1]["what"] == "Alarm: The link far->pd is not used."
    assert "has ended" in changes[3]["what"]
    # Each stands in the frame that saw it as well.
    assert [len(frame["changes"]) for frame in recorded.document()["frames"]] == [0, 2, 0, 2]


def test_a_thinned_history_ends_with_the_newest_frame() -> None:
    recorded = Recorded()
    for _ in range(10):
        recorded.take()
    assert [frame["number"] for frame in recorded.document(step=4)["frames"]] == [2, 6, 10]
    assert [frame["number"] for frame in recorded.document(after=8)["frames"]] == [9, 10]
    assert recorded.document(after=10)["frames"] == []


def test_it_is_bounded_in_bytes_and_in_time() -> None:
    recorded = Recorded(kept_bytes=8000)
    for _ in range(100):
        recorded.take()
    document = recorded.history.document()
    assert len(document) < 9000 and recorded.document()["frames"][-1]["number"] == 100
    long = Recorded()
    for _ in range(905):
        long.take()
    numbers = [frame["number"] for frame in long.document()["frames"]]
    assert numbers == list(range(6, 906))


def test_followers_get_every_frame_once() -> None:
    async def main() -> None:
        recorded = Recorded()
        recorded.take()
        got: list[int] = []

        async def follow(after: int) -> None:
            async for entry in recorded.history.follow(after):
                got.append(entry.number)
                assert json.loads(entry.data)["number"] == entry.number

        task = asyncio.create_task(follow(0))
        for _ in range(3):
            await asyncio.sleep(0)
            recorded.take()
            recorded.take()
        await asyncio.sleep(0.01)
        task.cancel()
        assert got == list(range(1, 8))

    asyncio.run(main())


def test_who_leaves_is_not_said_to_be_drained_by_an_operator() -> None:
    before, leaving, idle, gone = state(), state(), state(), state()
    for each, drain in ((leaving, "draining"), (idle, "drained")):
        each["applied"] = {"leaving": ["pd-0"]}
        each["clusters"]["pd"]["instances"]["pd-0"] = instance(drain=drain)
    del gone["clusters"]["pd"]["instances"]["pd-0"]
    frames = [sample_of(each, at_s) for at_s, each in enumerate((before, leaving, idle, gone))]
    told = [[change.what for change in changes_between(*pair)] for pair in itertools.pairwise(frames)]
    assert told == [
        ["pd-0 is not in the file any more, and leaves when its work has ended."],
        [],
        ["pd-0 left."],
    ]
    assert [change.what for change in changes_between(frames[2], frames[0])] == ["pd-0 takes part again."]
