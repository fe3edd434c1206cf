"""A price of bytes in a simulation."""

from dataclasses import replace

import pytest
from tests.lab.simulator.conftest import CaseStudy

from prfaas.core.scheduling.decision import KvFacts
from prfaas.lab.simulator.fleet import view_of
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate


def offloaded(case_study: CaseStudy, per_gb: float, rate_per_s: float) -> tuple[float, dict[str, int], bool]:
    links = tuple(replace(link, egress_per_gb=per_gb) for link in case_study.planned.links)
    scenario = scenario_of(replace(case_study.planned, links=links), policy="tilted", allocation=False)
    told = simulate(scenario, case_study.poisson(rate_per_s, seed=4), requests=2000).summary()
    return told["offloaded_fraction"], told["decisions"], told["stable"]


def test_prices_reach_the_policies(case_study: CaseStudy) -> None:
    """8 H20 at 1 per GPU-hour."""
    links = tuple(replace(link, egress_per_gb=0.02) for link in case_study.planned.links)
    scenario = scenario_of(replace(case_study.planned, links=links))
    view = view_of(scenario, KvFacts.of_model(case_study.planned.kv_model))
    assert view.clusters["home"].instance_price_per_s == pytest.approx(8 / 3600)
    assert view.links["east", "home"].egress_price_per_byte == pytest.approx(2e-11)


def test_little_is_offloaded_where_bytes_are_dear_and_home_has_time(case_study: CaseStudy) -> None:
    share, reasons, _ = offloaded(case_study, 0.0, 0.5)
    assert share > 0.4 and "egress-price" not in reasons
    share, reasons, _ = offloaded(case_study, 0.05, 0.5)
    assert share < 0.05 and reasons["egress-price"] > 800


def test_what_a_load_needs_is_offloaded_at_any_price(case_study: CaseStudy) -> None:
    """The prefill instances at home could carry 1 request/s alone. A price only lets their queue grow to a length."""
    share, _, stable = offloaded(case_study, 0.05, 2.2)
    assert stable is not False and share > 0.3
