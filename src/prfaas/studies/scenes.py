"""The situations in which the ablation is made."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from prfaas.simulator.capacity import Fluctuating
from prfaas.studies.bursts import bursts
from prfaas.studies.day import DAY_S, day_plan
from prfaas.studies.prefixes import cache_of
from prfaas.studies.recorded import capacity_of, replayed
from prfaas.studies.run import Run
from prfaas.studies.setting import Setting, with_bandwidth
from prfaas.studies.variants import Variant
from prfaas.units import GIB, format_bits_per_s

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
