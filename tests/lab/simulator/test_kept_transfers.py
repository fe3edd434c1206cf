"""Prefills whose instance is taken away: the decode instance goes on from what had come."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants
from tests.lab.simulator.test_invariants import conversations, failures

from prfaas.core.kv.published import published_model
from prfaas.core.link.checkpoints import checkpoint_count, checkpoint_every_tokens
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.capacity import Constant
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.result import Result
from prfaas.lab.simulator.scenario import Failure, Scenario, scenario_of
from prfaas.lab.simulator.simulation import simulate

TOKENS = 131_072
KILLS_PER_HOUR = 20.0
DENSE, WINDOWS = "qwen3-235b", "mimo-v2-flash"


def scenario(
    case_study: CaseStudy,
    *,
    up: int = 1,
    kills_per_hour: float = KILLS_PER_HOUR,
    model: str = "",
    **given: Any,
) -> Scenario:
    """Of the PrfaaS instances the first `up` are up; routing knows how often they are taken away."""
    down = [Failure(f"east-{number}", 0.0, 1e6) for number in range(up, 4)]
    failed: Sequence[Failure] = given.pop("failures", ())
    made = scenario_of(
        case_study.planned,
        policy="offload_all",
        adapts=False,
        allocation=False,
        failures=[*down, *failed],
        **given,
    )
    clusters = tuple(
        replace(each, kills_per_hour=kills_per_hour) if each.kind == "prfaas" else each
        for each in made.clusters
    )
    return replace(
        made, clusters=clusters, kv_model=published_model(model).kv_model if model else made.kv_model
    )


def one(shown: Scenario, tokens: int = TOKENS) -> Result:
    """A prompt that comes at 0 s."""
    return simulate(shown, [chunk_of([0.0], [tokens])], warmup_share=0.0, on_event=Invariants())


def lone_prefill_s(shown: Scenario) -> float:
    return shown.clusters[0].curve.seconds(TOKENS)


def kept_tokens(shown: Scenario, result: Result, at_s: float) -> int:
    """What the decode instance did not compute, by the time that it took for the rest."""
    left_s = result.ttft_s[0] - at_s
    return min(range(0, TOKENS, 16), key=lambda tokens: abs(rest_s(shown, tokens) - left_s))


def rest_s(shown: Scenario, kept: int) -> float:
    """What the decode instance takes for the rest behind so many tokens."""
    return shown.clusters[1].curve.after_prefix_s(TOKENS - kept, kept)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("kills_per_hour", [0.0, KILLS_PER_HOUR])
def test_full_attention_is_kept_to_the_last_byte(
    case_study: CaseStudy, share: float, kills_per_hour: float
) -> None:
    prefill_s = lone_prefill_s(scenario(case_study))
    dies = Failure("east-0", share * prefill_s, 1e6)
    shown = scenario(case_study, model=DENSE, kills_per_hour=kills_per_hour, failures=[dies])
    result = one(shown)
    left_s = rest_s(shown, math.floor(share * (TOKENS - 1)))
    assert result.retries[0] == 1
    assert result.ttft_s[0] == pytest.approx(dies.at_s + left_s, rel=1e-4)


def test_what_the_link_had_not_carried_is_lost(case_study: CaseStudy) -> None:
    bits_per_s = 2e9
    dies = Failure("east-0", 2.0, 1e6)
    links = {"east->home": Constant(bits_per_s)}
    shown = scenario(case_study, model=DENSE, failures=[dies], links=links)
    token_bytes = shown.kv_model.bytes_to_move(2) - shown.kv_model.bytes_to_move(1)
    come = math.floor(bits_per_s / BITS_PER_BYTE * dies.at_s / token_bytes)
    assert 0 < come < TOKENS * dies.at_s / lone_prefill_s(shown) / 2
    assert one(shown).ttft_s[0] == pytest.approx(dies.at_s + rest_s(shown, come), rel=1e-4)


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("model", ["", WINDOWS])
def test_states_and_windows_are_kept_up_to_the_newest_checkpoint(
    case_study: CaseStudy, model: str, share: float
) -> None:
    dies = Failure("east-0", share * lone_prefill_s(scenario(case_study)), 1e6)
    shown = scenario(case_study, model=model, failures=[dies])
    every, computed = every_tokens(shown), share * TOKENS
    due = min(computed // every, checkpoint_count(every, TOKENS - 1))
    # Each has come a moment after its tokens were computed.
    assert due >= 1 and computed - due * every > 0.05 * every
    assert kept_tokens(shown, one(shown), dies.at_s) == pytest.approx(due * every, abs=20)


def every_tokens(shown: Scenario) -> int:
    model = shown.kv_model
    return checkpoint_every_tokens(
        TOKENS,
        lone_prefill_s(shown),
        model.bytes_to_move(TOKENS - 1),
        model.bytes_to_move(1 << 20, 1 << 20),
        shown.links[0].bandwidth_bits_per_s,
        KILLS_PER_HOUR / 3600,
    )


@pytest.mark.parametrize(
    "lost",
    [
        {"keeps_transfers": False},
        {"keeps_transfers": False, "model": DENSE},
        {"kills_per_hour": 0.0},
        {"first_token": "prefill", "model": DENSE},
    ],
)
def test_where_nothing_is_kept_the_pd_cluster_begins_again(
    case_study: CaseStudy, lost: dict[str, Any]
) -> None:
    """Asked for; no checkpoint; a ticket with a token more."""
    dies = Failure("east-0", 0.8 * lone_prefill_s(scenario(case_study)), 1e6)
    shown = scenario(case_study, failures=[dies], **lost)
    result = one(shown)
    assert result.retries[0] == 1
    assert result.ttft_s[0] == pytest.approx(dies.at_s + shown.clusters[1].curve.seconds(TOKENS))


def test_before_the_first_checkpoint_all_is_lost(case_study: CaseStudy) -> None:
    plain = scenario(case_study)
    dies = Failure("east-0", 0.9 * every_tokens(plain) / TOKENS * lone_prefill_s(plain), 1e6)
    shown = scenario(case_study, failures=[dies])

    assert one(shown).ttft_s[0] == pytest.approx(dies.at_s + shown.clusters[1].curve.seconds(TOKENS))


def test_what_has_left_wholly_is_not_computed_again(case_study: CaseStudy) -> None:
    """The instance dies while the last byte is on its way."""
    shown = scenario(case_study)
    whole_s = one(shown).ttft_s[0]
    dies = Failure("east-0", whole_s - shown.links[0].rtt_s / 2, 1e6)
    result = one(scenario(case_study, failures=[dies]))
    assert result.retries[0] == 1
    assert result.ttft_s[0] == pytest.approx(dies.at_s + rest_s(shown, TOKENS - 1))


@pytest.mark.parametrize(("share", "goes_on"), [(0.4, False), (0.7, True)])
def test_with_notice_a_neighbour_begins_again_what_has_come_less_than_half(
    case_study: CaseStudy, share: float, goes_on: bool
) -> None:
    prefill_s = lone_prefill_s(scenario(case_study))
    noticed_s = share * prefill_s
    leaves = Failure("east-0", noticed_s + 0.1, 1e6, 0.1)
    shown = scenario(case_study, up=2, model=DENSE, failures=[leaves])
    result = one(shown)
    kept = math.floor(share * (TOKENS - 1))
    again_s = rest_s(shown, kept) if goes_on else prefill_s + shown.links[0].rtt_s
    assert result.retries[0] == 1
    assert result.ttft_s[0] == pytest.approx(noticed_s + again_s, rel=1e-3)


def test_a_link_that_stays_down_leaves_what_it_had_carried(case_study: CaseStudy) -> None:
    down = Failure("east->home", 2.0, 500.0)
    lost, kept = (
        replace(scenario(case_study, model=DENSE, failures=[down], keeps_transfers=keeps), stall_limit_s=8.0)
        for keeps in (False, True)
    )
    come = math.floor(2.0 / lone_prefill_s(kept) * (TOKENS - 1))
    spared_s = one(lost).ttft_s[0] - one(kept).ttft_s[0]
    assert spared_s == pytest.approx(rest_s(kept, 0) - rest_s(kept, come), rel=1e-3)


@pytest.mark.parametrize(("model", "share"), [("", 0.0), (DENSE, 0.5)])
def test_inside_a_cluster_only_full_attention_is_kept(
    case_study: CaseStudy, model: str, share: float
) -> None:
    whole = scenario(case_study, model=model)
    alone = replace(whole, clusters=(whole.clusters[1],), links=(), policy="local_only", failures=())
    seconds = alone.clusters[0].curve.seconds
    dies = Failure("home-0", seconds(TOKENS) / 2, 1e6)
    kept = math.floor(share * (TOKENS - 1))
    result = one(replace(alone, failures=[dies]))
    assert result.ttft_s[0] == pytest.approx(dies.at_s + rest_s(whole, kept), rel=1e-4)


def test_the_bytes_of_checkpoints_cross_the_link(case_study: CaseStudy) -> None:
    shown = scenario(case_study)
    plain = one(replace(shown, keeps_transfers=False))
    count = checkpoint_count(every_tokens(shown), TOKENS - 1)
    assert count > 1
    assert one(shown).link_bytes[0] - plain.link_bytes[0] == count * shown.kv_model.bytes_to_move(
        1 << 20, 1 << 20
    )
    # Of full attention alone there are none.
    dense = one(scenario(case_study, model=DENSE))
    assert dense.link_bytes[0] == published_model(DENSE).kv_model.bytes_to_move(TOKENS - 1)


@pytest.mark.slow("simulates hours of traffic")
@settings(max_examples=30)
@given(
    failures(),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from(["", DENSE, WINDOWS]),
    st.sampled_from([1e9, 1e11]),
)
def test_under_failures(
    case_study: CaseStudy, failed: list[Failure], seed: int, has_caches: bool, model: str, bits_per_s: float
) -> None:
    """Invariant: nothing is lost, and nobody waits for what has come already."""
    caches = CacheOptions(200_000, 4096, 1000) if has_caches else None
    shown = scenario(
        case_study,
        up=4,
        kills_per_hour=3600.0,
        model=model,
        failures=failed,
        caches=caches,
        links={"east->home": Constant(bits_per_s)},
    )
    result = simulate(shown, [conversations(seed, 60)], seed=seed, on_event=Invariants())
    assert not np.isnan(result.e2e_s).any()
    assert (result.ttft_s <= result.e2e_s).all()
    least_s = min(cluster.curve.seconds(1) for cluster in shown.clusters)
    assert (result.ttft_s >= least_s * 0.999).all()
