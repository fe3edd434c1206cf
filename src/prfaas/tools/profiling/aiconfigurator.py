"""Times of NVIDIA's AIConfigurator: kernels that were measured on real GPUs, added up over a model's layers.

The package `aiconfigurator-core` (Apache-2.0) brings the measurements with it, for the machines in `SYSTEMS`. It reads
the model from the same `config.json`. What it does not know is no mistake of the user: `EstimatorGap` says it.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.work import WeightFormat

SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""Our names of GPUs → AIConfigurator's systems."""

# Names of its quantizations: (matrices, experts). Formats that aren't here are left to what it reads in the file.
_QUANTIZATIONS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("fp8_block", "fp8_block"),
    "int4": ("int4_wo", "int4_wo"),
    "int4-experts": ("bfloat16", "int4_wo"),
    "mxfp4-experts": ("bfloat16", "w4a16_mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
}

PREFILL_BAND = (0.5, 1.8)
DECODE_BAND = (0.6, 1.4)
"""Measured over estimated times: 8 of 10 public measurements are between these (`docs/explanation/estimates.md`)."""


class EstimatorGap(ProfileError):
    """AIConfigurator can't say; the text says why, and another estimate can be made."""


class AiconfiguratorTimes:
    """Times of one vLLM instance of `ranks` GPUs with tensor parallelism, attention and experts alike."""

    def __init__(self, config: Mapping[str, Any], gpu: str, ranks: int, weights: WeightFormat | None) -> None:
        """Compile the model for the machine.

        Args:
            config: what its `config.json` holds.
            gpu: a name in `SYSTEMS`.
            ranks: GPUs of the instance.
            weights: how they are stored; None: as the `config.json` says.

        Raises:
            EstimatorGap: the package is missing, or knows the model, the GPU or the format not.
        """
        if gpu not in SYSTEMS:
            raise EstimatorGap(f'aiconfigurator has no measurements of "{gpu}", only of {", ".join(SYSTEMS)}')
        try:
            from aiconfigurator_core.sdk import EngineHandle
        except ImportError:
            raise EstimatorGap(
                "aiconfigurator-core is not installed: pip install 'prfaas[estimate]'"
            ) from None
        matrices, experts = _QUANTIZATIONS[weights.name] if weights is not None else (None, None)
        with _explained(), tempfile.TemporaryDirectory() as directory:
            # It reads a directory that looks like a checkpoint.
            (Path(directory) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            self._engine = EngineHandle.compile(
                directory,
                SYSTEMS[gpu],
                "vllm",
                tp_size=ranks,
                moe_tp_size=ranks,
                moe_ep_size=1,
                gemm_quant_mode=matrices,
                moe_quant_mode=experts,
            )

    def prefill_s(self, tokens: float) -> float:
        """Seconds of the engine's steps for a prompt of `tokens` tokens, one request alone.

        Raises:
            EstimatorGap: it has no measurements near.
        """
        with _explained():
            return float(self._engine.predict_prefill_latency(1, int(tokens))) / 1000

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one step of `batch` requests with `context_tokens` tokens each.

        Raises:
            EstimatorGap: it has no measurements near.
        """
        with _explained():
            return float(self._engine.predict_decode_latency(int(batch), int(context_tokens))) / 1000


def version() -> str:
    """Of the installed package."""
    from importlib.metadata import version as of

    return of("aiconfigurator-core")


@contextmanager
def _explained() -> Iterator[None]:
    """Its errors as ours: it raises many classes, some out of its compiled part."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EstimatorGap(f"aiconfigurator can't estimate it ({reason[:200]})") from error
