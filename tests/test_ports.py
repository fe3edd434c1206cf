"""Ports that tests draw are none of the examples'."""

import re

import pytest
from tests import ports
from tests.ports import EXAMPLES, free_ports, neighbours
from tests.test_own_policy_page import ROOT


def test_no_port_of_an_example_is_drawn() -> None:
    """A test that gives an example's ports others, one after the other, would give two of them the same."""
    fields = re.compile(r"\b(?:\w+_)?port: (\d+)")
    files = (*sorted((ROOT / "examples").glob("*.yaml")), *sorted((ROOT / "docs" / "guides").glob("*.md")))
    own = {int(port) for file in files for port in fields.findall(file.read_text())}
    assert len(own) > 50
    drawn = free_ports(200)
    assert len(set(drawn)) == len(drawn)
    lowest, highest = 12_000, 32_000
    assert min(drawn) >= lowest and max(drawn) < highest
    assert [port for port in sorted(own) if lowest <= port < highest and port not in EXAMPLES] == []
    assert [port for port in drawn if port in EXAMPLES] == []


def test_no_port_is_given_twice() -> None:
    """A server whose port was given may not be started yet, or be another site's."""
    given = [port for _ in range(100) for port in free_ports(2)]
    for _ in range(100):
        first = neighbours(3)
        given += [first, first + 1, first + 2]
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_workers_have_ports_of_their_own(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    own = []
    for worker in range(workers):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        own += ports.own()
    assert len(set(own)) == len(own) > 18_000
