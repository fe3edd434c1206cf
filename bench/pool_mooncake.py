"""Mooncake Store's batch get of pages like a pool's, beside memcpy (for `pool.py`).

Run as a program by an interpreter that can import `mooncake.store`: it needs nothing of prfaas then.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
COPIED_BYTES = 64 * MIB
PAGE_BYTES = (64 << 10, 256 << 10)
START_S = 30.0
TIMEOUT_S = 300.0

Row = tuple[str, float, str]


def batch_get(python: Path | None, folder: Path, rounds: int) -> list[Row]:
    """Bandwidths and ratios; nothing where there is no Mooncake."""
    if python is None:
        print("mooncake: no --mooncake-python, so it is left out")
        return []
    from ports import free_ports

    rpc, metadata, metrics = free_ports(3)
    master_binary = python.parent / "mooncake_master"
    if not master_binary.exists():
        found = shutil.which("mooncake_master")
        if found is None:
            raise RuntimeError(f"there is no mooncake_master beside {python}")
        master_binary = Path(found)
    log = (folder / "master.log").open("wb")
    master = subprocess.Popen(
        [
            str(master_binary),
            f"--rpc_port={rpc}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={metadata}",
            f"--metrics_port={metrics}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        time.sleep(2.0)
        done = subprocess.run(
            [str(python), __file__, str(rpc), str(metadata), str(rounds)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        master.terminate()
        try:
            master.wait(10)
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()
        log.close()
    if done.returncode != 0:
        raise RuntimeError(f"Mooncake Store did not run: {done.stderr[-1500:]}")
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def _in_mooncake(rpc: int, metadata: int, rounds: int) -> list[Row]:
    import numpy as np
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    failed = store.setup(
        "127.0.0.1",
        f"http://127.0.0.1:{metadata}/metadata",
        8 * COPIED_BYTES,
        2 * COPIED_BYTES,
        "tcp",
        "",
        f"127.0.0.1:{rpc}",
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
            for key in keys:
                store.remove(key)
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
    print(json.dumps(_in_mooncake(*map(int, sys.argv[1:4]))))
