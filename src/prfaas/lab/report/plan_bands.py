"""What estimated profiles leave open in a plan: whether the verdict holds over their error bars."""

from dataclasses import replace
from itertools import product
from statistics import fmean

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import make_plan, problem_of

# Both ends of an error bar and its middle.
_STEPS = (0.0, 0.5, 1.0)


def doubts(deployment: PlannedDeployment) -> list[str]:
    """Sentences on the clusters' times; none where nothing is estimated.

    Prefills of every estimated hardware take the fastest, the middle and the slowest time of its error bar, each with
    each of the others'.
    """
    bands = {each.hardware: band for each in deployment.clusters if (band := each.profile.evidence.band)}
    if not bands:
        return []
    found = []
    measured = [each.hardware for each in deployment.clusters if each.hardware not in bands]
    if measured:
        told = f"{', '.join(bands)} by estimate, {', '.join(dict.fromkeys(measured))} by measurement"
        found.append(
            f"Mind that times differ in how they are known ({told}): what one errs by is in every comparison."
        )
    worth = {
        steps: make_plan(problem_of(_slowed(deployment, bands, steps))).is_worth_it
        for steps in product(_STEPS, repeat=len(bands))
    }
    text = f"Over the error bars of prefills it is worth it in {sum(worth.values())} of {len(worth)} cases"
    if 0 < sum(worth.values()) < len(worth):
        swings = [
            abs(
                fmean(worth[each] for each in worth if each[at] == 1)
                - fmean(worth[each] for each in worth if not each[at])
            )
            for at in range(len(bands))
        ]
        decides = list(bands)[swings.index(max(swings))]
        text += f"; what decides most is how fast {decides} is: measure it with `prfaas profile`"
    return [*found, f"{text}."]


def _slowed(
    deployment: PlannedDeployment, bands: dict[str, tuple[float, float]], steps: tuple[float, ...]
) -> PlannedDeployment:
    factors = {
        hardware: low * (high / low) ** step
        for (hardware, (low, high)), step in zip(bands.items(), steps, strict=True)
    }
    slower = (
        replace(
            each,
            profile=replace(each.profile, prefill=each.profile.prefill.divided(1 / factors[each.hardware])),
        )
        if each.hardware in factors
        else each
        for each in deployment.clusters
    )
    return replace(deployment, clusters=tuple(slower))
