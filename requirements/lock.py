"""Writes the hashes of `cpu.lock` again, from the pins in it: `uv pip compile` is asked for every file of each version.

Change a pin in `cpu.lock` (its hashes may stay or go), then run `python requirements/lock.py`. It needs uv.
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("cpu.lock")
PYTHONS = ("cp311", "cp312", "cp313")
HEADER = """\
# Every package of the environment but torch, pinned, with hashes of its files for CPython 3.11-3.13, Linux x86-64.
# From `pip freeze`, less torchvision, torchaudio and torchcodec (see the Makefile); hashes by requirements/lock.py.
# torch is in torch.txt, without a hash: its CPU build is not on the registry that the hashes come from. Each machine
# gets it from where its pip is set up to look, and one version number stands for files of different content there.
"""


def main() -> None:
    """Read the pins, ask for their files, and write both."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", LOCK.read_text(), re.MULTILINE)
    packages = {_key(package["name"]): package for package in _packages(pins)}
    lines = [HEADER]
    for name, version in pins:
        hashes = sorted(_hashes(packages[_key(name)]))
        lines.append(
            " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{each}" for each in hashes)]) + "\n"
        )
    LOCK.write_text("".join(lines))


def _packages(pins: list[tuple[str, str]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        wanted, found = Path(directory, "wanted.in"), Path(directory, "pylock.toml")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins))
        options = [
            "--no-deps",
            "--universal",
            "--python-version",
            "3.11",
            "--format",
            "pylock.toml",
            "--quiet",
        ]
        subprocess.run(["uv", "pip", "compile", *options, "-o", found, wanted], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(found.read_text())["packages"]
        return packages


def _hashes(package: dict[str, Any]) -> set[str]:
    """Of the wheels that may be installed; of the source where there is no wheel."""
    wheels = [each for each in package.get("wheels", ()) if _fits(each["url"].rpartition("/")[2])]
    files = wheels or [package["sdist"]]
    return {file["hashes"]["sha256"] for file in files}


def _fits(wheel: str) -> bool:
    """Whether a wheel may be installed by one of `PYTHONS` on Linux x86-64 with glibc."""
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    if platform != "any" and not ("x86_64" in platform and "linux" in platform and "musl" not in platform):
        return False
    if abi == "abi3":
        return any(
            int(tag.removeprefix("cp3") or "0") <= 13 for tag in python.split(".") if tag.startswith("cp3")
        )
    return any(tag.startswith("py3") or tag == "py2.py3" for tag in python.split(".")) or abi in PYTHONS


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
