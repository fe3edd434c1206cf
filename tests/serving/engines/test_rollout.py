"""`prfaas rollout` and `prfaas drain --as-engine` on a running `prfaas up`: nobody who asks notices."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from synthetic_world import random_ids, running, write_deployment
from test_reload import Load, instances, prfaas
from test_up import Up, running_up

from prfaas.core.deployment import Deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return write_deployment(tmp_path)


def rollout(up: Up, *words: str) -> tuple[int, list[str], str]:
    """The exit code, who was replaced, and what was said."""
    said = prfaas(up, "rollout", str(up.deployment.path), *words, "--ready-timeout", "60", "--json")
    told = json.loads(said.stdout)
    assert (told["failed"] is None) == (said.returncode == 0)
    return said.returncode, [name for each in told["replaced"] for name in each["instances"]], said.stderr


def drains(up: Up) -> dict[str, str]:
    return {name: each["drain"] for name, each in instances(up).items() if each["drain"]}


@pytest.mark.slow("starts a whole deployment, whose engines are replaced under load")
def test_engines_are_replaced_under_load(deployment: Deployment) -> None:
    with running_up(deployment) as up:
        load = Load(deployment)
        try:
            load.more()
            # 1. A command that fails stops it at the first: that one is drained, and the next was left alone.
            code, done, said = rollout(
                up, "home-0", "far-0", "--command", "sh -c 'echo {cluster} is away; exit 3'"
            )
            assert (code, done) == (2, []) and "ended with exit code 3: home is away; it is drained" in said
            up.await_true(lambda: drains(up) == {"home-0": "drained"})
            # 2. It goes on from there. The process that has started the engines restarts them.
            code, done, said = rollout(up, "--resume")
            assert (code, done, drains(up)) == (0, ["home-0", "far-0"], {}), said
            assert "home-0: draining" in said and "far-0: takes part again after" in said
            assert rollout(up, "--resume")[2].count("nothing to go on with: ") == 1
            # 3. Who says that it is to end is left alone by the gateway, until its next process answers.
            left = prfaas(up, "drain", "home-1", str(deployment.path), "--as-engine", "--wait", "60")
            assert (left.returncode, left.stdout) == (0, "home-1 is drained\n"), left.stderr
            up.await_true(lambda: drains(up) == {"home-1": "drained"})
            prfaas(up, "undrain", "home-1", str(deployment.path))
            up.await_true(lambda: drains(up) == {"home-1": "drained"})
            # 4. The only one that decodes is kept.
            prfaas(up, "drain", "other-0", str(deployment.path))
            code, done, said = rollout(up, "home-0")
            assert (code, done) == (2, []) and "home-0 is the only engine that decodes" in said
            assert "home-0" not in drains(up)
            prfaas(up, "undrain", "other-0", str(deployment.path))
            code, done, said = rollout(up, "home-1")
            assert (code, done, drains(up)) == (0, ["home-1"], {}), said
            load.more()
        finally:
            load.end()
        assert load.failures == [], load.failures[:3]


def test_an_engine_that_is_away_has_nothing_to_leave(deployment: Deployment) -> None:
    up = Up(deployment, None, deployment.path)  # type: ignore[arg-type]
    said = prfaas(up, "drain", "home-1", str(deployment.path), "--as-engine")
    assert said.returncode == 2 and "home-1 has not been told at 127.0.0.1:" in said.stderr


@pytest.mark.parametrize("within_s", [60.0, 0.0])
def test_a_stand_in_ends_as_vllm_does(tmp_path: Path, within_s: float) -> None:
    """What runs goes on for its time, and what is new is refused."""

    async def main() -> None:
        async with running(write_deployment(tmp_path, speedup=20.0), "home-0") as world:
            node = world.nodes["home-0"]
            request = asyncio.create_task(
                world.complete("home-0", random_ids(500, 1), max_tokens=60 if within_s else 5000)
            )
            while not node.engine.counts.running:
                await asyncio.sleep(0.01)
            ending = asyncio.create_task(node.end(within_s))
            await asyncio.sleep(0)
            if within_s:
                refused = await world.complete("home-0", random_ids(500, 2))
                assert refused.status == 500 and "after shutdown" in refused.body["error"]["message"]
                assert len((await request).ids) == 60
            else:
                with pytest.raises(aiohttp.ClientError):
                    await request
            await ending
            assert node.gone.is_set()

    asyncio.run(main())
