"""Mooncake Store's batch get of pages like a pool's, beside memcpy (for `pool.py`).

Run as a program by an interpreter that can import `mooncake.store`: it needs nothing of prfaas then.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
COPIED_BYTES = 64 * MIB
PAGE_BYTES = (64 << 10, 256 << 10)
RPC_PORT, METADATA_PORT = 9001, 9002
START_S = 30.0
TIMEOUT_S = 300.0

Row = tuple[str, float, str]


def batch_get(python: Path | None, folder: Path, rounds: int) -> list[Row]:
    """Bandwidths and ratios; nothing where there is no Mooncake."""
    if python is None:
        print("mooncake: no --mooncake-python, so it is left out")
        return []
    # It listens on the first interface that is not the loopback: in a network namespace of its own (root), a pair of
    # ends that lead nowhere.
    inside = (
        "ip link set lo up && ip link add end0 type veth peer name end1 && ip addr add 192.0.2.1/24 dev end0 && "
        'ip link set end0 up && ip link set end1 up && exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", inside, "sh", str(python), __file__, str(folder), str(rounds)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"Mooncake Store did not run: {done.stderr[-1500:]}")
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


@contextmanager
def _master(folder: Path) -> Iterator[None]:
    binary = Path(sys.executable).parent / "mooncake_master"
    ports = [f"--rpc_port={RPC_PORT}", f"--http_metadata_server_port={METADATA_PORT}", "--metrics_port=9003"]
    http = ["--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
    with (folder / "master.log").open("wb") as log:
        master = subprocess.Popen([str(binary), *ports, *http], stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S
            while not all(map(_listens, (RPC_PORT, METADATA_PORT))):
                if time.monotonic() > deadline_s or master.poll() is not None:
                    raise RuntimeError(f"mooncake_master does not listen; see {folder}/master.log")
                time.sleep(0.1)
            yield
        finally:
            master.kill()
            master.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _in_mooncake(rounds: int) -> list[Row]:
    import numpy as np
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    failed = store.setup(
        "127.0.0.1",
        f"http://127.0.0.1:{METADATA_PORT}/metadata",
        # What was read lately can't be removed, so there is room for everything.
        (len(PAGE_BYTES) * (rounds + 1) + 2) * COPIED_BYTES,
        2 * COPIED_BYTES,
        "tcp",
        "",
        f"127.0.0.1:{RPC_PORT}",
    )
    if failed:
        raise RuntimeError(f"setup failed with {failed}")
    source, target = (np.full(COPIED_BYTES, fill, np.uint8) for fill in (1, 0))
    store.register_buffer(source.ctypes.data, COPIED_BYTES)
    store.register_buffer(target.ctypes.data, COPIED_BYTES)
    rows: list[Row] = []
    for page_bytes in PAGE_BYTES:
        count = COPIED_BYTES // page_bytes
        sizes = [page_bytes] * count
        offsets = range(0, COPIED_BYTES, page_bytes)
        put_s, get_s, ratios = [], [], []
        for number in range(rounds + 1):
            keys = [f"{page_bytes}-{number}-{page}" for page in range(count)]
            began_s = time.perf_counter()
            put = store.batch_put_from(keys, [source.ctypes.data + offset for offset in offsets], sizes)
            put_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            np.copyto(target, source)
            copied_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            got = store.batch_get_into(keys, [target.ctypes.data + offset for offset in offsets], sizes)
            get_s.append(time.perf_counter() - began_s)
            if any(put) or any(each != page_bytes for each in got):
                raise RuntimeError(f"pages were refused: {put[:3]}, {got[:3]}")
            ratios.append(copied_s / get_s[-1])
        label = f"pages of {page_bytes >> 10} KiB"
        rows.append(
            (f"Mooncake Store batch put, {label}", COPIED_BYTES / statistics.median(put_s[1:]) / 1e9, "GB/s")
        )
        rows.append(
            (f"Mooncake Store batch get, {label}", COPIED_BYTES / statistics.median(get_s[1:]) / 1e9, "GB/s")
        )
        rows.append((f"Mooncake Store batch get / memcpy, {label}", statistics.median(ratios[1:]), "ratio"))
    store.close()
    return rows


if __name__ == "__main__":
    with _master(Path(sys.argv[1])):
        measured = _in_mooncake(int(sys.argv[2]))
    print(json.dumps(measured))
