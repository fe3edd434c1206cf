"""bench/gpu/engines.py and check.sh where there is no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import engines
import pytest

from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.command import vllm_command

pytestmark = pytest.mark.slow("imports torch, and writes checkpoints")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("graphs", engines.GRAPHS)
@pytest.mark.parametrize("name", engines.MODELS)
def test_gpu_engines_take_nothing_compiled(name: str, graphs: str, tmp_path: Path) -> None:
    path = engines.write(tmp_path, engines.MODELS[name], engines.LOADS["cuda"], "cuda", graphs)
    deployment = load_deployment(path)
    for instance in deployment.instances:
        command = vllm_command(deployment, instance)
        options = dict(zip(command.argv, command.argv[1:], strict=False))
        compilation = json.loads(options["--compilation-config"])
        assert compilation == {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": engines.GRAPHS[graphs]}
        assert json.loads(options["--attention-config"])["backend"].startswith("TRITON_")
        assert "--enforce-eager" not in command.argv
        assert command.env.items() >= engines.NO_BINARIES.items()


def found(**changed: float) -> engines.Found:
    pace = engines.Pace(2.0, 900.0)
    values = {
        "prompts": 3,
        "exact": 2,
        "ties": 1,
        "likely_share": 1.0,
        "loaded": 3,
        "loads_failed": 0,
        "prefill_ms": 10.0,
        "prefill_sending_ms": 11.0,
    }
    return engines.Found(  # type: ignore[arg-type]
        model="m", device="cpu", graphs="none", without=pace, having=pace, **{**values, **changed}
    )


def test_what_is_wrong_is_said() -> None:
    assert found().problem is None
    assert found(exact=1, likely_share=0.8).problem is None
    assert "40%" in (found(exact=1, likely_share=0.4).problem or "")
    assert "2 of 3 prompts were loaded" in (found(loaded=2).problem or "")
    assert "1 loads failed" in (found(loads_failed=1).problem or "")


def test_a_reason_is_the_first_thing_that_an_engine_raised(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "INFO all is well\nERROR x.py:3] AttributeError: no attribute 'rotary'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    error = OSError("engine a ended\nwith this log: …")
    assert engines.reason(error, tmp_path) == (
        "engine a ended (a.log: AttributeError: no attribute 'rotary')"
    )
    assert engines.reason(error, tmp_path / "none") == "engine a ended"


def checked(tmp_path: Path, *, device: str = "cpu", **env: str) -> subprocess.CompletedProcess[str]:
    """What check.sh says, with this interpreter."""
    return subprocess.run(
        [str(ROOT / "bench/gpu/check.sh"), device],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), **env},
        capture_output=True,
        text=True,
    )


def python(directory: Path, script: str) -> str:
    """An interpreter of a shell script, which has this one's path as REAL."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\nREAL={sys.executable}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_step_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    script = 'case "$1" in -c) exec $REAL "$@" ;; esac\necho before >&2; echo "no $1" >&2; echo >&2; exit 3'
    told = checked(tmp_path, device="cuda", PYTHON=python(tmp_path, script))
    assert told.returncode == 1, told.stderr
    lines = told.stdout.splitlines()
    assert re.fullmatch("workers: failed after [0-9]+ s: no bench/gpu/workers.py", lines[0])
    assert [line.split(":")[0] for line in lines] == [
        *("workers", "pages", "kimi-linear", "qwen3-next-mtp"),
        *("kimi-linear-piecewise", "qwen3-next-mtp-piecewise"),
    ]


def test_a_step_that_runs_says_nothing_of_its_own(tmp_path: Path) -> None:
    script = 'case "$1" in -c) exec $REAL "$@" ;; esac\necho "$1"'
    told = checked(tmp_path, PYTHON=python(tmp_path, script))
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.splitlines() == [f"bench/gpu/{name}.py" for name in ("workers", "engines", "engines")]


def test_an_interpreter_without_vllm_is_told_what_it_lacks(tmp_path: Path) -> None:
    bare = python(tmp_path, 'exec $REAL -S "$@"')
    told = checked(tmp_path, PYTHON=bare, PACK=str(tmp_path / "none"), PYTHONPATH="")
    assert told.returncode == 2
    assert "lacks torch numpy vllm" in told.stderr and "pack.py" in told.stderr


def test_a_pack_for_another_python_is_refused(tmp_path: Path) -> None:
    bare = python(tmp_path, 'exec $REAL -S "$@"')
    (tmp_path / "pack" / "vllm").mkdir(parents=True)
    (tmp_path / "pack" / "pack.json").write_text('{"python": "2.7", "vllm": "0.32.0"}')
    told = checked(tmp_path, PYTHON=bare, PACK=str(tmp_path / "pack"), PYTHONPATH="")
    assert told.returncode == 2
    assert "is for Python 2.7" in told.stderr
