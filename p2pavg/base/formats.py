"""Numbers as people read them: bytes, durations, counts, and rows of bars. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

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


# Text that another peer has written: a type that can only be shown.
#
# A peer's reasons and names end up in logs, terminals, web pages and exceptions. Some of these places have a language
# of their own: a terminal obeys control characters, text that changes its direction hides what it says, rich has
# markup in square brackets, and `str.format` and `%` have fields. A peer that writes this language must not be
# obeyed, and an error of the language must not end the program that shows its text.
#
# So a decoder makes a PeerText of each such text, at the place where the bytes come in. Sentences that are built
# around it are plain `str` again. Each place that shows sentences therefore takes them as they are: rich gets `Text`
# objects, or `markup=False`.

REPLACEMENT = "?"


class PeerText(str):
    """One line of printable text from another peer: ``?`` stands for each character that is not printable.

    It is a ``str`` in all other respects, except that it is never a format. The decoder bounds its length, because it
    knows its message's limit.
    """

    __slots__ = ()

    def __new__(cls, text: str = "") -> PeerText:
        """Return the text with ``?`` for control characters, line breaks, changes of direction and lone surrogates."""
        if not text.isprintable():
            text = "".join(each if each.isprintable() else REPLACEMENT for each in text)
        return super().__new__(cls, text)

    def __mod__(self, _: Any) -> NoReturn:
        raise TypeError("a peer's text is no format")

    def format(self, *_: object, **__: object) -> NoReturn:
        """Raise TypeError: a peer's text is no format."""
        raise TypeError("a peer's text is no format")

    def format_map(self, _: Any) -> NoReturn:
        """Raise TypeError: a peer's text is no format."""
        raise TypeError("a peer's text is no format")
