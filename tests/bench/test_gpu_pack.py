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

# vLLM's platform for CUDA on a machine without.
PLATFORM = """
import importlib, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from changing import change_modules, interpret_triton
from kimi_classes import MODULE, rocms_classes
interpret_triton()
change_modules({MODULE: rocms_classes}, instead=[MODULE])
import vllm.platforms, vllm.platforms.cuda
from vllm.platforms.interface import DeviceCapability

class Platform(vllm.platforms.cuda.CudaPlatform):
    device_name, dispatch_key = "cpu", "CPU"
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "none")

vllm.platforms._current_platform = Platform()
"""
IMPORTS = """
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


# Routing, alignment, activation and sum are operators of the pack; the product is vLLM's own Triton kernel. In fp16:
# the interpreter of Triton 3.9 multiplies matrices of bf16 wrongly, by orders of magnitude.
EXPERTS = """
import torch
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

torch.manual_seed(1)
experts, taken, hidden, inner, tokens = 4, 2, 64, 32, 11
x = torch.randn(tokens, hidden).half()
up = (torch.randn(experts, 2 * inner, hidden) / 8).half()
down = (torch.randn(experts, hidden, inner) / 6).half()
gates = torch.randn(tokens, experts)
weights, ids, *_ = fused_topk(x, gates, taken, True)
found = fused_experts(x, up, down, weights, ids)
both = torch.einsum("th,eih->tei", x.float(), up.float())
each = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(both[..., :inner]) * both[..., inner:], down.float())
scores = gates.softmax(-1)
best = scores.topk(taken).indices
scores = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
wanted = torch.einsum("te,teh->th", scores / scores.sum(-1, keepdim=True), each)
assert (found.float() - wanted).abs().max() < 0.005, (found, wanted)
"""


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


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an interpreter that has what the machine has, and a pack."""
    directory = tmp_path_factory.mktemp("machine")
    pack.put_vllm(directory / "pack")
    link(directory / "wheels", pack.WHEELS)
    link(directory / "machine", needed(ON_THE_MACHINE) - ONLY_NEWER)
    root = Path(__file__).parents[2]
    own = ("", "src", "bench", "bench/gpu", "tests/integration/shims")
    folders = [*(root / name for name in own), *(directory / name for name in ("pack", "wheels", "machine"))]
    path = os.pathsep.join(map(str, folders))
    return {"PYTHONPATH": path, "PACK": str(directory), "HOME": str(directory), "TORCH_COMPILE_DISABLE": "1"}


def run(program: str, machine: dict[str, str], *arguments: str) -> None:
    told = subprocess.run(
        [sys.executable, "-S", "-s", "-c", PLATFORM + program, *arguments],
        env=machine,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr[-2000:]


def test_a_pack_is_all_that_a_machine_lacks(machine: dict[str, str]) -> None:
    run(IMPORTS, machine, *MODULES)


def test_vllms_kernel_of_experts_is_right_with_these_operators(machine: dict[str, str]) -> None:
    run(EXPERTS, machine)


def test_a_pack_has_no_binary_of_vllm_and_its_name(tmp_path: Path) -> None:
    pack.put_vllm(tmp_path)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert not suffixes & pack.BINARIES
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", pack.vllm_version())
    assert "cpu" not in found.version
