"""bench/gpu/pack.py: what it packs is all that vLLM imports for CUDA beside torch, Triton, numpy and transformers."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pack
import pytest

pytestmark = pytest.mark.slow("a process imports vLLM and its models")

ON_THE_MACHINE = ("torch", "triton", "numpy", "transformers")
# What the newest transformers needs and older ones do not.
ONLY_NEWER = {
    *("annotated-doc", "annotated-types", "anyio", "h11", "httpcore2", "httpx2", "idna", "pydantic"),
    *("pydantic-core", "truststore", "typing-inspection"),
}

# vLLM's classes for CUDA on a machine without: their platform, and all that engines of the kit import.
IMPORTS = """
import importlib, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from changing import change_modules, interpret_triton
from kimi_classes import MODULE, rocms_classes
interpret_triton()
change_modules({MODULE: rocms_classes}, instead=[MODULE])
import vllm.platforms, vllm.platforms.cuda
from vllm.platforms.interface import DeviceCapability

class Platform(vllm.platforms.cuda.CudaPlatform):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))

vllm.platforms._current_platform = Platform()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert importlib.import_module("vllm").__file__.startswith(os.environ["PACK"])
"""
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.warmup",
    "vllm.v1.executor.uniproc_executor",
    "vllm.compilation.breakable_cudagraph",
    "vllm.kernels.vllm_c",
    "vllm.model_executor.models.qwen3_next",
    "vllm.model_executor.models.qwen3_next_mtp",
    "vllm.model_executor.layers.fused_moe.experts.triton_moe",
    "vllm.models.kimi_k3",
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.mla.triton_mla",
    "vllm.v1.attention.backends.mla.prefill.cpu_sdpa",
    "prfaas.serving.engines.vllm.connector",
    "prfaas.serving.engines.vllm.reference",
    "prfaas.serving.live",
    # The kit's own programs.
    "engines",
    "workers",
    "pages",
)


def needed(names: Iterable[str]) -> set[str]:
    """Distributions and what they need, by their normal names, of those that are installed."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found or not list(importlib.metadata.distributions(name=name)):
            continue
        found.add(name)
        required = importlib.metadata.requires(name) or []
        left += [
            match[0]
            for each in required
            if "extra ==" not in each and (match := re.match(r"[\w.-]+", each)) is not None
        ]
    return found


def link(folder: Path, names: Iterable[str]) -> None:
    """A folder with these distributions alone."""
    folder.mkdir()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {Path(str(file)).parts[0] for file in distribution.files or () if ".." not in file.parts}
        for top in tops:
            place = folder / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))))


def test_a_pack_is_all_that_a_machine_lacks(tmp_path: Path) -> None:
    pack.put_vllm(tmp_path / "pack")
    wheels = {name for name in pack.WHEELS if list(importlib.metadata.distributions(name=name))}
    assert wheels == set(pack.WHEELS)
    link(tmp_path / "wheels", pack.WHEELS)
    link(tmp_path / "machine", needed(ON_THE_MACHINE) - ONLY_NEWER)
    root = Path(__file__).parents[2]
    own = ("", "src", "bench", "bench/gpu", "tests/integration/shims")
    folders = [root / name for name in own]
    folders += [tmp_path / name for name in ("pack", "wheels", "machine")]
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PACK": str(tmp_path), "HOME": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-S", "-s", "-c", IMPORTS, *MODULES], env=env, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr[-2000:]


def test_a_pack_has_no_binary_of_vllm_and_its_name(tmp_path: Path) -> None:
    pack.put_vllm(tmp_path)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert not suffixes & pack.BINARIES
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", pack.vllm_version())
    assert "cpu" not in found.version
