"""Machines of sites: each has a network, a hostname, processes, /etc, /opt, /run and /var/lib of its own.

They are Linux namespaces without names, held by the first process of each machine. It ends with the test's process, and
takes everything on the machine with it, so nothing can be left behind. Sites are bridges, joined by one line.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import prfaas

SYSTEMD = Path(__file__).with_name("stand_in_systemd.py")
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "useradd", "mount", "curl")
_SUPERVISED = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--net")
_MACHINE = ("--mount", "--mount-proc", "--pid", "--uts")
# What a machine changes in these folders is in its own memory.
_OWN_FOLDERS = """\
mount -t tmpfs tmpfs /run
for folder in /etc /opt /var/lib; do
    mkdir -p /run/own$folder/upper /run/own$folder/work
    mount -t overlay overlay -o lowerdir=$folder,upperdir=/run/own$folder/upper,workdir=/run/own$folder/work $folder
done
"""
_START_S = 60.0


def missing() -> str | None:
    """What this computer or user lacks for machines, as a sentence; None: nothing."""
    if os.geteuid() != 0:
        return "machines of the guide need root: they are namespaces"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"machines of the guide need the command {tool}, which is not here"
    script = f"{_OWN_FOLDERS}ip link add type bridge\nip link add type veth"
    tried = subprocess.run(
        [*_SUPERVISED, *_MACHINE, "sh", "-ec", script], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"machines of the guide need namespaces, overlays and bridges: {tried.stderr.strip()}"
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, on which commands can be typed."""

    name: str
    address: str
    folder: Path
    """Where its operator types."""
    journals: Path
    pid: int
    """Of its first process, as it is seen from outside."""
    path: str
    """Where its shells look for commands."""

    def typed(self, shell: str, *, home: Path | None = None, limit_s: float = 600.0) -> str:
        """What commands print. They must end well; the first that does not ends them."""
        done = subprocess.run(
            self._command(shell, home), capture_output=True, text=True, timeout=limit_s, check=False
        )
        assert done.returncode == 0, f"on {self.name}:\n{shell}\n{done.stdout}\n{done.stderr}\n{self.told()}"
        return done.stdout

    def begun(self, shell: str) -> "subprocess.Popen[bytes]":
        """Commands that go on until the machine ends."""
        with (self.journals / "typed.txt").open("ab") as journal:
            return subprocess.Popen(
                self._command(shell, None), stdin=subprocess.DEVNULL, stdout=journal, stderr=journal
            )

    def told(self) -> str:
        """How what its services have said ends."""
        return "\n".join(
            f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.journals.iterdir())
        )

    def _command(self, shell: str, home: Path | None) -> list[str]:
        given = [f"PATH={self.path}", *([] if home is None else [f"HOME={home}"])]
        inside = ("--target", str(self.pid), "--net", "--mount", "--pid", "--uts", f"--wdns={self.folder}")
        return ["nsenter", *inside, "env", "-u", "PYTHONPATH", *given, "sh", "-ec", shell]


class Country:
    """Sites in a row, with a line between each two neighbours, and machines that can be added. A context manager."""

    def __init__(self, folder: Path, sites: Sequence[str]) -> None:
        """`folder`: where everything is kept that machines write for their operators."""
        self._folder = folder
        self._sites = tuple(sites)
        self._tools = folder / "tools"
        self._count = 0

    def __enter__(self) -> Self:
        self._write_tools()
        with ExitStack() as stack:
            self._stack = stack
            self._between = self._started(_SUPERVISED, "sleep", "infinity")
            for site in self._sites:
                self._wire(f"link add at-{site} up type bridge")
            for here, there in zip(self._sites, self._sites[1:], strict=False):
                self._wire(f"link add to-{there} up master at-{here} type veth peer name to-{here}")
                self._wire(f"link set to-{here} up master at-{there}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def machine(self, site: str, name: str, address: str) -> Machine:
        """A further machine, whose address can be reached from all others. prfaas is installed, and nothing else."""
        folder, journals = self._folder / name, self._folder / f"{name}-journals"
        folder.mkdir()
        journals.mkdir()
        script = (
            f"{_OWN_FOLDERS}"
            f"hostname {shlex.quote(name)}\n"
            "mkdir -p /opt/prfaas/bin\n"
            f"cp {shlex.quote(str(self._tools / 'prfaas'))} /opt/prfaas/bin/\n"
            f"exec {shlex.quote(sys.executable)} {shlex.quote(str(SYSTEMD))} {shlex.quote(str(journals))}\n"
        )
        pid = self._started((*_SUPERVISED, *_MACHINE), "sh", "-ec", script)
        self._count += 1
        end = f"machine{self._count}"
        self._wire(f"link add {end} up master at-{site} type veth peer name eth0 netns {pid}")
        self._wire("link set lo up", pid)
        self._wire(f"address add {address}/32 dev eth0", pid)
        self._wire("link set eth0 up", pid)
        self._wire("route add default dev eth0", pid)
        _until((journals / "supervisor.txt").exists, f"the supervisor of {name} is not there")
        path = f"/opt/prfaas/bin:{self._tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return Machine(name, address, folder, journals, pid, path)

    def _write_tools(self) -> None:
        self._tools.mkdir()
        python = shlex.quote(sys.executable)
        source = shlex.quote(str(Path(prfaas.__file__).parents[1]))
        for name, line in (
            ("prfaas", f"PYTHONPATH={source} exec {python} -m prfaas.cli.main"),
            ("systemctl", f"exec {python} {shlex.quote(str(SYSTEMD))} systemctl"),
        ):
            tool = self._tools / name
            tool.write_text(f'#!/bin/sh\n{line} "$@"\n')
            tool.chmod(0o755)

    def _started(self, namespaces: Sequence[str], *command: str) -> int:
        """The number of a command's process in namespaces of its own."""
        outer = self._stack.enter_context(
            subprocess.Popen([*namespaces, *command], stdin=subprocess.DEVNULL, start_new_session=True)
        )
        self._stack.callback(outer.kill)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        _until(lambda: bool(children.read_text()), f"{shlex.join(command)} did not start")
        return int(children.read_text())

    def _wire(self, words: str, pid: int | None = None) -> None:
        """`ip` on a machine, or in the network between them."""
        inside = f"--target={self._between if pid is None else pid}"
        subprocess.run(["nsenter", inside, "--net", "ip", *words.split()], check=True)


def _until(happened: Callable[[], bool], problem: str) -> None:
    until_s = time.monotonic() + _START_S
    while not happened():
        assert time.monotonic() < until_s, problem
        time.sleep(0.01)
