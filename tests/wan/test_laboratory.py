"""The emulated network does what its settings say. Tolerances are for a machine that is busy with other things."""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wan import laboratory as module
from wan.laboratory import Laboratory, LaboratoryError, LineSettings

pytestmark = [pytest.mark.wan, pytest.mark.timeout(120)]

MakeLaboratory = Callable[..., Laboratory]
FAST = LineSettings.of_round_trip(1e9, 0.002)
PATIENCE_S = 30.0
PORT = 5000
FRAMING_BYTES = 38
DATAGRAM_BYTES = 1000
DATAGRAM_IP_BYTES = DATAGRAM_BYTES + 28


def await_true(check: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def datagrams(laboratory: Laboratory, source: str = "far-0") -> tuple[socket.socket, socket.socket]:
    """A sending and a receiving socket."""
    with laboratory.inside("home-0"):
        into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    into.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    into.bind((laboratory.address("home-0"), PORT))
    with laboratory.inside(source):
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.connect((laboratory.address("home-0"), PORT))
    into.settimeout(PATIENCE_S)
    out.settimeout(PATIENCE_S)
    return out, into


def connections(laboratory: Laboratory, *sources: str) -> list[tuple[socket.socket, socket.socket]]:
    """TCP connections from these namespaces to home-0: the sending and the receiving end of each."""
    with laboratory.inside("home-0"):
        listener = socket.create_server((laboratory.address("home-0"), PORT))
    pairs = []
    with listener:
        for source in sources:
            with laboratory.inside(source):
                out = socket.create_connection((laboratory.address("home-0"), PORT), PATIENCE_S)
            into, _ = listener.accept()
            into.settimeout(PATIENCE_S)
            pairs.append((out, into))
    return pairs


def transfer(out: socket.socket, into: socket.socket, data: bytes) -> bytes:
    """Send everything and end the stream; what arrived."""
    received = bytearray()

    def receive() -> None:
        while piece := into.recv(1 << 20):
            received.extend(piece)

    thread = threading.Thread(target=receive)
    thread.start()
    out.sendall(data)
    out.shutdown(socket.SHUT_WR)
    thread.join(PATIENCE_S * 2)
    assert not thread.is_alive()
    return bytes(received)


def test_the_round_trip_is_that_of_both_lines(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(LineSettings.of_round_trip(1e9, 0.040))
    laboratory.change("home", "far", delay_s=0.030)
    out, into = datagrams(laboratory)

    def echo_s() -> float:
        began_s = time.perf_counter()
        out.send(b"?")
        _, sender = into.recvfrom(10)
        into.sendto(b"!", sender)
        out.recv(10)
        return time.perf_counter() - began_s

    with out, into:
        assert 0.0495 < min(echo_s() for _ in range(20)) < 0.0525


def test_namespaces_of_a_site_share_the_rate(make_laboratory: MakeLaboratory) -> None:
    """The queue is filled while the line stands still, so that no program has to keep up with it."""
    laboratory = make_laboratory(replace(FAST, rate_bits_per_s=0, queue_bytes=1 << 30), far=2)
    for source in ("far-0", "far-1"):
        out, into = datagrams(laboratory, source)
        with out, into:
            for _ in range(1500):
                out.send(bytes(DATAGRAM_BYTES))
    queued_bytes = 3000 * DATAGRAM_IP_BYTES
    await_true(lambda: laboratory.counters("far", "home").queued_bytes == queued_bytes, "all have come")
    rate_bits_per_s = 10e6
    laboratory.change("far", "home", rate_bits_per_s=rate_bits_per_s)
    before, began_s = laboratory.counters("far", "home"), time.monotonic()
    time.sleep(1.5)
    after, elapsed_s = laboratory.counters("far", "home"), time.monotonic() - began_s
    assert after.queued_bytes > 0
    segments = after.carried_segments - before.carried_segments
    nbytes = after.carried_bytes - before.carried_bytes + FRAMING_BYTES * segments
    assert nbytes * 8 / elapsed_s == pytest.approx(rate_bits_per_s, rel=0.02)


def test_so_many_segments_are_lost(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(replace(FAST, queue_bytes=1 << 30))
    laboratory.change("far", "home", loss=0.1)
    out, into = datagrams(laboratory)
    with out, into:
        for _ in range(4000):
            out.send(bytes(200))
        await_true(lambda: laboratory.counters("far", "home").offered_segments == 4000, "all have come")
        await_true(lambda: laboratory.counters("far", "home").queued_bytes == 0, "the queue drains")
        found = laboratory.counters("far", "home")
    # Five standard deviations of a binomial distribution.
    assert found.lost_segments == pytest.approx(400, abs=95)
    assert found.carried_segments == 4000 - found.lost_segments
    assert found.dropped_segments == 0


def test_a_full_queue_drops_what_comes(make_laboratory: MakeLaboratory) -> None:
    settings = LineSettings(rate_bits_per_s=1e5, delay_s=0.001, queue_bytes=10 * DATAGRAM_IP_BYTES)
    laboratory = make_laboratory(settings)
    out, into = datagrams(laboratory)
    with out, into:
        # Each takes 85 ms on the line, so none leaves while they come.
        for _ in range(25):
            out.send(bytes(DATAGRAM_BYTES))
        await_true(lambda: laboratory.counters("far", "home").offered_segments == 25, "all have come")
        found = laboratory.counters("far", "home")
        assert 13 <= found.dropped_segments <= 15
        laboratory.change(rate_bits_per_s=1e9)
        for _ in range(25 - found.dropped_segments):
            assert len(into.recv(2000)) == DATAGRAM_BYTES


def test_a_line_that_stands_still_keeps_its_queue(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(FAST)
    out, into = datagrams(laboratory)
    with out, into:
        laboratory.change("far", "home", rate_bits_per_s=0)
        out.send(b"held")
        await_true(lambda: laboratory.counters("far", "home").queued_bytes > 0, "it waits")
        time.sleep(0.2)
        assert laboratory.counters("far", "home").carried_segments == 0
        laboratory.change("far", "home", rate_bits_per_s=1e9)
        assert into.recv(10) == b"held"


def test_a_blackhole_swallows_what_comes_and_what_waits(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(FAST)
    out, into = datagrams(laboratory)
    with out, into:
        laboratory.change(rate_bits_per_s=0)
        out.send(b"waits")
        await_true(lambda: laboratory.counters("far", "home").queued_bytes > 0, "it waits")
        laboratory.change(blackhole=True)
        out.send(b"comes")
        await_true(lambda: laboratory.counters("far", "home").blackholed_segments == 2, "both are gone")
        laboratory.change(blackhole=False, rate_bits_per_s=1e9)
        out.send(b"passes")
        assert into.recv(10) == b"passes"


def test_killed_connections_end_on_both_sides(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(FAST)
    pairs = connections(laboratory, *["far-0"] * 5)
    for out, into in pairs:
        out.sendall(b"alive")
        assert into.recv(10) == b"alive"
    assert laboratory.kill_connections(port=PORT + 1) == 0
    assert laboratory.kill_connections(count=2, port=PORT) == 2
    for out, into in pairs[:2]:
        for end in (out, into):
            end.settimeout(PATIENCE_S)
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    for out, into in pairs[2:]:
        out.sendall(b"still")
        assert into.recv(10) == b"still"
    assert laboratory.kill_connections() == 3
    for pair in pairs:
        for end in pair:
            end.close()
    [(out, into)] = connections(laboratory, "far-0")
    with out, into:
        assert transfer(out, into, b"a new one passes") == b"a new one passes"


def test_an_end_that_has_not_acknowledged_yet_is_reset_too(make_laboratory: MakeLaboratory) -> None:
    """The first RST has another place in the stream then, and a kernel ignores it (RFC 5961)."""
    laboratory = make_laboratory(FAST)
    pairs = connections(laboratory, *["far-0"] * 8)
    for out, into in pairs:
        into.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        out.sendall(b"alive")
    for _, into in pairs:
        assert into.recv(10) == b"alive"
    assert laboratory.kill_connections() == 8
    for end in (end for pair in pairs for end in pair):
        with end, pytest.raises(ConnectionResetError):
            end.recv(1)


@pytest.mark.parametrize("burst_s", [0.0, 0.001, 0.1])
def test_a_stream_arrives_as_it_was_sent(make_laboratory: MakeLaboratory, burst_s: float) -> None:
    """Super-packets are cut at lost segments and by time: headers, flags and checksums of the parts are right."""
    laboratory = make_laboratory(LineSettings.of_round_trip(200e6, 0.002, loss=0.01), burst_s=burst_s)
    [(out, into)] = connections(laboratory, "far-0")
    data = random.Random(1).randbytes(4_000_003)
    with out, into:
        assert hashlib.sha256(transfer(out, into, data)).digest() == hashlib.sha256(data).digest()
    assert laboratory.counters("far", "home").lost_segments > 5
    assert laboratory.counters("far", "home").refused_writes == 0


def test_namespaces_of_a_site_reach_each_other_at_once(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(replace(FAST, blackhole=True), far=2)
    with laboratory.inside("far-1"):
        listener = socket.create_server((laboratory.address("far-1"), PORT))
    with laboratory.inside("far-0"):
        out = socket.create_connection((laboratory.address("far-1"), PORT), PATIENCE_S)
    into, _ = listener.accept()
    with listener, out, into:
        assert transfer(out, into, b"neighbours") == b"neighbours"
    assert laboratory.counters("far", "home").offered_segments == 0


def test_what_is_started_is_inside_and_ends_with_it(make_laboratory: MakeLaboratory, tmp_path: Path) -> None:
    with Laboratory({"far": 1, "home": 1}, FAST, congestion_control="reno") as laboratory:
        script = (
            "import os, socket, time; print(open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip(), "
            "os.sched_getaffinity(0), [name for _, name in socket.if_nameindex()], flush=True); time.sleep(600)"
        )
        log = tmp_path / "log"
        started = laboratory.start("far-0", [sys.executable, "-c", script], log=log, cpus={0})
        await_true(lambda: log.exists() and log.read_text().endswith("]\n"), "it says where it is")
        said = log.read_text()
        assert "\nreno {0} " in said and "wan0" in said
        assert started.is_running
        emulator = laboratory._emulator
        assert emulator is not None
        # The thread that started it is where it was.
        assert "wan0" not in [name for _, name in socket.if_nameindex()]
    assert started.exit_status == -signal.SIGTERM
    assert emulator.poll() == 0
    with pytest.raises(LaboratoryError, match="not open"):
        laboratory.change(loss=0.0)


def test_nothing_is_left_of_an_owner_that_was_killed(tmp_path: Path) -> None:
    bench = Path(module.__file__).parents[1]
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(bench)!r})
from wan.laboratory import Laboratory, LineSettings
laboratory = Laboratory({{"far": 1, "home": 1}}, LineSettings.of_round_trip(1e9, 0.01)).__enter__()
started = laboratory.start("far-0", ["sleep", "600"], log=Path({str(tmp_path / "log")!r}))
print(started.pid, laboratory._emulator.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        owner.kill()
    await_true(lambda: not any(is_running(pid) for pid in pids), f"{pids} end")


def is_running(pid: int) -> bool:
    """A process whose new parent has not noticed its end is over, too."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_emulator_compiles_without_a_warning(tmp_path: Path) -> None:
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    subprocess.run(["cc", *strict, "-o", str(tmp_path / "emulator"), str(module.SOURCE)], check=True)


def test_an_emulator_that_ended_is_an_error(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(FAST)
    assert laboratory._emulator is not None
    laboratory._emulator.kill()
    with pytest.raises(LaboratoryError, match="the emulator has ended"):
        laboratory.change(loss=0.5)


def test_what_is_missing_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.missing() is None
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(LaboratoryError, match="needs a C compiler named cc"):
        Laboratory({"far": 1, "home": 1}, FAST)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaboratoryError, match="needs root"):
        Laboratory({"far": 1, "home": 1}, FAST)


def test_settings_are_checked(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(FAST)
    for changes in ({"loss": 1.5}, {"rate_bits_per_s": -1}, {"delay_s": 60}, {"queue_bytes": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} must be from 0"):
            laboratory.change(**changes)
    assert laboratory.line("far", "home") == FAST
    assert FAST.goodput_bits_per_s == pytest.approx(0.9415 * 1e9, rel=1e-4)
