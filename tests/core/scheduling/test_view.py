"""An instance as policies see it: what it may be given, and copies of it."""

import copy

import pytest

from prfaas.core.scheduling.view import InstanceView


def instance() -> InstanceView:
    return InstanceView(
        "a", "home", True, False, True, False, 3, busy_until_s=4.5, decoding=2, decode_slots=9, seen_s=1.5
    )


@pytest.mark.parametrize("flag", ["healthy", "draining", "closed", "prefills"])
def test_flags_decide_at_once_what_it_takes(flag: str) -> None:
    view = instance()
    before = getattr(view, flag)
    assert (view.takes_prefills, view.takes_decodes) == (True, False)
    setattr(view, flag, not before)
    assert getattr(view, flag) is not before
    assert not view.takes_prefills
    setattr(view, flag, before)
    view.decodes = True
    assert view.takes_prefills and view.takes_decodes and view.decodes


def test_a_copy_is_equal_and_its_own() -> None:
    view = instance()
    view.closed = view.draining = True
    other = copy.copy(view)
    assert other == view and repr(other) == repr(view)
    other.busy_until_s += 1.0
    assert other != view and view.busy_until_s == 4.5


def test_it_has_no_hash_since_it_changes() -> None:
    with pytest.raises(TypeError):
        hash(instance())
