"""Bytes, bits per second and seconds: conversion, parsing, formatting. Rates are decimal (k = 1000)."""

import math
import re
from typing import Final

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
GB = 10**9
SECONDS_PER_HOUR = 3600.0
TIB = 1024 * GIB

BITS_PER_BYTE: Final = 8

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)\s*")
_RATES = {
    "bit/s": 1.0,
    "kbit/s": 1e3,
    "Mbit/s": 1e6,
    "Gbit/s": 1e9,
    "Tbit/s": 1e12,
}
_SIZES = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}


def parse_bits_per_s(value: object) -> float:
    """A rate in bits per second from "60 Mbit/s", "10 Gbit/s" or a plain number of bits per second.

    Raises:
        ValueError: not a positive, finite rate in one of the known units.
    """
    if isinstance(value, bool):
        raise ValueError(_rate_hint(value))
    if isinstance(value, int | float):
        rate = _float(value)
    else:
        number, unit = _split(value)
        if unit not in _RATES:
            raise ValueError(_rate_hint(value))
        rate = number * _RATES[unit]
    if not math.isfinite(rate) or rate <= 0:
        raise ValueError(_rate_hint(value))
    return rate


def parse_bytes(value: object) -> int:
    """A number of bytes from "256 MiB", "1 GB" or a plain whole number of bytes.

    Raises:
        ValueError: not a positive whole number of bytes in one of the known units.
    """
    if isinstance(value, bool):
        raise ValueError(_size_hint(value))
    if isinstance(value, int):
        size = _float(value)
    else:
        number, unit = _split(value)
        if unit not in _SIZES:
            raise ValueError(_size_hint(value))
        size = number * _SIZES[unit]
    if not math.isfinite(size) or size <= 0 or size != int(size):
        raise ValueError(_size_hint(value))
    return int(size)


def transfer_s(num_bytes: int, bits_per_s: float) -> float:
    """Seconds that `num_bytes` take on a link of `bits_per_s`, headers and round trips not counted."""
    return num_bytes * BITS_PER_BYTE / bits_per_s


def format_bytes(num_bytes: float) -> str:
    """`1536` → "1.5 KiB"; whole bytes below 1 KiB."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_bits_per_s(bits_per_s: float) -> str:
    """`6e7` → "60 Mbit/s"."""
    for unit in ("Tbit/s", "Gbit/s", "Mbit/s", "kbit/s"):
        # What would be written as 1000 of the smaller unit is 1 of this one.
        if abs(bits_per_s) >= 0.99995 * _RATES[unit]:
            return f"{bits_per_s / _RATES[unit]:.4g} {unit}"
    return f"{bits_per_s:.4g} bit/s"


def format_s(seconds: float) -> str:
    """`0.0123` → "12 ms", `3.456` → "3.46 s", `75` → "1 min 15 s"."""
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if abs(seconds) < 59.995:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        # A whole number of hundreds of digits.
        return math.inf


def _split(value: object) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return (float(match[1]), match[2]) if match else (math.nan, "")


def _rate_hint(value: object) -> str:
    return f'{value!r} is no bandwidth; write for example "60 Mbit/s", "10 Gbit/s" or bits per second'


def _size_hint(value: object) -> str:
    return f'{value!r} is no size; write for example "256 MiB", "2 GiB" or a whole number of bytes'
