"""One end of a transfer of another project, as a process that `transport.py` leads. It imports nothing of this one.

    PEERS_PYTHON bench/transport_peers.py receive mooncake '{"host": …, "nbytes": …, "blocks": …}'
    PEERS_PYTHON bench/transport_peers.py send mooncake '{…, "port": …, "address": …}'

The lines on input and output are those of `transport_ends.py`. Lanes and the like are set by the environment.
"""

import base64
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]
Blocks = list[tuple[int, int]]


def touched(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory and its address."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, nbytes, 1 << 20):
        memory[start : start + (1 << 20)] = bytes([start >> 20 & 255 or 1]) * (1 << 20)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def blocks_of(address: int, job: Job) -> Blocks:
    size = job["nbytes"] // job["blocks"]
    return [(address + index * size, size) for index in range(job["blocks"])]


def mooncake_engine(job: Job) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(job["host"], "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("mooncake does not start")
    return engine


def receive_mooncake(job: Job) -> None:
    _, address = kept = touched(job["nbytes"])
    engine = mooncake_engine(job)
    engine.register_memory(address, job["nbytes"])
    say({"port": engine.get_rpc_port(), "address": address})
    answer_lines()
    del kept


def send_mooncake(job: Job) -> None:
    _, address = kept = touched(job["nbytes"])
    engine = mooncake_engine(job)
    engine.register_memory(address, job["nbytes"])
    target = f"{job['host']}:{job['port']}"
    sources = [start for start, _ in blocks_of(address, job)]
    targets = [start for start, _ in blocks_of(job["address"], job)]
    sizes = [size for _, size in blocks_of(address, job)]

    def transfer() -> None:
        if engine.batch_transfer_sync_write(target, sources, targets, sizes) != 0:
            raise SystemExit("mooncake's transfer failed")

    transfer_on_lines(transfer)
    del kept


def receive_nixl(job: Job) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    _, address = kept = touched(job["nbytes"])
    agent = nixl_agent("receiver", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, job["nbytes"], 0, "")], "DRAM")
    say({"address": address, "agent": base64.b64encode(agent.get_agent_metadata()).decode()})
    answer_lines()
    del kept


def send_nixl(job: Job) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    _, address = kept = touched(job["nbytes"])
    agent = nixl_agent("sender", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, job["nbytes"], 0, "")], "DRAM")
    remote_name = agent.add_remote_agent(base64.b64decode(job["agent"]))
    local, remote = (
        agent.get_xfer_descs([(start, size, 0) for start, size in blocks_of(first, job)], "DRAM")
        for first in (address, job["address"])
    )
    handle = agent.initialize_xfer("WRITE", local, remote, remote_name)

    def transfer() -> None:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"nixl's transfer ended as {state}")

    transfer_on_lines(transfer)
    del kept


def transfer_on_lines(transfer: Callable[[], None]) -> None:
    say({})
    for _ in sys.stdin:
        began_s = time.perf_counter()
        transfer()
        say({"elapsed_s": time.perf_counter() - began_s, "id": ""})


def answer_lines() -> None:
    for _ in sys.stdin:
        say({})


def say(what: Job) -> None:
    # The libraries print lines of their own.
    print(f"\n@{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_{sys.argv[2]}"](json.loads(sys.argv[3]))
