"""For all tests: property tests' profiles, marks that must say why, and at the end of a run where its time went.

Property tests take the same examples every time, fewer of them where a quick answer is wanted, or many new ones on
request; a slow machine is no failure in any case.
"""

import gc
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# What a property test asks for itself, times this, by the profile: of `make test-explore`, and of `make test` and
# `make test-fast`. `make test-all` takes as many as it asks for.
EXAMPLES = {"explore": 10.0, "few": 0.2}

settings.register_profile("prfaas", deadline=None, derandomize=True)
settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    max_examples=int(100 * EXAMPLES["explore"]),
    print_blob=True,
)
# As many as no test asks for itself: those with their own number are told by it.
settings.register_profile("few", deadline=None, derandomize=True, max_examples=19)
# `--hypothesis-profile` is applied after this file was read, and so wins.
settings.load_profile("prfaas")

# Marks that keep a test out of a run that people wait for; each says why.
REASONED = ("slow", "extended")
# A test that takes longer has one of them.
LONG_S = 5.0

# An environment variable with seconds since the epoch: what only `make test-all` has begins until then, and is skipped
# later. CI sets it, so that a machine a third as fast as the usual one is asked as much as it can answer.
UNTIL = "PRFAAS_TESTS_UNTIL"
NOT_BEGUN = "not begun: the time for what only make test-all has is over"


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist report to the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeByPart())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hardly anything that is imported becomes garbage, and to look for some takes a quarter of a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    factor = EXAMPLES.get(settings.get_current_profile_name())
    if factor is not None:
        take_other_examples(items, factor)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a worker is given all that shares engines."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadStackScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return stack_of(nodeid)

    return LoadStackScheduling(config, log)


def stack_of(nodeid: str) -> str:
    """What shares engines with a test: its file, or the folder below tests/integration that it is in."""
    file = nodeid.partition("::")[0]
    parts = file.split("/")
    return "/".join(parts[:3]) if parts[:2] == ["tests", "integration"] else file


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A mark without a reason fails its test, and an extended one is skipped when the time for these is over.

    Refused while tests are collected, it would end a worker of xdist with an internal error.
    """
    for name in REASONED:
        for mark in item.iter_markers(name):
            if not (mark.args and isinstance(mark.args[0], str) and mark.args[0].strip()):
                pytest.fail(f'{item.nodeid}: its mark must say why: {name}("...")', pytrace=False)
    until = os.environ.get(UNTIL)
    if until and time.time() > float(until) and is_of_test_all(item):
        pytest.skip(NOT_BEGUN)


def is_of_test_all(item: pytest.Item) -> bool:
    """What `make test` leaves out, or has with fewer examples."""
    is_property = item.get_closest_marker("hypothesis") and not item.get_closest_marker("engine")
    has_all = bool(is_property) and settings.get_current_profile_name() != "few"
    return has_all or item.get_closest_marker("extended") is not None


def pytest_runtest_teardown() -> None:
    """Let go of gateways that have ended: aiohttp keeps its last thousand handlers, and each holds 15 MB of a test."""
    web_app: Any = sys.modules.get("aiohttp.web_app")
    if web_app is not None:
        web_app._cached_build_middleware.cache_clear()


def pytest_collection_finish() -> None:
    """What is there now stays: no later search for garbage, of which some tests ask for whole ones, looks at it."""
    gc.collect()
    gc.freeze()


def take_other_examples(items: Iterable[pytest.Item], factor: float) -> None:
    """Tests that say how many examples they take get `factor` times as many, too.

    Their own number would otherwise win over the profile's.
    """
    seen: set[object] = set()
    for item in items:
        test = getattr(item, "obj", None)
        # Parametrized tests share one function; methods are made anew for each item.
        function = getattr(test, "__func__", test)
        if function in seen:
            continue
        seen.add(function)
        for owner, name in (
            (function, "_hypothesis_internal_use_settings"),
            (getattr(item, "cls", None), "settings"),  # state machines
        ):
            own = getattr(owner, name, None)
            if isinstance(own, settings) and own.max_examples != settings().max_examples:
                setattr(owner, name, settings(own, max_examples=math.ceil(own.max_examples * factor)))


class TimeByPart:
    """Where a run's time went, by folder; and which tests are long and do not say why."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._reasoned: set[str] = set()
        self._not_begun = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        self._not_begun += report.skipped and NOT_BEGUN in str(report.longrepr)
        if any(name in report.keywords for name in REASONED):
            self._reasoned.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) < 2:
            return
        parts: dict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self._seconds.items():
            parts[str(Path(nodeid.partition("::")[0]).parent)].append(seconds)
        write = terminalreporter.write_line
        if self._not_begun:
            terminalreporter.section(f"{self._not_begun} tests not begun: {UNTIL} is over")
        terminalreporter.section("time by part")
        for part, each in sorted(parts.items(), key=lambda item: -sum(item[1])):
            write(f"{sum(each):7.1f} s {len(each):6} tests  {part}")
        long = {
            nodeid: seconds
            for nodeid, seconds in self._seconds.items()
            if seconds > LONG_S and nodeid not in self._reasoned
        }
        if long:
            terminalreporter.section(
                f"over {LONG_S:g} s without a reason: make them cheaper, or mark them slow(...)"
            )
        for nodeid, seconds in sorted(long.items(), key=lambda item: -item[1]):
            write(f"{seconds:7.1f} s  {nodeid}")
