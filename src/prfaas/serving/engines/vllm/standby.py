"""Forks of this process that wait to become its next children.

vLLM's CPU backend starts the engine core as a new interpreter, by multiprocessing's "spawn", and the core its ranks
where it has several; each imports all of vLLM once more. A fork that was made before, while this process had no
threads, has imported it already.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from multiprocessing import util
from typing import Any

# What multiprocessing gives to the interpreters that it spawns, in every Python from 3.11 to 3.13.
_SPAWNED = "--multiprocessing-fork"
_LENGTH_BYTES = 8
# More than any of multiprocessing's children gets.
_MOST_DESCRIPTORS = 64


def stand_by(count: int = 1) -> str | None:
    """Fork those that wait, and have multiprocessing use them for the next children that it would spawn.

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
