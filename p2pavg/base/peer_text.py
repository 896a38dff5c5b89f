"""Text that another peer has written: a type that can only be shown. No I/O, no clock.

A peer's reasons and names end up in logs, terminals, web pages and exceptions. Some of these places have a language of
their own: a terminal obeys control characters, text that changes its direction hides what it says, rich has markup in
square brackets, and ``str.format`` and ``%`` have fields. A peer that writes this language must not be obeyed, and an
error of the language must not end the program that shows its text.

So a decoder makes a :class:`PeerText` of each such text, at the place where the bytes come in. Sentences that are built
around it are plain ``str`` again. Each place that shows sentences therefore takes them as they are: rich gets
``Text`` objects, or ``markup=False``.
"""

from __future__ import annotations

from typing import Any, NoReturn

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
