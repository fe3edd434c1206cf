"""A file is taken on as a whole or not at all."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prfaas.core.deployment import (
    AppliedDeployment,
    Deployment,
    DeploymentDifference,
    DeploymentError,
    Instance,
    load_deployment,
)
from prfaas.serving.reloading import Reloader, ReloadRefusedError, digest_of

TEXT = """
name: small
model: {served_name: m, tiny: qwen3-next, max_model_len: 4096}
clusters:
  - name: home
    kind: pd
    hardware: h20
    instances:
      - {name: p, roles: [prefill], host: 127.0.0.1, http_port: 8100, kv_port: 8200}
      - {name: d, roles: [decode], host: 127.0.0.1, http_port: 8101, kv_port: 8201}
      - {name: d2, roles: [decode], host: 127.0.0.1, http_port: 8102, kv_port: 8202}
"""
WITHOUT_D2 = "".join(line for line in TEXT.splitlines(keepends=True) if "d2" not in line)
SHADOWED = TEXT + "gateway: {shadow: 0.5}\n"


class Following:
    """Remembers what it was to follow; `breaks`: it can't follow the next."""

    def __init__(self) -> None:
        self.followed: list[AppliedDeployment] = []
        self.breaks = False

    def follow(self, before: AppliedDeployment, applied: AppliedDeployment) -> None:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("a mistake of ours")
        self.followed.append(applied)


class Setting:
    """A deployment with its file, and two that follow it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "deployment.yaml"
        self.file.write_text(TEXT)
        self.deployment = load_deployment(self.file, state_dir=folder)
        self.reloader = Reloader(self.deployment)
        self.first, self.second = Following(), Following()
        for each in (self.first, self.second):
            self.reloader.follow(each)
        self.idle: set[str] = set()
        self.reloader.wait_for(self.idle.__contains__)

    @property
    def served(self) -> Deployment:
        return self.reloader.applied.said


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_all_follow_what_is_taken_on(setting: Setting) -> None:
    setting.file.write_text(SHADOWED)
    outcome = asyncio.run(setting.reloader.reload())
    assert outcome.applied and [change.field for change in outcome.difference.changes] == ["gateway.shadow"]
    assert outcome.digest == digest_of(SHADOWED.encode()) == setting.reloader.applied.digest
    for each in (setting.first, setting.second):
        assert [applied.said.gateway.shadow for applied in each.followed] == [0.5]
    assert not asyncio.run(setting.reloader.reload()).difference


def test_a_check_changes_nothing(setting: Setting) -> None:
    setting.file.write_text(SHADOWED.replace("served_name: m", "served_name: n"))
    outcome = asyncio.run(setting.reloader.reload(apply=False))
    assert not outcome.applied and len(outcome.difference.changes) == 2
    assert outcome.to_json()["changes"][0] == {
        "field": "model.served_name",
        "sentence": 'model.served_name is now "n"; it was "m"',
        "needs": "start the gateway and all engines again",
    }
    assert setting.first.followed == [] and setting.served == setting.deployment


def test_one_field_that_cannot_change_refuses_all(setting: Setting) -> None:
    text = SHADOWED.replace("served_name: m", "served_name: n").replace("http_port: 8102", "http_port: 8103")
    setting.file.write_text(text)
    with pytest.raises(ReloadRefusedError) as refused:
        asyncio.run(setting.reloader.reload())
    assert str(refused.value) == (
        'nothing was changed: model.served_name is now "n"; it was "m", which can\'t change while everything runs: '
        "start the gateway and all engines again; nor can clusters[home].instances[d2].http_port: remove the "
        "instance, and add it under another name"
    )
    assert setting.first.followed == [] and setting.served == setting.deployment


@pytest.mark.parametrize("text", ["name: [", TEXT.replace("kind: pd", "kind: pp"), ""])
def test_a_bad_file_changes_nothing(setting: Setting, text: str) -> None:
    setting.file.write_text(text)
    with pytest.raises(DeploymentError, match=r"deployment\.yaml"):
        asyncio.run(setting.reloader.reload())
    assert setting.first.followed == [] and setting.served == setting.deployment


def test_a_file_that_is_gone_changes_nothing(setting: Setting) -> None:
    setting.file.unlink()
    with pytest.raises(DeploymentError, match="no such file"):
        asyncio.run(setting.reloader.reload())
    assert setting.served == setting.deployment


def test_the_caller_may_say_which_file_it_means(setting: Setting) -> None:
    setting.file.write_text(SHADOWED)
    with pytest.raises(ReloadRefusedError, match="another file than yours"):
        asyncio.run(setting.reloader.reload(expected=digest_of(TEXT.encode())))
    assert setting.first.followed == []
    assert asyncio.run(setting.reloader.reload(expected=digest_of(SHADOWED.encode()))).applied


def test_what_a_check_refuses_is_not_applied(setting: Setting) -> None:
    seen: list[int] = []

    def check(_said: Deployment, difference: DeploymentDifference) -> None:
        seen.append(len(difference.removed))
        raise ReloadRefusedError("no")

    setting.reloader.check(check)
    setting.file.write_text(WITHOUT_D2)
    for apply in (True, False):
        with pytest.raises(ReloadRefusedError, match="no"):
            asyncio.run(setting.reloader.reload(apply=apply))
    assert seen == [1, 1] and setting.first.followed == []


def test_nothing_stays_half_applied(setting: Setting) -> None:
    setting.file.write_text(SHADOWED)
    setting.second.breaks = True
    with pytest.raises(RuntimeError):
        asyncio.run(setting.reloader.reload())
    assert [applied.said.gateway.shadow for applied in setting.first.followed] == [0.5, 0.0]
    assert [applied.said.gateway.shadow for applied in setting.second.followed] == [0.0]
    assert setting.served == setting.deployment


def running(setting: Setting, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        following = asyncio.create_task(setting.reloader.run())
        try:
            async with asyncio.timeout(20):
                await body()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def test_who_leaves_is_forgotten_when_its_work_has_ended(setting: Setting) -> None:
    left: list[Instance] = []
    setting.reloader.on_left(left.append)

    async def body() -> None:
        setting.file.write_text(WITHOUT_D2)
        outcome = await setting.reloader.reload()
        assert outcome.leaving == ("d2",)
        await asyncio.sleep(0.6)
        assert [each.name for each in setting.reloader.applied.leaving] == ["d2"] and not left
        setting.idle.add("d2")
        while not left:
            await asyncio.sleep(0.01)
        assert [each.name for each in left] == ["d2"]
        assert setting.reloader.applied.running == setting.served
        assert [len(applied.running.instances) for applied in setting.second.followed] == [3, 2]

    running(setting, body)


def test_two_reloads_at_once_come_one_after_the_other(setting: Setting) -> None:
    async def body() -> None:
        setting.file.write_text(SHADOWED)
        outcomes = await asyncio.gather(*(setting.reloader.reload() for _ in range(3)))
        assert [len(outcome.difference.changes) for outcome in outcomes] == [1, 0, 0]

    running(setting, body)
