"""The fork that becomes a spawned child: which process that is, what it gets, and when it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.serving.engines.vllm import template

# Tells of its children: so many forks, and one that is spawned. LATE is set after the forks.
PROGRAM = """
import json, multiprocessing, os, sys
from prfaas.serving.engines.vllm.template import stand_by

MARK = []

def child(queue, lock):
    with lock:
        told = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0)}
        told |= {"late": os.environ.get("LATE"), "argv": sys.argv, "was_marked": bool(MARK)}
        queue.put(told)

def main():
    count = int(sys.argv[1])
    program = stand_by(count)
    if program is not None:
        exec(program, {"__name__": "__main__"})
        return
    forks = [*map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())]
    MARK.append(1)
    os.environ["LATE"] = "set"
    spawn = multiprocessing.get_context("spawn")
    # Descriptors that the fork does not have, at numbers that it may use otherwise.
    more = [os.pipe() for _ in range(8)]
    queue, lock = spawn.Queue(), spawn.Lock()
    told = []
    if "--gone" in sys.argv:
        os.kill(forks[0], 9)
        os.waitpid(forks[0], 0)
    for _ in range(count + 1):
        process = spawn.Process(target=child, args=(queue, lock))
        process.start()
        told.append(queue.get(timeout=60))
        process.join(60)
        told[-1]["code"] = process.exitcode
    print(json.dumps({"forks": forks, "pid": os.getpid(), "group": os.getpgid(0), "told": told}))

if __name__ == "__main__":
    main()
"""


def outcome(tmp_path: Path, *args: str) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), *args], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("count", [1, 3])
def test_forks_are_the_first_children_and_the_next_is_spawned(tmp_path: Path, count: int) -> None:
    told = outcome(tmp_path, str(count))
    *first, last = told["told"]
    assert [each["pid"] for each in first] == told["forks"]
    assert last["pid"] not in told["forks"]
    for each in told["told"]:
        assert each["parent"] == told["pid"]
        assert each["group"] == told["group"]
        assert each["late"] == "set"
        assert each["code"] == 0
        assert not each["was_marked"]
        assert each["argv"] == last["argv"]


def test_in_place_of_a_fork_that_has_gone_one_is_spawned(tmp_path: Path) -> None:
    told = outcome(tmp_path, "2", "--gone")
    assert [each["code"] for each in told["told"]] == [0, 0, 0]
    gone, second = told["forks"]
    pids = [each["pid"] for each in told["told"]]
    assert gone not in pids
    assert pids.index(second) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_unused_forks_end_with_their_parent(count: int) -> None:
    program = (
        "from prfaas.serving.engines.vllm.template import stand_by\n"
        f"stand_by({count})\nprint('first', flush=True)"
    )
    # Its output ends when the last process that has it open has ended.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")


@pytest.mark.parametrize("wanted", [(40, 41), (41, 40), (40, 41, 42), "free"])
def test_descriptors_get_the_numbers_of_the_other_process(wanted: tuple[int, ...] | str) -> None:
    """Also where the numbers are those of other descriptors that were received, or the next that are free."""
    child = os.fork()
    if child == 0:
        # In a process of its own, whose descriptors don't matter.
        os._exit(_renumbered(wanted))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _renumbered(wanted: tuple[int, ...] | str) -> int:
    """0 if each pipe is found at its number."""
    try:
        low, high = os.pipe()
        os.close(low)
        os.close(high)
        numbers = (high, low) if isinstance(wanted, str) else wanted
        received = (41, 42, 40)[: len(numbers)]
        for index, number in enumerate(received):
            read, write = os.pipe()
            os.write(write, str(index).encode())
            os.dup2(read, number)
            os.close(read)
            os.close(write)
        template._renumber(received, numbers)
        return int([int(os.read(number, 9)) for number in numbers] != [*range(len(numbers))])
    except BaseException:
        return 2
