"""A stand-in for systemd: what the emitted units use of it, as the first process of a machine in a container.

`stand_in_systemd.py JOURNALS` is the supervisor, `stand_in_systemd.py systemctl …` the command. It starts, restarts and
stops services as their units say. It does not change users and hardens nothing: `systemd-analyze verify` checks those
lines in another test.
"""

import asyncio
import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

UNITS = Path("/etc/systemd/system")
SOCKET = Path("/run/stand-in-systemd")
ANSWER_S = 120.0

Sections = dict[str, dict[str, list[str]]]


class RefusedError(Exception):
    """What systemctl says, and then ends with 1."""


def read_unit(name: str) -> Sections:
    try:
        lines = (UNITS / name).read_text().splitlines()
    except FileNotFoundError:
        raise RefusedError(f"Unit {name} not found.") from None
    found: Sections = {}
    for line in lines:
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), defaultdict(list))
        elif line:
            field, _, value = line.partition("=")
            section[field].append(value)
    return found


class Service:
    """One service that is started, and again after it has ended by itself."""

    def __init__(self, name: str, unit: Sections, journal: Path) -> None:
        self.name = name
        self._unit, self._service = unit["Unit"], unit["Service"]
        self._journal = journal
        self.process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def last(self, field: str) -> str:
        return self._service[field][-1]

    async def start(self) -> None:
        if self._task is not None:
            return
        for path in self._unit["AssertPathExists"]:
            if not Path(path).exists():
                raise RefusedError(f"Assertion failed on job for {self.name}: {path} is missing.")
        await self._spawn()
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        assert self.process is not None
        if self.process.returncode is None:
            await self._before_stop()
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), float(self.last("TimeoutStopSec")))
            except TimeoutError:
                self._kill_all()
                await self.process.wait()
        self._kill_all()

    async def _before_stop(self) -> None:
        for command in self._service.get("ExecStop", ()):
            with self._journal.open("ab") as journal:
                done = await asyncio.create_subprocess_exec(
                    *shlex.split(command.removeprefix("-")),
                    env=self._environment(),
                    cwd="/",
                    stdout=journal,
                    stderr=journal,
                )
            await done.wait()

    async def reload(self) -> None:
        assert self.process is not None
        command = self.last("ExecReload").replace("$MAINPID", str(self.process.pid))
        done = await asyncio.create_subprocess_exec(*shlex.split(command))
        if await done.wait():
            raise RefusedError(f"Job for {self.name} failed.")

    def _environment(self) -> dict[str, str]:
        said = dict(pair.split("=", 1) for line in self._service["Environment"] for pair in line.split())
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **said}

    async def _spawn(self) -> None:
        # A container's root may not raise it.
        limit = min(int(self.last("LimitNOFILE")), resource.getrlimit(resource.RLIMIT_NOFILE)[1])

        def before() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            os.umask(int(self.last("UMask"), 8))

        with self._journal.open("ab") as journal:
            self.process = await asyncio.create_subprocess_exec(
                *shlex.split(self.last("ExecStart")),
                env=self._environment(),
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=journal,
                stderr=journal,
                start_new_session=True,
                preexec_fn=before,
            )

    async def _supervise(self) -> None:
        while True:
            assert self.process is not None
            await self.process.wait()
            self._kill_all()
            assert self.last("Restart") == "always"
            await asyncio.sleep(float(self.last("RestartSec")))
            await self._spawn()

    def _kill_all(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """All services of one machine."""

    def __init__(self, journals: Path) -> None:
        self._journals = journals
        self._services: dict[str, Service] = {}
        self._is_read = False

    async def serve(self) -> None:
        await asyncio.start_unix_server(self._answer, SOCKET)
        (self._journals / "supervisor.txt").touch()
        await asyncio.Event().wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = json.loads(await reader.readline())
        try:
            said, code = await self._do(words), 0
        except RefusedError as error:
            said, code = str(error), 1
        writer.write(json.dumps([said, code]).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _do(self, words: Sequence[str]) -> str:
        options = [word for word in words if word.startswith("-")]
        verb, *names = [word for word in words if not word.startswith("-")]
        if verb == "daemon-reload":
            self._is_read = True
            return ""
        if not self._is_read:
            raise RefusedError("Units are not read yet; run systemctl daemon-reload.")
        if verb in ("enable", "disable") and "--now" not in options:
            raise RefusedError(f"systemctl {verb} without --now starts and stops nothing.")
        for name in names:
            for service in self._services_of(name):
                await self._act(verb, service, options)
        return ""

    async def _act(self, verb: str, service: Service, options: Sequence[str]) -> None:
        if verb in ("enable", "start"):
            await service.start()
        elif verb in ("disable", "stop"):
            await service.stop()
        elif verb == "restart":
            await service.stop()
            # Units may have changed since.
            await self._service(service.name, anew=True).start()
        elif verb == "reload":
            await service.reload()
        elif verb == "kill":
            assert service.process is not None
            named = next((each.partition("=")[2] for each in options if each.startswith("--signal=")), "TERM")
            service.process.send_signal(signal.Signals[f"SIG{named.removeprefix('SIG')}"])
        else:
            raise RefusedError(f"Unknown command verb {verb}.")

    def _services_of(self, name: str) -> list[Service]:
        if not name.endswith(".target"):
            return [self._service(name)]
        wanted = [each for line in read_unit(name)["Unit"]["Wants"] for each in line.split()]
        return [self._service(each) for each in wanted]

    def _service(self, name: str, anew: bool = False) -> Service:
        name = name if name.endswith(".service") else f"{name}.service"
        if anew or name not in self._services:
            self._services[name] = Service(name, read_unit(name), self._journals / f"{name}.txt")
        return self._services[name]


def ask(words: Sequence[str]) -> int:
    """Be `systemctl`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(SOCKET))
        connection.sendall(json.dumps(words).encode() + b"\n")
        said, code = json.loads(connection.makefile().readline())
    if said:
        print(said, file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    if sys.argv[1] == "systemctl":
        sys.exit(ask(sys.argv[2:]))
    asyncio.run(Supervisor(Path(sys.argv[1])).serve())
