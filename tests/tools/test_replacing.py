"""What a rollout says and leaves behind when an engine is not as it was; engines and gateway are made up."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment import Deployment, Instance, load_deployment
from prfaas.serving.engines.preparation import ensure_certificates
from prfaas.serving.secret_files import create_key
from prfaas.tools.rollout import Replaced, Rollout, RolloutError, RolloutRecord, RolloutSettings, replace_all

NAMES = ("d-0", "d-1", "g-0", "g-1")


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """Two engines that decode, and a group of two ranks."""
    ports = iter(range(20_000, 21_000, 10))

    def instance(name: str, **more: object) -> dict[str, object]:
        at = {"host": "127.0.0.1", "http_port": next(ports), "kv_port": next(ports)}
        return {"name": name, "roles": ["prefill", "decode"], **at, **more}

    group = {"data_parallel": "g", "roles": ["decode"]}
    document = {
        "name": "rolled",
        "model": {"served_name": "m", "tiny": "qwen3", "max_model_len": 4096},
        "clusters": [
            {
                "name": "home",
                "kind": "pd",
                "hardware": "h200",
                "instances": [
                    instance("d-0"),
                    instance("d-1"),
                    instance("g-0", **group),
                    instance("g-1", **group),
                ],
            }
        ],
        "gateway": {"host": "127.0.0.1", "port": next(ports)},
    }
    path = tmp_path / "deployment.yaml"
    path.write_text(json.dumps(document))
    loaded = load_deployment(path, state_dir=tmp_path)
    create_key(loaded.security.key_file)
    ensure_certificates(loaded, list(NAMES))
    return loaded


class Fleet:
    """Engines by their processes' numbers and words, and the gateway before them."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.process: dict[str, int | None] = dict.fromkeys(NAMES, 1)
        self.words: dict[str, str] = dict.fromkeys(NAMES, "forty-two")
        self.next_words: dict[str, str] = {}
        self.never_back: set[str] = set()
        self.drained: set[str] = set()
        self.asked: list[str] = []
        self.late_looks = 0
        self.open = dict.fromkeys(NAMES, 0)

    def ask(self, path: str, method: str) -> dict[str, Any]:
        if method == "GET":
            told = {
                name: {
                    "role": "decode",
                    "healthy": self.process[name] is not None,
                    "in_flight": self.open[name],
                    "suspicion": None,
                    "drain": None
                    if name not in self.drained
                    else "draining"
                    if self.open[name]
                    else "drained",
                }
                for name in NAMES
            }
            late, self.late_looks = self.late_looks > 0, self.late_looks - 1
            others = {"a": {"out": []}, "b": {"out": ["d-0"] if late else []}}
            return {"clusters": {"home": {"instances": told}}, "fleet": {"members": others}}
        *_, name, what = path.split("/")
        self.asked.append(f"{what} {name}")
        together = ("g-0", "g-1") if name.startswith("g") else (name,)
        for each in together:
            if what == "drain":
                self.drained.add(each)
            elif what == "undrain":
                self.drained.discard(each)
            else:
                self.process[each] = None if each in self.never_back else len(self.asked) + 1
                self.words |= {each: self.next_words.get(each, self.words[each])}
        return {}

    def roll(self, names: Sequence[str] | None = (), **settings: Any) -> list[Replaced]:
        done: list[Replaced] = []
        asyncio.run(
            replace_all(self.deployment, self.ask, RolloutSettings(**settings), names, done, lambda _: None)
        )
        return done


@pytest.fixture
def fleet(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    made = Fleet(deployment)

    async def session(_self: Rollout, instance: Instance) -> str | None:
        number = made.process[instance.name]
        return None if number is None else str(number)

    async def answer(_self: Rollout, instance: Instance) -> str | None:
        return None if made.process[instance.name] is None else made.words[instance.name]

    monkeypatch.setattr(Rollout, "_session_of", session)
    monkeypatch.setattr(Rollout, "_answer", answer)
    yield made


def test_groups_are_replaced_as_one(fleet: Fleet) -> None:
    done = fleet.roll()
    assert [each.instances for each in done] == [("d-0",), ("d-1",), ("g-0", "g-1")]
    assert {each.answer for each in done} == {"as before"} and fleet.drained == set()
    assert fleet.asked[-3:] == ["drain g-0", "restart g-0", "undrain g-0"]
    assert not (fleet.deployment.home / "rollout.json").exists()


def test_another_answer_ends_it_and_resume_goes_on(fleet: Fleet) -> None:
    fleet.next_words["d-1"] = "41"
    with pytest.raises(
        RolloutError, match=r"d-1 was not replaced: .* '41', not with 'forty-two'; say --new-answers"
    ):
        fleet.roll()
    assert fleet.drained == {"d-1"} and fleet.process["g-0"] == 1
    # Its old words are forgotten with its old process: it is compared with what it says now.
    fleet.process["d-1"] = None
    with pytest.raises(RolloutError, match="d-1 was not replaced"):
        fleet.roll(None)
    done = fleet.roll(None, new_answers=True)
    assert [each.instances[0] for each in done] == ["d-1", "g-0"] and fleet.drained == set()
    with pytest.raises(RolloutError, match=r"nothing to go on with: .*rollout.json is not there"):
        fleet.roll(None)


def test_who_was_away_is_compared_with_another(fleet: Fleet) -> None:
    fleet.process["d-0"] = None
    assert fleet.roll(["d-0"])[0].answer == "as another"


def test_who_does_not_come_back_is_named(fleet: Fleet) -> None:
    fleet.never_back.add("g-1")
    with pytest.raises(
        RolloutError, match=r"g-1 was not replaced: it does not answer 0.2 s after its restart"
    ):
        fleet.roll(["g-0"], ready_s=0.2)
    with pytest.raises(RolloutError, match=r"its old process still answers 0.2 s after"):
        fleet.roll(["d-0"], ready_s=0.2, command="true {instance}")
    with pytest.raises(RolloutError, match=r"`no-such-program d-0` can't be run: No such file"):
        fleet.roll(["d-0"], command="no-such-program {instance}")
    with pytest.raises(RolloutError, match=r"`sleep 60` has not ended within 0.2 s"):
        fleet.roll(["d-0"], ready_s=0.2, command="sleep 60")


@pytest.mark.parametrize("lost_at", range(7))
def test_a_gateway_that_is_lost_leaves_no_engine_out_unsaid(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, lost_at: int
) -> None:
    """Whichever question is the first that it does not answer."""
    asked, ask = [], fleet.ask

    def lost(path: str, method: str) -> dict[str, Any]:
        asked.append(path)
        if len(asked) > lost_at:
            raise RolloutError("no gateway answers at http://gateway")
        return ask(path, method)

    monkeypatch.setattr(fleet, "ask", lost)
    with pytest.raises(RolloutError, match="no gateway answers") as error:
        fleet.roll()
    said = [name for name in NAMES if f"{name} was not replaced" in str(error.value)]
    assert set(said) >= fleet.drained
    assert bool(said) == ("it is drained" in str(error.value))


def test_what_is_open_after_its_time_goes_on_elsewhere(fleet: Fleet) -> None:
    fleet.open["d-0"] = 3
    assert fleet.roll(["d-0"], drain_s=0.0)[0].left_requests == 3


def test_the_only_one_that_decodes_is_kept(fleet: Fleet) -> None:
    fleet.drained |= {"d-1", "g-0", "g-1"}
    with pytest.raises(RolloutError, match="d-0 is the only engine that decodes"):
        fleet.roll(["d-0"])
    assert fleet.asked == []
    assert len(fleet.roll(["d-0"], with_gap=True)) == 1


def test_a_record_that_is_none(fleet: Fleet) -> None:
    path = fleet.deployment.home / "rollout.json"
    for content in (b"", b"[]", b'{"instances": 3}', b'{"instances": [1], "done": []}'):
        path.write_bytes(content)
        with pytest.raises(RolloutError, match="is no record of a rollout; leave --resume out"):
            RolloutRecord.load(path)


def test_the_next_waits_until_all_gateways_have_this_one(fleet: Fleet) -> None:
    fleet.late_looks = 3
    done = fleet.roll(["d-0"])
    # One look before the drain, one after it, and two until the other gateway sends it work again.
    assert fleet.late_looks == -1 and len(done) == 1
    fleet.late_looks = 1 << 30
    with pytest.raises(
        RolloutError, match="not all gateways take it in: it is drained, or another gateway waits"
    ):
        fleet.roll(["d-0"], ready_s=0.2)
