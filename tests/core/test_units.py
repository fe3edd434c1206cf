import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.units import (
    GIB,
    MIB,
    format_bits_per_s,
    format_bytes,
    format_s,
    parse_bits_per_s,
    parse_bytes,
    transfer_s,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60 Mbit/s", 60e6),
        ("10 Gbit/s", 10e9),
        ("1.5kbit/s", 1500),
        (" 8 bit/s ", 8),
        (2_000_000, 2e6),
        (0.5, 0.5),
    ],
)
def test_rates_are_decimal(text: str | float, expected: float) -> None:
    assert parse_bits_per_s(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "60",
        "60 MB/s",
        "fast",
        "",
        "-1 Mbit/s",
        "0 Mbit/s",
        0,
        -5,
        math.nan,
        math.inf,
        True,
        "1e3 Mbit/s",
        "60 mbit/s",
        None,
        [],
    ],
)
def test_other_rates_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is no bandwidth; write for example"):
        parse_bits_per_s(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256 MiB", 256 * MIB), ("0.5 GiB", GIB // 2), ("1 MB", 10**6), (4096, 4096), ("7 B", 7)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["256", "1 Mbit", "0.3 B", -1, 0, "0 MiB", False, "9" * 400 + " TiB"])
def test_other_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="is no size; write for example"):
        parse_bytes(text)


@given(st.integers(1, 10**15))
def test_plain_numbers_of_bytes_stay(size: int) -> None:
    assert parse_bytes(size) == size


@given(st.sampled_from(["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]), st.integers(1, 999))
def test_formatted_rates_are_read_back(unit: str, number: int) -> None:
    rate = parse_bits_per_s(f"{number} {unit}")
    assert parse_bits_per_s(format_bits_per_s(rate)) == rate


def test_formatting() -> None:
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(5) == "5 B"
    assert format_bytes(3 * GIB) == "3.0 GiB"
    assert format_bits_per_s(6e7) == "60 Mbit/s"
    assert [format_bits_per_s(rate) for rate in (999.9e6, 999.99999e6, 1e9)] == [
        "999.9 Mbit/s",
        "1 Gbit/s",
        "1 Gbit/s",
    ]
    assert [format_s(s) for s in (0.0123, 0.9999, 3.456, 59.999, 75)] == [
        "12.3 ms",
        "1 s",
        "3.46 s",
        "1 min 0 s",
        "1 min 15 s",
    ]


def test_a_mebibyte_takes_eight_times_its_bits() -> None:
    assert transfer_s(MIB, 1e6) == pytest.approx(8.388608)
