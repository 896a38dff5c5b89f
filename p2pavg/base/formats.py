"""Numbers as people read them: bytes, durations, counts, and rows of bars. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def in_bytes(number: float) -> str:
    """Return a number of bytes with a unit that people read."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def in_time(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((i for i, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number or unit == "s")


def count(number: int, thing: str) -> str:
    """Return a number of things, such as "2 peers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def bars(values: Sequence[float], width: int) -> str:
    """Return numbers as a row of bars of at most ``width`` characters; each is the last value of its stretch."""
    if len(values) > width:
        values = [values[(index + 1) * len(values) // width - 1] for index in range(width)]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)
