"""What every part of the scheduler is worth: the same requests without it.

The situations in which the ablation is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prfaas.core.units import GIB, format_bits_per_s
from prfaas.lab.simulator.capacity import Fluctuating
from prfaas.lab.studies.day import DAY_S, day_plan
from prfaas.lab.studies.figures import (
    NONE,
    UNSTABLE,
    Difference,
    bars,
    difference,
    listed,
    mean,
    mean_and_p90,
    more_or_less,
)
from prfaas.lab.studies.runs import Run
from prfaas.lab.studies.setup import Setting, bursts, cache_of, capacity_of, replayed, with_bandwidth
from prfaas.lab.studies.study import Figure, Outcomes, Section, Study, Table
from prfaas.lab.studies.variants import OF_PAPER, OF_TILTED, PAPER, TILTED, Variant

LOAD = 0.9
_REQUESTS = 8_000
_ROOM, _SD, _CORRELATION_S = 1.15, 0.3, 10.0
_PEAK, _BURST_LOAD = 2.2, 0.8
_CACHE_BYTES = 16 * GIB
_TRACE_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Scene:
    """`run` is a scene's run of policy `paper`; `words` describes it."""

    name: str
    title: str
    words: Callable[[Setting], str]
    run: Callable[[Setting], Run]

    def with_variant(self, base: Run, variant: Variant, seed: int) -> Run:
        """The scene without a part of the scheduler."""
        return replace(
            base,
            key=(self.name, variant.label, seed),
            seed=seed,
            policy=variant.policy,
            params=variant.params,
            adapts=variant.adapts,
            allocation=variant.allocation,
        )


def _steady(setting: Setting) -> Run:
    return Run((), setting.planned, setting.poisson(LOAD), setting.requests(_REQUESTS), setting.seed)


def _bursty(setting: Setting) -> Run:
    traffic = setting.traffic(bursts(_BURST_LOAD * setting.lambda_max, _PEAK))
    return replace(_steady(setting), traffic=traffic)


def _scarce_bits_per_s(setting: Setting) -> float:
    return min(_ROOM * setting.optimum.egress_bits_per_s, setting.planned.links[0].bandwidth_bits_per_s)


def _scarce(setting: Setting) -> Run:
    bits_per_s = _scarce_bits_per_s(setting)
    link = setting.planned.links[0].name
    return replace(
        _steady(setting),
        planned=with_bandwidth(setting.planned, bits_per_s),
        links={link: Fluctuating(bits_per_s, _SD, _CORRELATION_S)},
    )


def _day(setting: Setting) -> Run:
    plan = day_plan(setting, LOAD)
    days = 0.1 if setting.is_quick else 0.5
    return replace(
        _steady(setting),
        traffic=plan.traffic,
        duration_s=DAY_S * days,
        roles={setting.pd: plan.mean_prefill},
        threshold_tokens=plan.threshold_tokens,
    )


def _recorded(setting: Setting) -> Run:
    rate = _TRACE_LOAD * capacity_of(setting)
    return replace(
        _steady(setting),
        traffic=replayed(setting, rate),
        caches=cache_of(setting.planned.kv_model, _CACHE_BYTES),
    )


SCENES = (
    Scene("steady", "steady", lambda _: f"Poisson arrivals at {LOAD:g} Λ_max", _steady),
    Scene(
        "bursts",
        "bursts",
        lambda _: (
            f"a mean of {_BURST_LOAD:g} Λ_max, {_PEAK:g} times as much for 15 s on average, then less for 60 s"
        ),
        _bursty,
    ),
    Scene(
        "scarce",
        "scarce link",
        lambda setting: (
            f"steady arrivals, but the link has {format_bits_per_s(_scarce_bits_per_s(setting))} on average, "
            f"{_ROOM:g} times what the plan sends at Λ_max, with a relative standard deviation of {_SD:g} "
            "and a correlation "
            f"time of {_CORRELATION_S:g} s; thresholds start as planned for the mean"
        ),
        _scarce,
    ),
    Scene(
        "day",
        "half a day",
        lambda _: (
            f"from midnight to noon of a day in {DAY_S / 3600:g} simulated hours, of short prompts with "
            "long answers at night and "
            "long prompts with "
            f"short answers at noon, at {LOAD:g} of what the best roles of its worst hour can carry; roles and "
            "threshold start as planned for its mean"
        ),
        _day,
    ),
    Scene(
        "trace",
        "trace",
        lambda setting: (
            f"`{setting.trace_name}` repeated, with prefix caches of {_CACHE_BYTES // GIB} GiB on every instance, at "
            f"{_TRACE_LOAD:g} of what the planner finds for its lengths without any cache"
        ),
        _recorded,
    ),
)


_SEEDS = 4
_VARIANTS = (PAPER, *OF_PAPER, TILTED, *OF_TILTED)


def _runs(setting: Setting) -> Sequence[Run]:
    runs = []
    for scene in SCENES:
        base = scene.run(setting)
        for variant in _VARIANTS:
            if variant.needs_caches and base.caches is None:
                continue
            runs += [scene.with_variant(base, variant, seed) for seed in setting.seeds(_SEEDS)]
    return runs


def _tell(setting: Setting, outcomes: Outcomes) -> Section:
    told = _Told(setting, outcomes)
    columns = ["", "without", *(f"{scene.title}: TTFT mean (P90)" for scene in SCENES)]
    rows = [
        [variant.label, variant.without, *(told.cell(scene.name, variant) for scene in SCENES)]
        for variant in _VARIANTS
    ]
    return Section(
        question="What is each part of the scheduler worth?",
        setup=(
            f"Every variant meets the same requests, {len(setting.seeds(_SEEDS))} times with different seeds. "
            + " ".join(f"*{scene.title}*: {scene.words(setting)}." for scene in SCENES)
        ),
        findings=list(told.findings()),
        tables={
            "TTFT in seconds, mean (P90), and below the difference of the mean to `paper` with its 95 % interval": (
                Table(columns, rows)
            )
        },
        figures=[_figure(told)],
        notes=[
            f'"{UNSTABLE}": in some of the runs the queues grow for as long as requests come, so TTFT depends on when '
            "one stops. Half a day isn't judged, its load isn't steady; bursts by the steady scene, whose "
            "mean load is higher.",
            "The policy can't be kept from seeing caches of its own cluster: there is no parameter for it, and "
            "without caches the instances would be slower too, which is another comparison.",
            "`utilisation_mark` and `queue_mark` are the two ways in which `paper` sees bandwidth; a link's queue "
            "can't be hidden from it while prefill queues are seen.",
        ],
    )


class _Told:
    def __init__(self, setting: Setting, outcomes: Outcomes) -> None:
        self._seeds = setting.seeds(_SEEDS)
        self._outcomes = outcomes

    def has(self, scene: str, variant: Variant) -> bool:
        return (scene, variant.label, self._seeds[0]) in self._outcomes

    def values(self, scene: str, variant: Variant, field: str = "ttft_mean_s") -> list[float]:
        return [self._outcomes[scene, variant.label, seed].number(field) for seed in self._seeds]

    def is_stable(self, scene: str, variant: Variant) -> bool:
        if scene == "day":
            return True
        # Bursts come and go: what carries more in the steady scene carries their mean.
        judged = "steady" if scene == "bursts" else scene
        return all(self._outcomes[judged, variant.label, seed].is_stable for seed in self._seeds)

    def difference(self, scene: str, variant: Variant, base: Variant = PAPER) -> Difference:
        return difference(self.values(scene, variant), self.values(scene, base))

    def cell(self, scene: str, variant: Variant) -> str:
        if not self.has(scene, variant):
            return NONE
        is_stable = self.is_stable(scene, variant)
        p90_s = mean(self.values(scene, variant, "ttft_p90_s"))
        text = mean_and_p90(mean(self.values(scene, variant)), p90_s, is_stable=is_stable)
        if not is_stable or variant is PAPER or not self.is_stable(scene, PAPER):
            return text
        if self.values(scene, variant) == self.values(scene, PAPER):
            return f"{text}<br>same"
        return f"{text}<br>{self.difference(scene, variant)}"

    def findings(self) -> Sequence[str]:
        sentences = []
        for scene in SCENES:
            worse = [
                each
                for each in OF_PAPER
                if self.has(scene.name, each) and not self._is_harmless(scene.name, each)
            ]
            unstable = [each.label for each in worse if not self.is_stable(scene.name, each)]
            costly = sorted(
                (each for each in worse if self.is_stable(scene.name, each)),
                key=lambda each: -self.difference(scene.name, each).mean,
            )
            helped = [
                each.label
                for each in OF_PAPER
                if self.has(scene.name, each)
                and self.is_stable(scene.name, each)
                and self.difference(scene.name, each).is_clear
                and self.difference(scene.name, each).mean < 0
            ]
            parts = []
            if unstable:
                parts.append(f"queues grow with {_codes(unstable)}")
            if costly:
                parts.append(
                    "TTFT is longer with "
                    + listed([f"`{each.label}` ({self.difference(scene.name, each)})" for each in costly])
                )
            if helped:
                parts.append(f"TTFT is shorter with {_codes(helped)}")
            text = ", ".join(parts) if parts else "no part makes a difference that so many runs can tell"
            sentences.append(f"*{scene.title}*, against the whole of `paper`: {text}.")
        return [*sentences, *self._of_tilted()]

    def _is_harmless(self, scene: str, variant: Variant) -> bool:
        if not self.is_stable(scene, variant):
            return False
        found = self.difference(scene, variant)
        return not (found.is_clear and found.mean > 0)

    def _of_tilted(self) -> Sequence[str]:
        better, others = [], []
        for scene in SCENES:
            ratio = 1 + self.difference(scene.name, TILTED).mean
            clear = self.difference(scene.name, TILTED).is_clear
            if not (self.is_stable(scene.name, TILTED) and self.is_stable(scene.name, PAPER)):
                others.append(f"{scene.title} (not both stable)")
            elif clear and ratio < 1:
                better.append(f"{scene.title} ({more_or_less(ratio)})")
            else:
                others.append(f"{scene.title} ({self.difference(scene.name, TILTED)})")
        if not better:
            yield_text = f"`tilted` is nowhere clearly ahead of `paper`: {listed(others)}."
        elif not others:
            yield_text = f"`tilted` has a shorter mean TTFT than `paper` everywhere: {listed(better)}."
        else:
            yield_text = (
                f"`tilted` has a shorter mean TTFT than `paper` in {listed(better)}; not in {listed(others)}."
            )
        return [yield_text]


def _codes(labels: Sequence[str]) -> str:
    return listed([f"`{label}`" for label in labels])


def _figure(told: _Told) -> Figure:
    scene = SCENES[1].name
    shown = [each for each in _VARIANTS if told.has(scene, each) and told.is_stable(scene, each)]
    return bars(
        "ablation",
        f"Mean TTFT, {SCENES[1].title}; variants whose queues grow are left out.",
        "mean TTFT (s)",
        [each.label for each in shown],
        [mean(told.values(scene, each)) for each in shown],
    )


ABLATION = Study("ablation", "What each part of the scheduler is worth", _runs, _tell)
