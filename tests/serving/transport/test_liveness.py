"""Liveness: silence of a path, of an engine, and of this process itself, which takes nobody for silent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.liveness import LONGEST_LOOK_S, Liveness, LookClock, TcpInfo
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import TransferPhase

from .harness import (
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    SizesByTokens,
    World,
    await_over,
    await_true,
    make_ticket,
    with_options,
)
from .raw_peer import RawProducer

MakeWorld = Callable[..., World]

QUIET = TcpInfo(
    **{field.name: 0 for field in fields(TcpInfo)} | {"bytes_acked": 1000, "bytes_received": 1000}
)
# In a process of its own, which can be stopped.
CONSUMER = """
import sys
from prfaas.serving.transport.io.staging_memory import StagingArena
from tests.serving.transport.harness import make_receiver
receiver = make_receiver(StagingArena(64 << 20, 256 << 10))
print(receiver.port, flush=True)
sys.stdin.read()
print(receiver.stats()["thread_errors"], receiver.stats()["completed"], flush=True)
receiver.close()
"""


def look(liveness: Liveness, info: TcpInfo, times: int = 1, *, asked: bool = True) -> None:
    for _ in range(times):
        liveness.look(info, 0.1, asked=asked, spare_s=0.5)


def test_a_dark_path_is_told_from_a_stopped_engine() -> None:
    dark, stopped = Liveness(), Liveness()
    look(dark, QUIET)
    look(stopped, QUIET)
    look(dark, replace(QUIET, in_flight=1), 20)
    for count in range(20):
        # Its machine acknowledges one heartbeat after the other.
        look(stopped, replace(QUIET, in_flight=1, bytes_acked=1000 + 56 * count))
    assert dark.path_s == pytest.approx(2.0)
    assert stopped.path_s == 0.0
    assert stopped.engine_s == pytest.approx(2.0)


def test_a_closed_window_is_the_engine_s_silence() -> None:
    liveness = Liveness()
    look(liveness, QUIET)
    look(liveness, replace(QUIET, notsent_bytes=1 << 20), 40)
    assert liveness.path_s <= 0.5
    assert liveness.engine_s == pytest.approx(4.0)


def test_data_that_moves_is_a_sign_of_life_however_late_the_answer() -> None:
    liveness = Liveness()
    for count in range(100):
        look(liveness, replace(QUIET, in_flight=9, bytes_acked=1000 + 1448 * count))
    assert liveness.path_s == liveness.engine_s == 0.0


def test_who_was_asked_nothing_is_not_silent() -> None:
    liveness = Liveness()
    look(liveness, QUIET)
    look(liveness, QUIET, 1000, asked=False)
    assert liveness.path_s == liveness.engine_s == pytest.approx(0.5)


def test_a_stop_of_this_process_counts_as_one_look() -> None:
    clock = LookClock(time.monotonic())
    assert clock.elapsed_s(time.monotonic() + 3600) == LONGEST_LOOK_S


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_heartbeats_while_nothing_is_to_be_sent(make_world: MakeWorld) -> None:
    """A prefill that takes longer than every deadline of silence is no silence."""
    world = make_world(
        sender_options=with_options(FAST_SENDER, silence_s=0.6, resume_s=0.5, progress_deadline_s=10.0),
    )
    ticket, transfer, content = world.open(1000)
    world.await_phase(ticket, TransferPhase.RECEIVING)
    await_true(lambda: world.sender.stats()["peers"]["c/0"]["connections"] == 4, 5.0, lambda: "up")
    connects = world.sender.stats()["peers"]["c/0"]["connects"]
    time.sleep(2.0)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == content
    assert world.sender.stats()["peers"]["c/0"]["connects"] == connects
    world.await_clean()


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_a_producer_that_says_nothing_is_given_up(world: World) -> None:
    """It is connected and its machine acknowledges, but it answers no PING: before END too."""
    ticket = make_ticket(1000)
    with RawProducer(world) as raw:
        raw.open(ticket, [1000, 2000, 3000])
        raw.assert_closed()
        status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.reason.startswith(
        "p/0 is silent: its machine acknowledges, its engine has sent nothing for"
    )
    world.await_clean()


@pytest.mark.parametrize("phase", ["sending", "prefilling"])
def test_a_stopped_consumer_costs_time_and_no_memory(phase: str) -> None:
    consumer = subprocess.Popen(
        [sys.executable, "-c", CONSUMER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert consumer.stdout is not None
    assert consumer.stdin is not None
    port = int(consumer.stdout.readline())
    # Stopped for longer than a path may be silent.
    options = with_options(FAST_SENDER, silence_s=0.6, resume_s=0.5, progress_deadline_s=60.0)
    sender = Sender(
        name="p/0",
        key=KEY,
        peers={"c/0": Peer("c/0", "127.0.0.1", port, "wan", 4, None)},
        fingerprint=FINGERPRINT,
        options=options,
    )
    try:
        sender.start()
        ticket = make_ticket(8 << 20)
        sizes = SizesByTokens().region_bytes(8 << 20, 0)
        transfer = sender.open(ticket, ticket.seal(KEY), sizes)
        first, rest = (0, (1, 2)) if phase == "prefilling" else (None, (0, 1, 2))
        content = memoryview(bytes(sizes[-1]))
        if first is not None:
            transfer.put(first, 0, BytesSource(content[: sizes[first]]))
        await_true(lambda: transfer.phase is SendPhase.SENDING and transfer.idle(), 5.0, lambda: "idle")
        resident_bytes = resident()
        os.kill(consumer.pid, signal.SIGSTOP)
        if phase == "sending":
            for region in rest:
                transfer.put(region, 0, BytesSource(content[: sizes[region]]))
        await_true(lambda: bool(sender.telemetry()["stalled"]), 20.0, lambda: "noticed")
        (sentence,) = sender.telemetry()["stalled"].values()
        time.sleep(0.5)
        grown_bytes = resident() - resident_bytes
        os.kill(consumer.pid, signal.SIGCONT)
        if phase == "prefilling":
            for region in rest:
                transfer.put(region, 0, BytesSource(content[: sizes[region]]))
        transfer.end()
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert sentence.startswith("its engine has not answered for")
        # What waits stays in the engine's pages.
        assert grown_bytes < 8 << 20
        assert sender.telemetry()["stalled"] == {}
        consumer.stdin.close()
        assert consumer.stdout.readline().split() == ["0", "1"]
    finally:
        sender.close()
        consumer.kill()
        consumer.wait()
        consumer.stdin.close()
        consumer.stdout.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
