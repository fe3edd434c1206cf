"""Each extra of the wheel in an environment of its own: it is installed as a user would, and what it promises is used.

`make test-extras`, or `make test-extras EXTRAS="plan gateway"`. `lowest` is `all` with the lowest versions that
pyproject.toml allows. Packages come from where pip is set up to look. vLLM is
not among them: an engine's environment is checked as far as it goes without it.
"""

import shlex
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]

BASE = (
    "prfaas --version",
    "prfaas --help",
    "prfaas models kimi-k2",
    "prfaas init -o .",
    "prfaas init paper -o .",
    'python -c \'import prfaas.api as api; api.load_deployment("local.yaml"); api.kv_model("kimi-k2")\'',
)
PLAN = (
    "prfaas plan paper.yaml --sweep slo.ttft_s=2:10:2 --plot plots",
    "prfaas simulate paper.yaml --requests 500 --report out",
    "prfaas bandwidth internal-1t --gpus 32",
    "prfaas simulate paper.yaml --requests 500 --records rows.csv.gz",
)
RECORDS = (
    "python -c 'from prfaas import api; api.simulate(api.example_path(\"paper\"), requests=50).to_dataframe()'",
)
GATEWAY = (
    "python -c 'import prfaas.serving.gateway.server, prfaas.serving.control.plane, prfaas.tools.replay'",
    "python -c 'import prfaas.serving.engines.synthetic.server, prfaas.tools.demo, prfaas.tools.doctor'",
)
ENGINE = (
    "python -c 'import numpy, prometheus_client, prfaas.serving.transport, prfaas.serving.engines.command'",
)

COMMANDS = {
    "": BASE,
    "engine": BASE + ENGINE,
    "gateway": BASE + GATEWAY,
    "plan": BASE + PLAN,
    "all": BASE + ENGINE + GATEWAY + PLAN + RECORDS,
}
# What must end with exit code 2 and the name of the extra.
REFUSED = {
    "": {"prfaas plan paper.yaml": ".[plan]", "prfaas doctor local.yaml": ".[gateway]"},
    "engine": {"prfaas simulate paper.yaml": ".[plan]"},
    "gateway": {"prfaas plan paper.yaml": ".[plan]"},
    "plan": {"prfaas demo": ".[gateway]"},
}
# Not in an environment that has no use for them.
UNWANTED = {
    "": ("numpy", "aiohttp", "vllm"),
    "engine": ("scipy", "matplotlib", "aiohttp", "vllm"),
    "gateway": ("matplotlib", "vllm"),
    "plan": ("tokenizers", "httptools", "vllm", "pandas"),
    "all": ("vllm",),
}
LOWEST = "lowest"
IN_THE_WHEEL = (
    "prfaas/py.typed",
    "prfaas/docs/reference/deployment-file.md",
    "prfaas/examples/local.yaml",
    "prfaas/examples/paper.yaml",
    "prfaas/examples/recipes/gpt-oss-120b.yaml",
    "prfaas/examples/recipes/gpt-oss-120b/h200.yaml",
    "prfaas/examples/traces/mooncake_burst.jsonl.gz",
    "prfaas/core/kv/data/published.yaml",
    "prfaas/serving/engines/trained/smollm2/config.json",
    "prfaas/serving/engines/trained/gemma3/chat_template.jinja",
    "prfaas/core/latency/data/internal-1t-h200.yaml",
)


def main(extras: list[str]) -> int:
    """Check the wheel, then each extra; 0 if everything is as promised."""
    with tempfile.TemporaryDirectory(prefix="prfaas-extras-") as directory:
        wheel = _built(Path(directory))
        names = zipfile.ZipFile(wheel).namelist()
        failures = [f"the wheel has no {name}" for name in IN_THE_WHEEL if name not in names]
        for extra in extras or (*COMMANDS, LOWEST):
            started_s = time.monotonic()
            found = _check(extra, wheel, Path(directory, extra or "base"))
            failures += found
            state = "as promised" if not found else f"{len(found)} failures"
            print(f"{extra or 'base':8} {state} ({time.monotonic() - started_s:.0f} s)", flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _built(directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(directory),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("prfaas-*.whl")
    return wheel


def _check(extra: str, wheel: Path, directory: Path) -> list[str]:
    venv.create(directory, with_pip=True)
    run = _Environment(directory)
    only = ""
    if extra == LOWEST:
        directory.joinpath("lowest.txt").write_text("\n".join(_lowest(wheel)), encoding="utf-8")
        extra, only = "all", "-c lowest.txt"
    installed = run(f"python -m pip install -q {only} '{wheel}{f'[{extra}]' if extra else ''}'")
    if installed.returncode != 0:
        return [f"{extra or 'base'}: can't be installed: {installed.stderr}"]
    failures = []
    for command in COMMANDS[extra]:
        done = run(command)
        if done.returncode != 0:
            failures.append(f"{extra or 'base'}: {command}: {done.stderr[-1000:]}")
    for command, named in REFUSED.get(extra, {}).items():
        done = run(command)
        if done.returncode != 2 or done.stderr.count("\n") != 1 or named not in done.stderr:
            failures.append(
                f"{extra or 'base'}: {command}: must be refused with {named}: {done.stderr[-1000:]}"
            )
    brought = [each for each in UNWANTED[extra] if run(f"python -c 'import {each}'").returncode == 0]
    return failures + [f"{extra or 'base'}: brings {package}" for package in brought]


def _lowest(wheel: Path) -> list[str]:
    """Constraints that pin each package of `all` to the highest of its floors."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        said = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    floors: dict[str, Version] = {}
    for wanted in map(Requirement, said):
        for bound in wanted.specifier:
            if bound.operator == ">=" and _is_of_all(wanted):
                floor = Version(bound.version)
                floors[wanted.name] = max(floors.get(wanted.name, floor), floor)
    return [f"{name}=={floor}" for name, floor in floors.items()]


def _is_of_all(wanted: Requirement) -> bool:
    extras = ("", "engine", "gateway", "plan", "records", "trace", "fast", "trained")
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)


class _Environment:
    """Runs commands of a virtual environment, in its folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, command: str) -> "subprocess.CompletedProcess[str]":
        program, *words = shlex.split(command)
        argv = [str(self._directory / "bin" / program), *words]
        return subprocess.run(argv, cwd=self._directory, capture_output=True, text=True, timeout=900)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
