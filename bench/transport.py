"""Loopback throughput of the transport against a plain socket copy in the same run, and how well pacing holds.

    python bench/transport.py [--mib 256] [--rounds 5] [--json FILE]

Two processes. Each round sends the same bytes, host memory to host memory, first with plain sockets and then with the
transport, over 1, 2, 4 and 8 connections; the ratio is the median over rounds of the paired ratios (single timings on
a shared machine spread ±25 %). The paced part asks for a rate and reports what was achieved.
"""

import argparse
import json
import multiprocessing
import platform
import socket
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prfaas.serving.transport import (
    BytesSource,
    Peer,
    Receiver,
    Sender,
    SendPhase,
    StagingArena,
    Ticket,
    TransferPhase,
    prompt_digest,
)

KEY = bytes(range(32))
REGIONS = 16
CONNECTIONS = (1, 2, 4, 8)
PACED_BITS_PER_S = (50e6, 200e6, 1e9)


class EvenRegions:
    """The number of tokens of the ticket is the transfer's size in KiB, cut into equal regions."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        return [(num_tokens - skip_tokens) * 1024 // REGIONS] * REGIONS


def plain_send(ports: list[int], data: memoryview) -> float:
    """Seconds to copy `data` over one connection per port, until the other side confirms the last byte."""
    socks = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    share = len(data) // len(socks)

    def send(index: int) -> None:
        socks[index].sendall(data[index * share : (index + 1) * share])
        socks[index].recv(1)

    began_s = time.perf_counter()
    run_all([threading.Thread(target=send, args=(index,)) for index in range(len(socks))])
    elapsed_s = time.perf_counter() - began_s
    for sock in socks:
        sock.close()
    return elapsed_s


def plain_receive(listeners: list[socket.socket], out: memoryview) -> None:
    share = len(out) // len(listeners)

    def receive(index: int) -> None:
        sock, _ = listeners[index].accept()
        with sock:
            sock.recv_into(out[index * share : (index + 1) * share], 0, socket.MSG_WAITALL)
            sock.sendall(b"!")

    run_all([threading.Thread(target=receive, args=(index,)) for index in range(len(listeners))])


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Producer:
    """The sending process: does what the parent asks through a pipe."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._port = port
        self._data = memoryview(bytearray(range(256)) * (nbytes // 256))
        self._senders: dict[tuple[int, float | None], Sender] = {}

    def transport(self, connections: int, bits_per_s: float | None, nbytes: int) -> dict[str, Any]:
        sender = self._senders.get((connections, bits_per_s))
        if sender is None:
            peer = Peer("c/0", "127.0.0.1", self._port, "link", connections, bits_per_s)
            sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={})
            sender.start()
            while sender.stats()["peers"]["c/0"]["connections"] < connections:
                time.sleep(0.005)
            self._senders[connections, bits_per_s] = sender
        ticket = Ticket.issue(
            producer="p/0",
            consumer="c/0",
            num_tokens=nbytes // 1024,
            skip_tokens=0,
            prompt_digest=prompt_digest([]),
            lifetime_s=600,
            now_s=time.time(),
        )
        cpu_s, began_s = time.process_time(), time.perf_counter()
        sizes = EvenRegions().region_bytes(ticket.num_tokens, 0)
        transfer = sender.open(ticket, ticket.seal(KEY), sizes)
        at = 0
        for region, size in enumerate(sizes):
            transfer.put(region, 0, BytesSource(self._data[at : at + size]))
            at += size
        transfer.end()
        transfer.await_quiescent(600)
        elapsed_s = time.perf_counter() - began_s
        if transfer.phase is not SendPhase.COMPLETE:
            raise RuntimeError(f"transfer failed: {transfer.reason}")
        return {
            "id": ticket.transfer_id,
            "elapsed_s": elapsed_s,
            "cpu_s": time.process_time() - cpu_s,
            "congestion": sender.stats()["peers"]["c/0"]["congestion"],
        }

    def plain(self, ports: list[int]) -> float:
        return plain_send(ports, self._data)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


def produce(pipe: Connection, port: int, nbytes: int) -> None:
    producer = Producer(port, nbytes)
    while (asked := pipe.recv()) is not None:
        pipe.send(getattr(producer, asked[0])(*asked[1:]))
    producer.close()


class Bench:
    """The receiving process, which also leads."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.arena = StagingArena(nbytes + (4 << 20))
        self.receiver = Receiver(
            name="c/0",
            key=KEY,
            host="127.0.0.1",
            port=0,
            arena=self.arena,
            layout=EvenRegions(),
            fingerprint={},
        )
        self.receiver.start()
        self.landing = memoryview(bytearray(b"\x01") * nbytes)
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.child = multiprocessing.get_context("spawn").Process(
            target=produce, args=(theirs, self.receiver.port, nbytes), daemon=True
        )
        self.child.start()

    def plain(self, connections: int) -> float:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(connections)]
        self.pipe.send(("plain", [sock.getsockname()[1] for sock in listeners]))
        plain_receive(listeners, self.landing)
        for sock in listeners:
            sock.close()
        return float(self.pipe.recv())

    def transport(
        self, connections: int, bits_per_s: float | None = None, nbytes: int | None = None
    ) -> dict[str, Any]:
        cpu_s = time.process_time()
        self.pipe.send(("transport", connections, bits_per_s, nbytes or self.nbytes))
        result: dict[str, Any] = self.pipe.recv()
        result["receiver_cpu_s"] = time.process_time() - cpu_s
        status = self.receiver.state(result["id"])
        assert status is not None and status.phase is TransferPhase.COMPLETE
        staged = self.receiver.take(result["id"])
        assert staged is not None
        staged.free()
        return result

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join()
        self.receiver.close()


def throughput(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    gbits = bench.nbytes * 8 / 1e9
    timings: dict[int, list[tuple[float, dict[str, Any]]]] = {count: [] for count in CONNECTIONS}
    for index in range(rounds + 1):
        for count in CONNECTIONS:
            pair = (bench.plain(count), bench.transport(count))
            if index:  # the first round warms connections and memory
                timings[count].append(pair)
        print(f"round {index}/{rounds}", file=sys.stderr)
    return [
        {
            "connections": count,
            "plain_gbit_per_s": statistics.median(gbits / plain for plain, _ in pairs),
            "transport_gbit_per_s": statistics.median(gbits / ours["elapsed_s"] for _, ours in pairs),
            "paired_ratio": statistics.median(plain / ours["elapsed_s"] for plain, ours in pairs),
            "sender_cpu_s_per_gb": statistics.median(o["cpu_s"] for _, o in pairs) / (bench.nbytes / 1e9),
            "receiver_cpu_s_per_gb": statistics.median(o["receiver_cpu_s"] for _, o in pairs)
            / (bench.nbytes / 1e9),
            "congestion": pairs[0][1]["congestion"],
        }
        for count, pairs in timings.items()
    ]


def latency(bench: Bench) -> dict[str, Any]:
    times_s = sorted(bench.transport(4, None, 1 << 20)["elapsed_s"] for _ in range(30))
    return {"bytes": 1 << 20, "median_s": times_s[15], "p90_s": times_s[27]}


def pacing(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for asked in PACED_BITS_PER_S:
        nbytes = min(bench.nbytes, int(asked / 8 * 2) >> 16 << 16)  # about two seconds
        elapsed_s = bench.transport(4, asked, nbytes)["elapsed_s"]
        achieved = nbytes * 8 / elapsed_s
        rows.append(
            {
                "asked_mbit_per_s": asked / 1e6,
                "achieved_mbit_per_s": achieved / 1e6,
                "ratio": achieved / asked,
                "bytes": nbytes,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Loopback throughput of the transport.")
    parser.add_argument("--mib", type=int, default=256, help="size of one transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    bench = Bench(options.mib << 20)
    try:
        result = {
            "machine": {"python": platform.python_version(), "kernel": platform.release()},
            "transfer_bytes": bench.nbytes,
            "rounds": options.rounds,
            "throughput": throughput(bench, options.rounds),
            "small": latency(bench),
            "paced": pacing(bench),
        }
    finally:
        bench.close()
    print(
        f"{options.mib} MiB per transfer, medians of {options.rounds} rounds, {result['throughput'][0]['congestion']}"
    )
    print("conns  plain Gbit/s  transport Gbit/s  ratio  CPU s/GB send  receive")
    for row in result["throughput"]:
        print(
            f"{row['connections']:5}  {row['plain_gbit_per_s']:12.1f}  {row['transport_gbit_per_s']:16.1f}"
            f"  {row['paired_ratio']:5.2f}  {row['sender_cpu_s_per_gb']:13.3f}"
            f"  {row['receiver_cpu_s_per_gb']:7.3f}"
        )
    small = result["small"]
    print(f"1 MiB, 4 connections: median {small['median_s'] * 1e3:.2f} ms, p90 {small['p90_s'] * 1e3:.2f} ms")
    print("asked Mbit/s  achieved  ratio  (4 connections)")
    for row in result["paced"]:
        print(f"{row['asked_mbit_per_s']:12.0f}  {row['achieved_mbit_per_s']:8.1f}  {row['ratio']:5.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
