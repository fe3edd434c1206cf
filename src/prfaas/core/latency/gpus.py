"""What GPUs can do at most, as their makers print it: for estimates where nobody has measured."""

import difflib
from dataclasses import dataclass

from prfaas.core.latency.profile import ProfileError
from prfaas.core.units import GB, GIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU with dense matrices: no number counts zeros that a sparse kernel leaves out."""

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    """None: it has no fp8 matrix units, and computes fp8 weights in bf16."""
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To its neighbours in the machine, one direction."""
    source: str
    fp4_flops_per_s: float | None = None

    def flops_per_s(self, compute: str) -> float:
        """Peak for operands of "bf16", "fp8" or "fp4"; where it has no such units, that of the next wider ones."""
        wider = {
            "fp4": (self.fp4_flops_per_s, self.fp8_flops_per_s),
            "fp8": (self.fp8_flops_per_s,),
        }.get(compute, ())
        return next((peak for peak in wider if peak is not None), self.bf16_flops_per_s)


_TERA = 1e12

_GPUS = (
    Gpu("a100", 312 * _TERA, None, 80 * GIB, 2039 * GB, 300 * GB, "NVIDIA A100 datasheet, SXM4 80 GB"),
    Gpu(
        *("h100", 989 * _TERA, 1979 * _TERA, 80 * GIB, 3350 * GB, 450 * GB),
        "NVIDIA H100 datasheet, SXM5 80 GB; half of the figures with sparsity",
    ),
    Gpu(
        *("h200", 989 * _TERA, 1979 * _TERA, 141 * GIB, 4800 * GB, 450 * GB),
        "NVIDIA H200 datasheet, SXM 141 GB; half of the figures with sparsity",
    ),
    Gpu(
        *("h20", 148 * _TERA, 296 * _TERA, 96 * GIB, 4000 * GB, 450 * GB),
        "NVIDIA H20 96 GB, as resellers print it; NVIDIA has no public datasheet of it",
    ),
    Gpu(
        *("h800", 989 * _TERA, 1979 * _TERA, 80 * GIB, 3350 * GB, 200 * GB),
        "NVIDIA H800 SXM as arXiv 2412.19437 describes it: an H100 with less NVLink",
    ),
    Gpu(
        *("b200", 2250 * _TERA, 4500 * _TERA, 180 * GIB, 7700 * GB, 900 * GB),
        "NVIDIA DGX B200 datasheet, an eighth of it (62 TB/s, 1,440 GB); half of the figures with sparsity",
        9000 * _TERA,
    ),
    Gpu(
        *("b300", 2250 * _TERA, 4500 * _TERA, 288 * GB, 7750 * GB, 900 * GB),
        "NVIDIA DGX B300 datasheet, an eighth of it; half of the figures with sparsity",
        14000 * _TERA,
    ),
    Gpu(
        *("gb200", 2500 * _TERA, 5000 * _TERA, 186 * GIB, 8000 * GB, 900 * GB),
        "NVIDIA GB200 NVL72 datasheet, one of two GPUs; half of the figures with sparsity",
        10000 * _TERA,
    ),
    Gpu(
        *("l40s", 362 * _TERA, 733 * _TERA, 48 * GB, 864 * GB, 32 * GB),
        "NVIDIA L40S datasheet; half of the figures with sparsity, PCIe 4.0 x16",
    ),
)


def gpu_names() -> tuple[str, ...]:
    """The GPUs that are known."""
    return tuple(gpu.name for gpu in _GPUS)


def gpu(name: str) -> Gpu:
    """The GPU of this name, in any case.

    Raises:
        ProfileError: it is not known.
    """
    known = {each.name: each for each in _GPUS}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}"
        raise ProfileError(f'there is no GPU "{name}"; {hint}')
    return known[name.lower()]
