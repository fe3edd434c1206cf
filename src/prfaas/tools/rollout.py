"""Replaces the engines of a running deployment one after the other, without losing a request."""

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import msgspec

from prfaas.core.bounded_file import WRITTEN_BYTES, file_bytes
from prfaas.core.deployment import TOOLS, Deployment, Instance
from prfaas.serving.certificates import https_options, identity_of
from prfaas.serving.engines.engine_units import unit_name, units_of
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.secret_files import load_key
from prfaas.tools.http_client import post_json

_LOOK_EVERY_S = 0.5
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_CONNECT_S = 6.0
# Shorter than a block: no cache has a part of it, before or after.
_PROMPT = "Seven times six is"
_ANSWER_TOKENS = 12
_MESSAGE_CHARACTERS = 300

State = Mapping[str, Any]
Ask = Callable[[str, str], State]
"""A page of the gateway's operators, by path and method. Raises RolloutError where the gateway does not answer so."""


class RolloutError(Exception):
    """An engine was not replaced. The text is one sentence that says why, and how to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How engines are replaced."""

    command: str | None = None
    """The operator's own, with {instance}, {host} and {cluster}; None: the gateway's process has started them."""
    drain_s: float = 60.0
    """What is open after that goes on at another engine."""
    ready_s: float = 1200.0
    """A new process must answer within that time."""
    with_gap: bool = False
    """Also the only engine that decodes: requests are refused meanwhile."""
    new_answers: bool = False
    """The answer may be another one than before: another model, or another version."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """An engine, or the ranks of a group, that was replaced."""

    instances: tuple[str, ...]
    left_requests: int
    """That were still open when its time was over."""
    drain_s: float
    away_s: float
    """From the restart until it took part again."""
    answer: Literal["as before", "as another", "not compared"]


class RolloutRecord(msgspec.Struct):
    """How far a rollout has come: what `--resume` goes on from. It is kept until all is done."""

    instances: list[str]
    done: list[str] = []

    @classmethod
    def load(cls, path: Path) -> Self:
        """That of the last rollout, which did not come to its end. Raises RolloutError where there is none."""
        try:
            return msgspec.json.decode(file_bytes(path, WRITTEN_BYTES), type=cls)
        except (FileNotFoundError, ValueError, RecursionError) as error:
            why = "is not there" if isinstance(error, FileNotFoundError) else "is no record of a rollout"
            raise RolloutError(f"nothing to go on with: {path} {why}; leave --resume out") from None

    def save(self, path: Path) -> None:
        """Write it, or take it away when all is done."""
        if self.done == self.instances:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(msgspec.json.encode(self))


async def replace_all(
    deployment: Deployment,
    ask: Ask,
    settings: RolloutSettings,
    names: Sequence[str] | None,
    done: list[Replaced],
    tell: Callable[[str], None],
) -> None:
    """Replace engines one after the other; the first that fails ends it.

    Args:
        deployment: that runs.
        ask: its gateway.
        settings: of this rollout.
        names: of instances; empty: all; None: those that the last rollout has left.
        done: gets each that was replaced.
        tell: called with what is done now.

    Raises:
        RolloutError: one was not replaced, or there is no rollout to go on with.
        DeploymentError: an instance of that name is not in the file.
        KeyFileError, TlsFileError: the deployment's key, or the tools' certificate, can't be used.
    """
    async with aiohttp.ClientSession(trust_env=False) as session:
        rollout = Rollout(deployment, ask, session, settings, tell)
        path = deployment.home / "rollout.json"
        record = RolloutRecord.load(path) if names is None else None
        units = rollout.units(names or () if record is None else record.instances)
        record = record or RolloutRecord([unit[0].name for unit in units])
        for unit in units:
            if unit[0].name in record.done:
                continue
            record.save(path)
            done.append(await rollout.replace(unit))
            record.done.append(unit[0].name)
        record.save(path)


class Rollout:
    """Replaces engines of one deployment; see `replace`. Make it in a running event loop."""

    def __init__(
        self,
        deployment: Deployment,
        ask: Ask,
        session: aiohttp.ClientSession,
        settings: RolloutSettings,
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            deployment: that runs.
            ask: the gateway; waits for the answer.
            session: for questions to engines.
            settings: of this rollout.
            tell: called with what is done now.

        Raises:
            KeyFileError, TlsFileError: the deployment's key, or the tools' certificate, can't be used.
        """
        self._deployment = deployment
        self._ask_gateway = ask
        self._session = session
        self._settings = settings
        self._tell = tell
        self._out: Instance | None = None
        """It is drained, and does not take part again yet."""
        self._tls = identity_of(deployment, TOOLS)
        self._ports = KvPorts(TOOLS, load_key(deployment.security.key_file), self._tls)

    def units(self, names: Sequence[str]) -> list[tuple[Instance, ...]]:
        """What is replaced together: engines of these names (none: all), and whole groups."""
        instances = self._deployment.instances
        wanted = units_of([self._deployment.instance(name) for name in names] or instances)
        return [tuple(each for each in instances if unit_name(each) == unit) for unit in wanted]

    async def replace(self, unit: Sequence[Instance]) -> Replaced:
        """Drain an engine or a group, restart it, have it answer a question exactly, and let it take part again.

        Raises:
            RolloutError: one of these failed; it takes no part then, unless it was never drained.
        """
        name = unit[0].name
        await self._check_others(unit)
        self._tell(f"{name}: draining")
        began_s = time.monotonic()
        left = await self._drain(unit)
        drained_s = time.monotonic()
        before = {each.name: (await self._session_of(each), await self._answer(each)) for each in unit}
        self._tell(f"{name}: restarting" + (f"; {left} requests go on elsewhere" if left else ""))
        await self._restart(unit)
        found = await asyncio.gather(*(self._until_replaced(each, before[each.name][0]) for each in unit))
        answers = [
            await self._compare(each, answer, before[each.name][1], unit)
            for each, answer in zip(unit, found, strict=True)
        ]
        await self._take_in(unit)
        away_s = time.monotonic() - drained_s
        self._tell(f"{name}: takes part again after {away_s:.0f} s")
        names = tuple(each.name for each in unit)
        return Replaced(names, left, round(drained_s - began_s, 3), round(away_s, 3), answers[0])

    async def _ask(self, path: str, method: str = "GET") -> State:
        try:
            return await asyncio.to_thread(self._ask_gateway, path, method)
        except RolloutError as error:
            raise error if self._out is None else self._failed(self._out, str(error)) from None

    async def _instances(self) -> dict[str, State]:
        """All instances, with `is_in`: whether every gateway of the fleet sends it work. Each judges for itself."""
        state = await self._ask("/prfaas/state")
        gateways = (state["fleet"] or {"members": {}})["members"].values()
        out = {name for each in gateways for name in each["out"]}
        return {
            name: {**each, "is_in": each["healthy"] and each["drain"] is None and name not in out}
            for cluster in state["clusters"].values()
            for name, each in cluster["instances"].items()
        }

    async def _check_others(self, unit: Sequence[Instance]) -> None:
        names = {each.name for each in unit}
        instances = await self._instances()
        decoding = {name for name, each in instances.items() if "decode" in each["role"]}
        others = (instances[name] for name in decoding - names)
        is_served = any(each["is_in"] for each in others)
        if decoding & names and not is_served and not self._settings.with_gap:
            raise RolloutError(
                f"{unit[0].name} is the only engine that decodes, so requests would be refused while it is away; "
                "start another one, or say --with-gap"
            )

    async def _drain(self, unit: Sequence[Instance]) -> int:
        """Returns how many requests are left when the time is over."""
        # One names its group.
        await self._ask(f"/prfaas/instances/{unit[0].name}/drain", "POST")
        self._out = unit[0]
        deadline_s = time.monotonic() + self._settings.drain_s
        while True:
            instances = await self._instances()
            busy = [each.name for each in unit if instances[each.name]["drain"] != "drained"]
            if not busy or time.monotonic() >= deadline_s:
                return sum(max(1, instances[name]["in_flight"]) for name in busy)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _restart(self, unit: Sequence[Instance]) -> None:
        if self._settings.command is None:
            await self._ask(f"/prfaas/instances/{unit[0].name}/restart", "POST")
        else:
            # Ranks of a group wait for each other when they start.
            await asyncio.gather(*(self._run(self._settings.command, each) for each in unit))

    async def _run(self, command: str, instance: Instance) -> None:
        values = {"{instance}": instance.name, "{host}": instance.host, "{cluster}": instance.cluster}
        argv = shlex.split(command)
        for place, value in values.items():
            argv = [word.replace(place, value) for word in argv]
        shown = shlex.join(argv)
        ways = asyncio.subprocess
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=ways.DEVNULL, stdout=ways.PIPE, stderr=ways.STDOUT
            )
        except OSError as error:
            raise self._failed(instance, f"`{shown}` can't be run: {error.strerror or error}") from None
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self._settings.ready_s)
        except TimeoutError:
            process.kill()
            raise self._failed(
                instance, f"`{shown}` has not ended within {self._settings.ready_s:g} s"
            ) from None
        if process.returncode:
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2][:_MESSAGE_CHARACTERS]
            raise self._failed(
                instance, f"`{shown}` ended with exit code {process.returncode}: {last or 'no word'}"
            )

    async def _until_replaced(self, instance: Instance, before: str | None) -> str:
        """Wait until a new process answers; returns its answer."""
        deadline_s = time.monotonic() + self._settings.ready_s
        session: str | None = None
        while time.monotonic() < deadline_s:
            session = await self._session_of(instance)
            if session not in (None, before) and (answer := await self._answer(instance)) is not None:
                return answer
            await asyncio.sleep(_LOOK_EVERY_S)
        why = (
            "it does not answer" if session is None or session != before else "its old process still answers"
        )
        raise self._failed(instance, f"{why} {self._settings.ready_s:g} s after its restart")

    async def _compare(
        self, instance: Instance, answer: str, before: str | None, unit: Sequence[Instance]
    ) -> Literal["as before", "as another", "not compared"]:
        """Who was away before is compared with another engine of its cluster."""
        if self._settings.new_answers:
            return "not compared"
        told = [before]
        if before is None:
            others = (each for each in self._deployment.instances if each.cluster == instance.cluster)
            told = await asyncio.gather(*(self._answer(each) for each in others if each not in unit))
        expected = next((each for each in told if each is not None), None)
        if expected not in (None, answer):
            raise self._failed(
                instance,
                f'after "{_PROMPT}" it goes on with {answer!r}, not with {expected!r}; '
                "say --new-answers if that is meant",
            )
        return "not compared" if expected is None else "as another" if before is None else "as before"

    async def _take_in(self, unit: Sequence[Instance]) -> None:
        await self._ask(f"/prfaas/instances/{unit[0].name}/undrain", "POST")
        deadline_s = time.monotonic() + self._settings.ready_s
        while True:
            instances = await self._instances()
            out = [each for each in unit if not instances[each.name]["is_in"]]
            if not out:
                self._out = None
                return
            if time.monotonic() >= deadline_s:
                why = instances[out[0].name]["suspicion"] or "it is drained, or another gateway waits"
                raise self._failed(out[0], f"not all gateways take it in: {why}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _session_of(self, instance: Instance) -> str | None:
        """Of an engine's process; None where it does not answer."""
        port = self._ports.of_rank(instance, 0)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await port.connect()
                return port.peer_session
        except (OSError, TimeoutError):
            return None
        finally:
            await port.close()

    async def _answer(self, instance: Instance) -> str | None:
        """What an engine adds to a line of text by itself; None where it does not answer."""
        body = {
            "model": self._deployment.model.served_name,
            "prompt": _PROMPT,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        https = https_options(instance, self._tls)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT.total):
                told = await post_json(self._session, f"{instance.url}/v1/completions", body, https=https)
                return str(told["choices"][0]["text"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            return None

    @staticmethod
    def _failed(instance: Instance, why: str) -> RolloutError:
        return RolloutError(
            f"{instance.name} was not replaced: {why}; it is drained, and the others were left alone: mend it, and go "
            "on with --resume"
        )
