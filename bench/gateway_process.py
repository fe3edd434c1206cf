"""A gateway before stand-in engines in a process of its own, which can be asked how long its event loop stood still.

    python bench/gateway_process.py HOME MODEL_DIR '{"remote": [HTTP_PORT, KV_PORT], …}'

Prints its port. At "watch" on stdin it begins to watch its event loop, at "tell" it prints what it saw, as JSON.
With PYTHONPATH=TREE/src:TREE it is the gateway of another checkout.
"""

import asyncio
import dataclasses
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import uvloop
from tests.serving.gateway.world import deployment_of

from prfaas.core.deployment import Deployment, Routing
from prfaas.serving.live import serve_live
from prfaas.serving.logs import LogSettings, set_up_logging

THRESHOLD_TOKENS = 1000
WATCH_TICK_S = 0.001


class LoopWatch:
    """The longest time for which an event loop did not turn, from a callback that wants to run every millisecond.

    Of a standstill, no more can be the process's own doing than the CPU time that its threads used meanwhile; the
    rest is the machine's, which let others run.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._on = False
        self._since = (0.0, 0.0)
        self._longest_s = self._longest_own_s = 0.0

    def start(self) -> None:
        self._longest_s = self._longest_own_s = 0.0
        self._on = True
        self._wait()

    def tell(self) -> None:
        """Print the seconds of the longest standstill, and of the longest that was the process's own doing."""
        self._on = False
        print(json.dumps([self._longest_s, self._longest_own_s]), flush=True)

    def _wait(self) -> None:
        # The loop's own clock stands still within one turn.
        self._since = (time.monotonic(), time.process_time())
        self._loop.call_later(WATCH_TICK_S, self._tick)

    def _tick(self) -> None:
        since_s, since_cpu_s = self._since
        late_s = time.monotonic() - since_s - WATCH_TICK_S
        self._longest_s = max(self._longest_s, late_s)
        self._longest_own_s = max(self._longest_own_s, min(late_s, time.process_time() - since_cpu_s))
        if self._on:
            self._wait()


def deployment(home: Path, model_dir: Path, ports: dict[str, tuple[int, int]]) -> Deployment:
    """With prompts of any length, and staging for them."""
    engines = {name: SimpleNamespace(http_port=http, kv_port=kv) for name, (http, kv) in ports.items()}
    made: Deployment = deployment_of(home, engines, model_dir)  # type: ignore[arg-type]
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, max_model_len=1 << 20),
        engine=dataclasses.replace(made.engine, staging_bytes=64 << 20),
        routing=Routing("static_threshold", THRESHOLD_TOKENS),
    )


async def serve(served: Deployment) -> None:
    watch, loop = LoopWatch(), asyncio.get_running_loop()

    def ready(port: int) -> None:
        print(port, flush=True)
        threading.Thread(target=listen, daemon=True).start()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(watch.start if line.strip() == "watch" else watch.tell)

    # As the command line does: with a line of log per request.
    with Path(os.devnull).open("w") as nowhere:
        set_up_logging(LogSettings(), whole_process=True, stream=nowhere)
        gc.collect()
        gc.freeze()
        await serve_live(served, ready=ready)


if __name__ == "__main__":
    uvloop.run(serve(deployment(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))))
