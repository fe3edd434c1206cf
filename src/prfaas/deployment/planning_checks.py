"""What the planner needs of a deployment file beyond what a running one needs."""

from prfaas.deployment.schema import DeploymentFile, LengthsSection
from prfaas.deployment.source import Source

# Which fields of `workload.lengths` go with which distribution, and which of them may be left out.
_NEEDED = {
    "lognormal": ("mu", "sigma", "low", "high"),
    "uniform": ("low", "high"),
    "fixed": ("tokens",),
    "empirical": ("lengths",),
    "trace": ("path",),
}
_OPTIONAL = {"empirical": ("weights",), "trace": ("format",)}


def check_planning(source: Source, file: DeploymentFile) -> None:
    """All of them.

    Raises:
        DeploymentError: a cluster without a profile, no workload, no SLO to limit the decode batch, …
    """
    for c, cluster in enumerate(file.clusters):
        if cluster.profile is None:
            raise source.error(
                ("clusters", c),
                "has no profile, so how fast its instances are is not known; name one that `prfaas profile` "
                "wrote or one that comes with prfaas",
            )
    if file.workload is None:
        raise source.error(("workload",), "is missing; say how long prompts and answers are")
    _check_lengths(source, file.workload.lengths)
    if file.workload.output_tokens is None and file.workload.lengths.distribution != "trace":
        raise source.error(("workload", "output_tokens"), "is missing; give the mean length of answers")
    if file.slo.tpot_s is None and file.slo.tokens_per_s is None:
        raise source.error(
            ("slo",), "needs tokens_per_s (or tpot_s): without it there is no limit to the decode batch"
        )
    _check_prices(source, file)


def _check_lengths(source: Source, lengths: LengthsSection) -> None:
    place = ("workload", "lengths")
    kind = lengths.distribution
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    given = sorted(lengths.model_fields_set - {"distribution"})
    for field in needed:
        if getattr(lengths, field) is None:
            raise source.error(
                (*place, field), f'is missing; distribution "{kind}" needs {", ".join(needed)}'
            )
    for field in given:
        if field not in needed + optional:
            known = ", ".join(needed + optional)
            raise source.error((*place, field), f'is not for distribution "{kind}", which has {known}')
    if lengths.low is not None and lengths.high is not None and lengths.low >= lengths.high:
        raise source.error((*place, "high"), f"{lengths.high:g} must be greater than low ({lengths.low:g})")
    if lengths.weights is not None and lengths.lengths is not None:
        if len(lengths.weights) != len(lengths.lengths):
            raise source.error(
                (*place, "weights"),
                f"has {len(lengths.weights)} entries for {len(lengths.lengths)} lengths; give one for each",
            )
        if not any(lengths.weights):
            raise source.error((*place, "weights"), "are all 0; at least one must be above 0")


def _check_prices(source: Source, file: DeploymentFile) -> None:
    used = dict.fromkeys(cluster.hardware for cluster in file.clusters)
    for hardware in file.prices:
        if hardware not in used:
            raise source.error(
                ("prices", hardware), f"no cluster has this hardware; the clusters have {', '.join(used)}"
            )
    for c, cluster in enumerate(file.clusters):
        if file.prices and cluster.hardware not in file.prices:
            raise source.error(
                ("clusters", c, "hardware"), f'there is no price for "{cluster.hardware}"; add it to prices'
            )
