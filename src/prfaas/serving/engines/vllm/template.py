"""A process that has imported vLLM, and becomes engines by forks: `serving/engines/template.py` starts it.

Three engines on one machine would import vLLM six times: each in its API server and in its engine core. On two slow
cores that was half of the time until they were ready. What an engine is then is what `python -m MODULE …` would have
been: the same module with the same arguments, environment, log and parent, in a session of its own.

It reads orders from stdin, a line each, and writes to the descriptor that is its argument:

1. order: `{"engines": [{"name": …, "argv": […], "env": {…}, "log": PATH}, …]}`, where `env` is laid over its own;
2. report, once for each engine: `NAME PID`, from the fork itself, which waits then;
3. order: `go`, after which all of them run.

When stdin ends, it ends, and with it forks that were not told to go.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from multiprocessing import util
from pathlib import Path
from typing import Any, BinaryIO

from prfaas.core.bounded_file import MODEL_BYTES, file_json

# What an API server and an engine core on CPUs import until they are ready, by their first modules.
_IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "prfaas.serving.engines.vllm.connector",
)
_LOOK_S = 0.001
# What multiprocessing gives to the interpreters that it spawns, in every Python from 3.11 to 3.13.
_SPAWNED = "--multiprocessing-fork"
_LENGTH_BYTES = 8
# More than any of multiprocessing's children gets.
_MOST_DESCRIPTORS = 64


def stand_by(count: int = 1) -> str | None:
    """Fork those that wait, and have multiprocessing use them for the next children that it would spawn.

    vLLM's CPU backend starts the engine core as a new interpreter, by multiprocessing's "spawn", and the core its ranks
    where it has several; each imports all of vLLM once more. A fork that was made before, while this process had no
    threads, has imported it already.

    Later children are spawned as ever; so is one whose fork has gone. Forks end when this process does. Call it while
    there are no threads.

    Returns:
        None in this process. In a fork, once it is needed: the program that the new interpreter would have run by
        `-c`. Its descriptors, arguments and environment are what that interpreter's would be.
    """
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            # Who else had an end of theirs open would keep forks that nobody needs from ending.
            for connection in (here, *(other for _, other in waiting)):
                connection.close()
            return _become_child(there)
        there.close()
        waiting.append((pid, here))
    spawn = util.spawnv_passfds

    def hand_over(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        # multiprocessing's tracker of resources is started by this function too.
        if _SPAWNED not in args:
            return spawn(path, args, passfds)
        pid, here = waiting.pop(0)
        if not waiting:
            util.spawnv_passfds = spawn
        with contextlib.suppress(OSError), here:
            _send_order(here, args, sorted({int(each) for each in passfds}))
            return pid
        return spawn(path, args, passfds)

    util.spawnv_passfds = hand_over
    return None


def _send_order(connection: socket.socket, args: Sequence[Any], descriptors: Sequence[int]) -> None:
    order = {"args": [*map(os.fsdecode, args)], "descriptors": descriptors, "env": dict(os.environ)}
    message = json.dumps(order).encode()
    socket.send_fds(connection, [len(message).to_bytes(_LENGTH_BYTES, "little")], descriptors)
    connection.sendall(message)


def _become_child(connection: socket.socket) -> str:
    """Wait for the order, and take on what it says. Ends this process if none comes."""
    head, received, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    if len(head) < _LENGTH_BYTES:
        os._exit(0)
    with connection, connection.makefile("rb") as reader:
        order = json.loads(reader.read(int.from_bytes(head, "little")))
    _renumber(received, order["descriptors"])
    os.environ.clear()
    os.environ.update(order["env"])
    args = order["args"]
    program = args.index("-c")
    sys.argv = ["-c", *args[program + 2 :]]
    return str(args[program + 1])


def _renumber(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the other process: what it sends refers to them by these."""
    above = max((*received, *wanted), default=0) + 1
    moved = [fcntl(descriptor, F_DUPFD_CLOEXEC, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Engine:
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path


def main() -> None:
    """Import, then fork as ordered. Returns in forks too, as engines that have ended."""
    report, parent = int(sys.argv[1]), os.getppid()
    # Nothing of what is imported becomes garbage, and to look for some again and again takes a fifth of the time.
    gc.disable()
    _import_modules(_IMPORTED)
    gc.enable()
    orders: BinaryIO = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 (as long as this process)
    while line := orders.readline():
        engines = [
            _Engine(name=each["name"], argv=each["argv"], env=each["env"], log=Path(each["log"]))
            for each in json.loads(line)["engines"]
        ]
        for engine in engines:
            import_model(Path(_option(engine.argv, "--model") or ""))
        # Of several threads only one would be in a fork, and what the others hold would be held for ever.
        can_fork = len([*Path("/proc/self/task").iterdir()]) == 1
        own = _fork_all(engines, orders, report, parent)
        if own is not None:
            _run(own, anew=not can_fork)
            return
    # What was imported has much to say when it is unloaded.
    os._exit(0)


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        # Another version of vLLM may have it elsewhere: the engine will find it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_model(folder: Path) -> None:
    """The code of the model in a folder, if it is one.

    It is registered as a class that is there. Of one that is still to be imported every engine would ask a process of
    its own what it can do, so as not to touch CUDA, unless vLLM has written that down on this machine before.
    """
    # Whatever is wrong with it, the engine says so.
    with contextlib.suppress(Exception):
        architectures = file_json(folder / "config.json", MODEL_BYTES)["architectures"]
        from vllm.model_executor.models import ModelRegistry

        for architecture in architectures:
            registered: Any = ModelRegistry.models[architecture]
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def _fork_all(engines: Sequence[_Engine], orders: BinaryIO, report: int, parent: int) -> _Engine | None:
    """None in this process, which has told them to go; in each fork its engine, once it may go."""
    go, start = os.pipe()
    # Objects that are never looked at again stay in memory that all share.
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    for engine in engines:
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            os.close(start)
            _settle(engine, report, between, parent)
            if os.read(go, 1) == b"":
                os._exit(0)
            os.close(go)
            return engine
        os.waitpid(between, 0)
    if orders.readline():
        os.write(start, b"." * len(engines))
    os.close(start)
    os.close(go)
    return None


def _settle(engine: _Engine, report: int, between: int, parent: int) -> None:
    """A session, an output and no input; then tell the parent, once it is that."""
    os.setsid()
    log = os.open(engine.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.close(log)
    os.close(nothing)
    # Who forked this ends at once, and the nearest ancestor that takes orphans takes it: the one that gives orders.
    while os.getppid() == between:
        time.sleep(_LOOK_S)
    if os.getppid() != parent:
        os._exit(1)
    os.write(report, f"{engine.name} {os.getpid()}\n".encode())
    os.close(report)


def _run(engine: _Engine, *, anew: bool) -> None:
    """Be `python -m MODULE …`; `anew`: by a new interpreter."""
    os.environ.update(engine.env)
    if anew:
        os.execv(engine.argv[0], [*engine.argv])
    with contextlib.suppress(ImportError):
        import setproctitle  # vLLM brings it

        setproctitle.setproctitle(" ".join(engine.argv))
    # Rank 0 of a data-parallel group starts its coordinator before the core.
    program = stand_by(2 if _option(engine.argv, "--data-parallel-rank") == "0" else 1)
    if program is not None:
        # This is the engine core, before it has threads.
        ranks = _ranks_of(engine.argv)
        if ranks > 1:
            program = stand_by(ranks) or program
        exec(program, {"__name__": "__main__"})
        return
    sys.argv = list(engine.argv[2:])
    runpy.run_module(engine.argv[2], run_name="__main__", alter_sys=True)


def _ranks_of(argv: Sequence[str]) -> int:
    """How many processes the engine core starts for them; one is in the core's own."""
    return int(_option(argv, "--tensor-parallel-size") or 1)


def _option(argv: Sequence[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


if __name__ == "__main__":
    main()
