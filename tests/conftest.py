"""Property tests: the same examples every time, or new ones on request; a slow machine is no failure in either case."""

import pytest
from hypothesis import settings

# What a property test asks for itself, times this, in the profile that explores.
EXPLORE_FACTOR = 10

settings.register_profile("prfaas", deadline=None, derandomize=True)
settings.register_profile(
    "explore", deadline=None, derandomize=False, max_examples=100 * EXPLORE_FACTOR, print_blob=True
)
# `--hypothesis-profile=explore` is applied after this file was read, and so wins.
settings.load_profile("prfaas")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that say how many examples they take get more of them, too, when exploring.

    Their own number would otherwise win over the profile's.
    """
    if settings.get_current_profile_name() != "explore":
        return
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
                setattr(owner, name, settings(own, max_examples=own.max_examples * EXPLORE_FACTOR))
