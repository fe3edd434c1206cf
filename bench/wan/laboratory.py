"""A wide-area network on one machine: sites of network namespaces, joined by lines that can be changed while they run.

    sites = {"far": 2, "home": 1}
    line = LineSettings.of_round_trip(200e6, 0.030)
    with Laboratory(sites, line) as laboratory:
        with laboratory.inside("far-0"):
            sock = socket.create_connection((laboratory.address("home-0"), port))
        laboratory.change(rate_bits_per_s=20e6)

The namespaces have no names: they are held by open files of this process and of what was started inside. So nothing of
a laboratory can be left behind, however this process ends. `nsenter --net=/proc/PID/ns/net` looks inside, with the PID
of a process that was started there. It needs root, /dev/net/tun and a C compiler. Only IPv4 passes between namespaces.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prfaas.serving.engines.log_file import LogFile
from prfaas.serving.engines.process_group import ProcessGroup, Watchdog

SOURCE = Path(__file__).with_name("emulator.c")
CLONE_NEWNET = 0x40000000
# Of 1500 bytes of IP, 1448 are payload of TCP with timestamps; on the wire they are 1538.
GOODPUT_SHARE = 1448 / 1538
_STOP_S = 10.0
_ANSWER_S = 10.0
_LOG_BYTES = 64 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class LaboratoryError(Exception):
    """This machine can't have a laboratory, or it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """What one line, from one site to another, does to packets."""

    rate_bits_per_s: float
    """Ethernet's, with 38 bytes of framing per packet. 0: the line stands still, and what is queued stays queued."""
    delay_s: float
    """In one direction, without queueing."""
    queue_bytes: int
    """Packets that find so many bytes waiting are dropped."""
    loss: float = 0.0
    """Probability of each segment to be lost after the queue."""
    blackhole: bool = False
    """Everything that arrives or waits disappears."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate_bits_per_s <= 100e9:
            raise ValueError(f"rate_bits_per_s must be from 0 to 100e9, not {self.rate_bits_per_s:g}")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"delay_s must be from 0 to 10, not {self.delay_s:g}")
        if not 0 <= self.queue_bytes <= 1 << 30:
            raise ValueError(f"queue_bytes must be from 0 to 1 GiB, not {self.queue_bytes}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss must be from 0 to 1, not {self.loss:g}")

    @classmethod
    def of_round_trip(
        cls, rate_bits_per_s: float, rtt_s: float, *, queue: float = 1.0, loss: float = 0.0
    ) -> "LineSettings":
        """A line of half the round trip.

        Args:
            rate_bits_per_s: see the field.
            rtt_s: the round trip over this line and an equal one back, without queueing.
            queue: size of the queue in bandwidth-delay products of the round trip.
            loss: see the field.
        """
        queue_bytes = max(64 << 10, int(queue * rate_bits_per_s / 8 * rtt_s))
        return cls(rate_bits_per_s=rate_bits_per_s, delay_s=rtt_s / 2, queue_bytes=queue_bytes, loss=loss)

    @property
    def goodput_bits_per_s(self) -> float:
        """Payload that TCP can carry over the line at most, in full segments with timestamps."""
        return self.rate_bits_per_s * GOODPUT_SHARE


@dataclass(frozen=True, slots=True)
class LineCounters:
    """What a line has done since the laboratory began. Bytes are those of IP packets."""

    offered_bytes: int
    offered_segments: int
    carried_bytes: int
    carried_segments: int
    lost_segments: int
    """By chance."""
    dropped_segments: int
    """Because the queue was full."""
    blackholed_segments: int
    queued_bytes: int
    """Now."""
    refused_writes: int
    """Packets that a receiving kernel did not take, of all lines."""


class Laboratory:
    """Sites and lines; a context manager. One line leads from each site to each other, for all its namespaces.

    Namespaces are named after their site and number: `{"far": 2}` makes far-0 and far-1. Not thread-safe, except for
    `inside` and `address`.
    """

    def __init__(
        self,
        sites: Mapping[str, int],
        settings: LineSettings,
        *,
        congestion_control: str | None = None,
        burst_s: float = 0.001,
        seed: int = 0,
    ) -> None:
        """Nothing is made yet.

        Args:
            sites: how many namespaces each site has.
            settings: of every line at first.
            congestion_control: of TCP sockets that don't choose their own; None: the machine's default.
            burst_s: segments that the sender handed over together arrive together where the line needs less time
                than this for them; 0: each segment arrives by itself.
            seed: of the random losses.

        Raises:
            LaboratoryError: this machine can't have one; the message says what it lacks.
        """
        problem = missing()
        if problem is not None:
            raise LaboratoryError(problem)
        self._sites = list(sites)
        self._addresses = {
            f"{site}-{number}": f"10.{index + 1}.0.{number + 1}"
            for index, site in enumerate(sites)
            for number in range(sites[site])
        }
        self._settings = {(a, b): settings for a in sites for b in sites if a != b}
        self._congestion_control = congestion_control
        self._burst_s = burst_s
        self._seed = seed
        self._namespaces: dict[str, int] = {}
        self._processes: list[ProcessGroup] = []
        self._emulator: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> Self:
        try:
            for host in self._addresses:
                self._namespaces[host] = _new_namespace()
            self._start_emulator()
            for host in self._addresses:
                self._set_up(host)
            for source, target in self._settings:
                self.change(source, target)
            self._watchdog = Watchdog()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hosts(self) -> Sequence[str]:
        """The names of the namespaces."""
        return tuple(self._addresses)

    def address(self, host: str) -> str:
        """The IPv4 address of a namespace. It has 127.0.0.1 as well."""
        return self._addresses[host]

    @contextlib.contextmanager
    def inside(self, host: str, cpus: Collection[int] | None = None) -> Iterator[None]:
        """The calling thread is in the namespace: its sockets, and the threads and processes that it starts.

        Args:
            host: the namespace.
            cpus: what is started runs on these only; None: where this thread runs.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        before_cpus = os.sched_getaffinity(0)
        try:
            _enter(self._namespaces[host])
            if cpus is not None:
                os.sched_setaffinity(0, cpus)
            yield
        finally:
            os.sched_setaffinity(0, before_cpus)
            _enter(before)
            os.close(before)

    def start(
        self,
        host: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cpus: Collection[int] | None = None,
    ) -> ProcessGroup:
        """A process in the namespace; it ends with the laboratory.

        Args:
            host: the namespace.
            argv: program and arguments.
            log: where its output goes.
            env: laid over the environment.
            cpus: see `inside`.
        """
        assert self._watchdog is not None, "the laboratory is not open"
        with self.inside(host, cpus):
            group = ProcessGroup.start(
                argv, {**os.environ, **(env or {})}, LogFile(log, max_bytes=_LOG_BYTES, kept_files=1)
            )
        self._processes.append(group)
        self._watchdog.watch(group)
        return group

    def line(self, source: str, target: str) -> LineSettings:
        """The present settings of the line between two sites."""
        return self._settings[source, target]

    def change(self, source: str | None = None, target: str | None = None, **changes: Any) -> None:
        """Change fields of `LineSettings`, at once.

        Args:
            source: only lines from this site; None: from every one.
            target: only lines to this site; None: to every one.
            **changes: fields and their new values.
        """
        for (a, b), settings in self._settings.items():
            if source in (a, None) and target in (b, None):
                new = self._settings[a, b] = dataclasses.replace(settings, **changes)
                self._ask(
                    f"set {self._sites.index(a)} {self._sites.index(b)} {new.rate_bits_per_s:.3f} "
                    f"{round(new.delay_s * 1e9)} {new.queue_bytes} {new.loss:.9f} {int(new.blackhole)}"
                )

    def counters(self, source: str, target: str) -> LineCounters:
        """What the line between two sites has done."""
        answer = self._ask(f"count {self._sites.index(source)} {self._sites.index(target)}")
        return LineCounters(**json.loads(answer))

    def kill_connections(self, count: int | None = None, port: int | None = None) -> int:
        """End TCP connections between sites: both ends get a RST, and nothing of them is delivered any more.

        Args:
            count: so many, those that have carried the most first; None: all.
            port: only those with this port at one end.

        Returns:
            How many there were.
        """
        if count == 0:
            return 0
        return int(self._ask(f"kill {count or 0} {port or 0}"))

    def close(self) -> None:
        """End everything that was started inside, and the network. Idempotent."""
        for group in self._processes:
            group.ask_to_end()
        for group in self._processes:
            group.wait(_STOP_S)
            group.kill()
        self._processes.clear()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._emulator is not None:
            try:
                self._emulator.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.communicate()
            self._emulator = None
        for namespace in self._namespaces.values():
            os.close(namespace)
        self._namespaces.clear()

    def _start_emulator(self) -> None:
        program = _compiled()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        numbers = {site: index for index, site in enumerate(self._sites)}
        with theirs:
            self._emulator = subprocess.Popen(
                [
                    *(str(program), str(theirs.fileno()), str(round(self._burst_s * 1e6)), str(self._seed)),
                    *(
                        f"{self._namespaces[host]}:{numbers[host.rpartition('-')[0]]}:{address}"
                        for host, address in self._addresses.items()
                    ),
                ],
                pass_fds=(theirs.fileno(), *self._namespaces.values()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # A Ctrl-C is for this process, which then ends the laboratory in order.
                start_new_session=True,
            )
        self._ask("count 0 0")

    def _set_up(self, host: str) -> None:
        with self.inside(host):
            settings = Path("/proc/sys/net/ipv4")
            # A connection must not begin with what an earlier one learned: trials are to be independent.
            (settings / "tcp_no_metrics_save").write_text("1")
            if self._congestion_control is not None:
                try:
                    (settings / "tcp_congestion_control").write_text(self._congestion_control)
                except OSError as error:
                    raise LaboratoryError(
                        f"this kernel has no congestion control {self._congestion_control}"
                    ) from error

    def _ask(self, command: str) -> str:
        """The emulator's answer without its "ok"."""
        if self._control is None:
            raise LaboratoryError("the laboratory is not open")
        try:
            self._control.send(command.encode())
            answer = self._control.recv(4096).decode()
        except OSError:
            answer = ""
        if not answer:
            assert self._emulator is not None
            self._emulator.kill()
            _, said = self._emulator.communicate()
            raise LaboratoryError(f"the emulator has ended: {said.decode(errors='replace').strip()}")
        if not answer.startswith("ok"):
            raise LaboratoryError(f"the emulator answers {answer!r} to {command!r}")
        return answer.removeprefix("ok").strip()


def missing() -> str | None:
    """What this machine or user lacks for a laboratory, as a sentence; None: nothing."""
    if os.geteuid() != 0:
        return "a laboratory needs root: network namespaces and TUN devices are made"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a laboratory needs /dev/net/tun, which is not here"
    if shutil.which("cc") is None:
        return "a laboratory needs a C compiler named cc, which is not here"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"a laboratory needs network namespaces, and making one fails: {error.strerror}"
    return None


def _new_namespace() -> int:
    """An open file that keeps a new network namespace alive."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_LIBC.unshare(CLONE_NEWNET))
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(namespace: int) -> None:
    _checked(_LIBC.setns(namespace, CLONE_NEWNET))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _compiled() -> Path:
    """The emulator's program, compiled when its source is new."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    program = cache / f"wan-emulator-{digest}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Several may compile at once; each puts its own result in place.
        fresh = program.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            ["cc", "-O2", "-Wall", "-Wextra", "-o", str(fresh), str(SOURCE)], capture_output=True, text=True
        )
        if done.returncode:
            raise LaboratoryError(f"the emulator can't be compiled:\n{done.stderr}")
        fresh.replace(program)
    return program


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the main thread as Ctrl-C does, so that what it has opened is closed in order."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
