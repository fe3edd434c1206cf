"""Times of NVIDIA's AIConfigurator: kernels that were measured on real GPUs, added up over a model's layers.

The package `aiconfigurator-core` (Apache-2.0) brings the measurements with it, for machines of GPUs that it has a name
of (`Gpu.aiconfigurator`). It reads the model from the same `config.json`. What it does not know is no mistake of the
user: `EstimatorGap` says it.
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from prfaas.core.extras import how_to_install
from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.roofline import REQUEST_S, Gpu
from prfaas.core.latency.work import WeightFormat, weight_format

# Names of its quantizations: (matrices, experts).
_QUANTIZATIONS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("fp8", "fp8"),
    "int4": ("int4_wo", "int4_wo"),
    "int4-experts": ("bfloat16", "int4_wo"),
    "mxfp4-experts": ("bfloat16", "w4a16_mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
}

PREFILL_BAND = (0.5, 1.3)
DECODE_BAND = (0.65, 1.25)
"""Measured over estimated times: 8 of 10 public measurements are between these (`docs/explanation/estimates.md`)."""


class EstimatorGap(ProfileError):
    """AIConfigurator can't say; the text says why, and another estimate can be made."""


class AiconfiguratorTimes:
    """Times of one vLLM instance of `ranks` GPUs with tensor parallelism, of the experts too where they can be cut."""

    def __init__(self, config: Mapping[str, Any], gpu: Gpu, ranks: int, weights: WeightFormat | None) -> None:
        """Compile the model for the machine.

        Args:
            config: what its `config.json` holds.
            gpu: one that it has measurements of.
            ranks: GPUs of the instance.
            weights: how they are stored; None: as the `config.json` says.

        Raises:
            EstimatorGap: the package is missing, or knows the model, the GPU or the format not.
        """
        if gpu.aiconfigurator is None:
            raise EstimatorGap(f'aiconfigurator has no measurements of "{gpu.name}"')
        try:
            from aiconfigurator_core.sdk import EngineHandle
        except ImportError:
            raise EstimatorGap(
                f"aiconfigurator-core is not installed: {how_to_install('estimate')}"
            ) from None
        # It warns of tables that other models need.
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        # Its own reading of the file tells kinds of fp8 apart.
        as_it_is = weights == weight_format(config)
        matrices, experts = (None, None) if weights is None or as_it_is else _QUANTIZATIONS[weights.name]
        with _explained(), tempfile.TemporaryDirectory() as directory:
            # It reads a directory that looks like a checkpoint.
            (Path(directory) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            options = {"tp_size": ranks, "gemm_quant_mode": matrices, "moe_quant_mode": experts}
            try:
                self._engine = EngineHandle.compile(
                    directory, gpu.aiconfigurator, "vllm", **options, moe_tp_size=ranks, moe_ep_size=1
                )
            except ValueError:
                # Experts that can't be cut into so many pieces are spread over the ranks as a whole.
                self._engine = EngineHandle.compile(
                    directory, gpu.aiconfigurator, "vllm", **options, moe_tp_size=1, moe_ep_size=ranks
                )

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prompt of `tokens` tokens, one request alone: the engine's steps, and what comes with a request.

        Raises:
            EstimatorGap: it has no measurements near.
        """
        with _explained():
            return REQUEST_S + float(self._engine.predict_prefill_latency(1, int(tokens))) / 1000

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one step of `batch` requests with `context_tokens` tokens each.

        Raises:
            EstimatorGap: it has no measurements near.
        """
        with _explained():
            return float(self._engine.predict_decode_latency(int(batch), int(context_tokens))) / 1000


def brought_config(name: str) -> Path | None:
    """The `config.json` that the package brings of a model, by its name on the hub or the part behind the "/".

    Returns:
        None where it has none, or is not installed.
    """
    found = find_spec("aiconfigurator_core")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        for file in sorted(Path(folder, "model_configs").glob("*_config.json")):
            hub = file.name.removesuffix("_config.json").replace("--", "/", 1).lower()
            if name.replace("--", "/", 1).lower() in (hub, hub.partition("/")[2]):
                return file
    return None


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
        reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise EstimatorGap(f"aiconfigurator can't estimate it ({shorten(reason, 200)})") from error
