"""Whether the offline commands print and write the same as at another commit, byte for byte.

    python bench/same_outputs.py --against COMMIT [--only REGEX] [--keep DIR] [--timeout S] [--json FILE]

Example, without the studies: python bench/same_outputs.py --against HEAD~1 --only "^(?!study)"

Every command runs as `python -m prfaas.cli.main …` in both trees at the same time: in the working tree as it is, and
in a temporary git worktree of the commit. What counts: exit code, stdout, every file that is written, and stderr where
the exit code is not 0. Hash seed, terminal width, time zone and the date in plots are fixed.

Only these differences are allowed: the tree's own path and the folder for written files (each is replaced by a name).
Timings go to stderr, and stderr of what succeeds is not compared.

With `--keep` the commit's outputs are kept in a folder and need not be made again. Exit code 1 if something differs.
"""

import argparse
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile, zip_longest
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from prfaas.cli.study_folder import study_names

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = "OUT"
EXAMPLES = ("dense", "local", "local-wide", "multi", "paper", "synthetic")
TRACE = "examples/traces/mooncake_burst.jsonl.gz"
POLICIES = "paper,tilted,static_threshold"
WITH_HELP = ("bandwidth", "engine", "explain", "models", "plan", "profile", "replay", "reproduce", "simulate")
TIMEOUT_S = 600.0
SHOWN_CHARS = 90
CHARS_BEFORE = 20
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "COLUMNS": "120",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "MPLBACKEND": "Agg",
    "SOURCE_DATE_EPOCH": "1700000000",
    "OMP_NUM_THREADS": "1",
}


def commands() -> Iterator[str]:
    """Without `prfaas`, the quick ones first. `OUT` is a folder for what is written."""
    yield from ("models", "models --json", "models kimi-k2 --tensor-parallel 8")
    yield from (
        "bandwidth ring-2.5-1t --gpus 512 --length 32768",
        "bandwidth ring-2.5-1t --gpus 512 --json",
        "bandwidth internal-1t --gpus 32 --lognormal 9.9,1,19400,131072",
        f"bandwidth internal-1t --gpus 32 --trace {TRACE}",
    )
    yield "schema"
    for kind in ("systemd", "compose", "kubernetes"):
        yield f"emit {kind} examples/two-datacenters.yaml --out OUT"
    yield from ("--help", *(f"{name} --help" for name in WITH_HELP))
    for example in EXAMPLES:
        yield f"plan examples/{example}.yaml"
        yield f"plan examples/{example}.yaml --json"
    sweep = "--sweep links[0].bandwidth=10e9:400e9:6"
    yield f"plan examples/paper.yaml {sweep}"
    yield f"plan examples/paper.yaml {sweep} --json"
    yield f"plan examples/paper.yaml {sweep} --plot OUT"
    yield from ("reproduce", "reproduce --json", "reproduce --out OUT/reproduction.md --plot OUT")
    paper = f"simulate examples/paper.yaml --load 0.9 --compare {POLICIES} --requests 3000"
    yield paper
    yield f"{paper} --json"
    yield f"{paper} --report OUT"
    yield f"{paper} --bursts --seed 3"
    short = "simulate examples/paper.yaml --requests 2000"
    yield f"{short} --policy local_only --rate 2 --json"
    yield f"{short} --link-fluctuation 0.3:30 --json"
    yield f"{short} --set links[0].bandwidth=10e9 --json"
    traced = f"simulate examples/paper.yaml --trace {TRACE} --requests 1500"
    yield f"{traced} --compare paper,tilted"
    yield f"{traced} --cache-memory 32GiB --report OUT --json"
    yield f"{traced} --no-caches --json"
    yield "simulate examples/multi.yaml --requests 2000"
    yield "simulate examples/multi.yaml --requests 2000 --bursts --compare tilted,round_robin --json"
    yield "simulate examples/dense.yaml --duration 300 --caches --json"
    yield "study none"
    # All there are; one that the other commit lacks is a difference.
    for study in study_names():
        yield f"study {study} --quick --jobs 1 --out OUT --json"


@dataclass(frozen=True, slots=True)
class Output:
    """`parts`: what is compared, by name: the exit code, stdout, stderr of a failure, and written files."""

    parts: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """`difference` is empty where both are the same. `exit_code`: the working tree's; "" if it did not end."""

    command: str
    exit_code: str
    difference: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", required=True, help="what to compare with")
    parser.add_argument("--only", metavar="REGEX", default="", help="only commands in which this is found")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the commit's outputs, and use them again"
    )
    parser.add_argument("--timeout", type=float, metavar="S", default=TIMEOUT_S, help="of each command")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    wanted = [command for command in commands() if re.search(options.only, command)]
    if not wanted:
        sys.exit(f"no command has {options.only!r} in it")
    # The worktree is removed in a `finally` block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    commit = commit_hash(options.against)
    with worktree(commit) as tree, tempfile.TemporaryDirectory() as scratch:
        rows = compare_all(wanted, tree, Path(scratch), kept_outputs(options.keep, commit), options.timeout)
    different = sum(bool(row.difference) for row in rows)
    Console(width=160).print(table_of(rows))
    print(f"{len(rows) - different} of {len(rows)} commands give the same as {options.against}")
    if options.json is not None:
        options.json.write_text(json.dumps(document_of(rows), indent=2, ensure_ascii=False) + "\n")
    if different:
        sys.exit(1)


def compare_all(
    wanted: Sequence[str], tree: Path, scratch: Path, kept: Path | None, timeout_s: float
) -> Sequence[Row]:
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(2) as pool:
        for command in progress.track(wanted):
            progress.console.print(command, markup=False, highlight=False)
            now = pool.submit(output_of, command, REPOSITORY, scratch / "now", timeout_s)
            then = pool.submit(kept_output_of, command, tree, scratch / "old", timeout_s, kept)
            exit_code = now.result().parts.get("exit code", b"").decode()
            rows.append(Row(command, exit_code, difference(then.result(), now.result())))
    return rows


def kept_output_of(command: str, tree: Path, scratch: Path, timeout_s: float, kept: Path | None) -> Output:
    if kept is None:
        return output_of(command, tree, scratch, timeout_s)
    name = hashlib.blake2b(f"{command}{sorted(ENVIRONMENT.items())}".encode(), digest_size=12).hexdigest()
    path = kept / f"{name}.pickle"
    if path.is_file():
        return Output(pickle.loads(path.read_bytes()))
    output = output_of(command, tree, scratch, timeout_s)
    if "timeout" not in output.parts:
        path.write_bytes(pickle.dumps(dict(output.parts)))
    return output


def output_of(command: str, tree: Path, scratch: Path, timeout_s: float) -> Output:
    """What the tree's source says to a command. `scratch` is used again by the next one."""
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        out = scratch / "out"
        home = Path(directory)
        arguments = [part.replace(OUT, str(out)) for part in command.split()]
        out.mkdir()
        try:
            parts = run(arguments, tree, home, timeout_s)
            parts |= {str(path.relative_to(out)): path.read_bytes() for path in files_in(out)}
        finally:
            remove(out)
    return Output({name: masked(part, tree, out) for name, part in parts.items()})


def run(arguments: Sequence[str], tree: Path, home: Path, timeout_s: float) -> dict[str, bytes]:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree / "src"), "PRFAAS_HOME": str(home)}
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas.cli.main", *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"timeout": f"no end within {timeout_s:g} s".encode()}
    finally:
        if process.returncode is None:
            # Studies have processes of their own, which are in the same session.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    parts = {"exit code": str(process.returncode).encode(), "stdout": stdout}
    return parts | ({"stderr": stderr} if process.returncode else {})


def masked(part: bytes, tree: Path, out: Path) -> bytes:
    return part.replace(str(out).encode(), b"OUT").replace(str(tree).encode(), b"TREE")


def files_in(directory: Path) -> Sequence[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


def difference(then: Output, now: Output) -> str:
    """The first difference, as part, line, and what is there; "" if there is none."""
    if "timeout" in then.parts or "timeout" in now.parts:
        return "timeout: nothing is known of it"
    for name in dict.fromkeys((*then.parts, *now.parts)):
        if name not in now.parts:
            return f"{name}: is not there now"
        if name not in then.parts:
            return f"{name}: was not there"
        if then.parts[name] != now.parts[name]:
            return f"{name}, {first_line(then.parts[name], now.parts[name])}"
    return ""


def first_line(then: bytes, now: bytes) -> str:
    try:
        lines = zip_longest(then.decode().splitlines(), now.decode().splitlines(), fillvalue="(end)")
    except UnicodeDecodeError:
        return f"binary, {len(then)} bytes before and {len(now)} now"
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
            at = max(same - CHARS_BEFORE, 0)
            return f"line {number}:\n- {old[at : at + SHOWN_CHARS]}\n+ {new[at : at + SHOWN_CHARS]}"
    return "only in the ends of lines"


def kept_outputs(directory: Path | None, commit: str) -> Path | None:
    if directory is None:
        return None
    path = directory / commit
    path.mkdir(parents=True, exist_ok=True)
    return path


def commit_hash(commit: str) -> str:
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "--verify", f"{commit}^{{commit}}"]
    found = subprocess.run(git, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{commit} is no commit here: {found.stderr.strip()}")
    return found.stdout.strip()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit, for a while."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True, stdout=sys.stderr)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True, stdout=sys.stderr)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("command", "exit code", "", "first difference")
    for row in rows:
        verdict = "different" if row.difference else "same"
        table.add_row(escape(row.command), row.exit_code, verdict, escape(row.difference))
    return table


def document_of(rows: Sequence[Row]) -> Mapping[str, object]:
    different = sum(bool(row.difference) for row in rows)
    figures = {
        "commands": len(rows),
        "different": different,
        "rows": [asdict(row) for row in rows],
    }
    goal = {
        "name": "commands with other outputs",
        "value": different,
        "unit": "commands",
        "goal": 0,
        "met": different == 0,
    }
    return {"figures": figures, "goals": [goal]}


if __name__ == "__main__":
    main()
