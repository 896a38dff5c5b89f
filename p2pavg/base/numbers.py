"""Numbers in settings: their range, and their text. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.errors import ConfigError


def check_number(name: str, value: object, most: float, *, least: float = 0.0) -> None:
    """Check that a setting is a number above 0 and at most ``most``; with ``least``, from ``least`` to ``most``.

    Raises:
        ConfigError: it is not; the message has the name, the range and the value.
    """
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 0 < value <= most or value < least:  # type: ignore[operator]
        range_of = f"from {least:g} to {most:g}" if least else f"above 0 and at most {most:g}"
        raise ConfigError(f"{name} must be a number {range_of}, got {value!r}")


def read_number(text: str) -> float:
    """Return the number in a rule's text.

    Raises:
        ConfigError: it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"a rule's parameter must be a number, got {text!r}") from None
