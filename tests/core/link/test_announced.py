"""When thresholds are searched again for a link."""

from prfaas.core.link.announced import AnnouncedLink

MBIT = 1e6


def told(capacities: list[float], *, down_from: int = 10_000) -> list[int]:
    """At which tenth of a second the link was announced, beginning with 100 Mbit/s."""
    link = AnnouncedLink(100 * MBIT)
    return [
        tick
        for tick, capacity in enumerate(capacities)
        if link.is_due(capacity * MBIT, tick < down_from, tick / 10)
    ]


def test_a_fall_is_told_at_once_and_noise_never() -> None:
    assert told([100.0] * 5 + [20.0] * 50) == [5]
    assert told([100.0, 80.0, 120.0, 75.0, 110.0] * 20) == []


def test_a_rise_is_told_when_it_rests() -> None:
    rising = [100.0, 10.0, *(10.0 * 1.2**step for step in range(13)), *[100.0] * 30]
    assert told(rising) == [1, 19]
    assert told([100.0, 10.0, *[100.0] * 30]) == [1, 12]


def test_a_rise_that_goes_on_is_told_after_a_second_and_a_half() -> None:
    assert told([100.0, 10.0, *(20.0 + step / 10 for step in range(40))])[:2] == [1, 17]


def test_down_and_up_are_told_at_once() -> None:
    link = AnnouncedLink(100 * MBIT)
    assert [
        link.is_due(100 * MBIT, up, at / 10) for at, up in enumerate((True, False, False, True, True))
    ] == [
        False,
        True,
        False,
        True,
        False,
    ]
