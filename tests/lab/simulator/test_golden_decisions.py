"""More than 250,000 decisions are what they were, to the last bit: speed must not change them."""

import pytest
from tests.lab.simulator.golden_decisions import COMMAND, arithmetic, pairs, simulated, written


def test_the_golden_file_has_enough_decisions() -> None:
    cases = written()["cases"]
    assert {(case.name, policy) for case, policy in pairs()} == {
        (case, policy) for case, policies in cases.items() for policy in policies
    }
    assert sum(each["decisions"] for case in cases.values() for each in case.values()) >= 250_000


@pytest.mark.slow("simulates every world of the recorded decisions")
def test_every_decision_and_result_is_the_same() -> None:
    golden = written()
    if golden["arithmetic"] != arithmetic():
        pytest.skip("elementary functions give other last digits here than where the golden file was made")
    others = [
        f"{case.name}: {policy}"
        for case, policy in pairs()
        if simulated(case, policy) != golden["cases"][case.name][policy]
    ]
    assert not others, f"if that is meant: {COMMAND}"
