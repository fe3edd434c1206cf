"""The two curves of a measured profile as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.profiles import LatencyProfile
    from prfaas.profiles.measure import Measurement, Sample


def plot_profile(profile: "LatencyProfile", measured: "Measurement", directory: Path) -> list[Path]:
    """Draw NAME-prefill.png and, with decode times, NAME-decode.png into `directory`, and return their paths."""
    import numpy as np

    from prfaas.report.style import COLOURS, MUTED, length_axis, plot

    def draw(
        path: Path, samples: "tuple[Sample, ...]", grid: list[float], values: list[float], y: str
    ) -> None:
        with plot(path) as (axes,):
            dots = [(sample.at, seconds) for sample in samples for seconds in sample.seconds]
            axes.plot(grid, values, color=COLOURS[0], label="profile")
            axes.plot(
                *zip(*dots, strict=True), "o", color=MUTED, markersize=4, label="measured", clip_on=False
            )
            axes.set_ylabel(y)
            axes.set_ylim(bottom=0)
            axes.set_title(profile.name)
            if samples is measured.prefill:
                length_axis(axes, grid[0], grid[-1], "uncached prompt length")
            else:
                axes.set_xlabel("requests in the batch")

    paths = [directory / f"{profile.name}-prefill.png"]
    low, high = profile.range_tokens
    lengths = np.geomspace(low, high, 200).clip(low, high)
    draw(paths[0], measured.prefill, lengths.tolist(), profile.prefill_s(lengths).tolist(), "prefill (s)")
    if profile.decode is not None:
        paths.append(directory / f"{profile.name}-decode.png")
        batches = np.linspace(*profile.range_batch, 200).clip(*profile.range_batch).tolist()
        steps = [profile.decode_step_s(batch) * 1000 for batch in batches]
        draw(paths[1], _in_ms(measured.decode), batches, steps, "decode step (ms)")
    return paths


def _in_ms(samples: "tuple[Sample, ...]") -> "tuple[Sample, ...]":
    from prfaas.profiles.measure import Sample

    return tuple(Sample(sample.at, tuple(1000 * each for each in sample.seconds)) for sample in samples)
