"""The log of this library, as text for people or as JSON for programs.

The library logs through :mod:`logging`, under ``p2pavg``, ``p2pavg_dht`` and ``p2pavg_compression``. :func:`configure`
shows that log in a training loop; a program with a setup of its own may take :class:`JsonFormatter`,
:class:`TextFormatter` and :class:`RepeatFilter` from here.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, TextIO, TypeAlias

from p2pavg.base.limits import MAX_BACKOFF_SECONDS, WARN_WAIT_SECONDS

Form: TypeAlias = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
LOGGERS = ("p2pavg", "p2pavg_dht", "p2pavg_compression")
FIELDS = ("run", "round", "peer", "result", "seconds", "members", "bytes_sent", "bytes_received")
"""Fields of a line of JSON besides ``time``, ``level``, ``logger`` and ``message``, where they are known."""

NOISY = ("trio.serve_listeners",)
"""Loggers of other libraries that repeat themselves: this one ten times a second, as long as no file can be opened."""
MAX_CAUSES = 1024
"""Causes that are remembered; the one whose last line is oldest is forgotten."""

_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_BYTES = re.compile(r"""\bb(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""")
_DIGITS = re.compile(r"[0-9]+")
_SHOWN_BYTES = 4


def configure(*, level: str = "info", form: Form = "text", stream: TextIO | None = None) -> None:
    """Write the library's log to a stream. A later call replaces the settings of an earlier one.

    Args:
        level: ``"debug"``, ``"info"`` (one line a round, and what changes), ``"warning"`` or ``"error"``.
        form: ``"text"``, or ``"json"`` for one object a line with the fields ``time`` (seconds since 1970), ``level``,
            ``logger``, ``message`` and, where they are known, those of :data:`FIELDS`.
        stream: standard error if not given.

    Raises:
        ValueError: the level or the form is unknown.
    """
    handler = make_handler(form, stream)
    number = level_number(level)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for earlier in [each for each in logger.handlers if isinstance(each, _Handler)]:
            logger.removeHandler(earlier)
        logger.addHandler(handler)
        logger.setLevel(number)
        logger.propagate = False  # or a program with handlers of its own would write each line twice


def install_default() -> None:
    """Write warnings to standard error without repetitions, as long as a program has set up no log of its own.

    Python would write them all: a peer that has died would fill the terminal. A program that sets up
    :mod:`logging` decides by itself, and may take :class:`RepeatFilter` from here.
    """
    for name in (*LOGGERS, *NOISY):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(_DefaultHandler())


def level_number(level: str) -> int:
    """Return the number that :mod:`logging` has for a level. Raise ValueError if it is unknown."""
    if level not in LEVELS:
        raise ValueError(f"a level of the log is one of {', '.join(LEVELS)}, not {level!r}")
    return logging.getLevelNamesMapping()[level.upper()]


def make_handler(form: str, stream: TextIO | None = None) -> logging.Handler:
    """Return a handler that writes in a form and leaves out what is repeated. Raise ValueError for another form."""
    if form not in ("text", "json"):
        raise ValueError(f"the form of the log is text or json, not {form!r}")
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RepeatFilter())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that :func:`configure` can tell from those of other programs."""


class _DefaultHandler(_Handler):
    """Takes the place of Python's handler of last resort, for the loggers of this library and those of NOISY."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)
        self.setFormatter(_MessageFormatter())
        self._repeats = RepeatFilter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless a handler of the program gets it."""
        if _is_handled(record.name) or not self._repeats.filter(record):
            return
        self.stream = sys.stderr  # which a program may have replaced
        super().emit(record)


def _is_handled(name: str) -> bool:
    """Return whether a program's own handler gets what is logged under a name."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _DefaultHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class _MessageFormatter(logging.Formatter):
    """The message alone, as Python writes it by default."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        """See :class:`logging.Formatter`."""
        record.message = _shown(record)
        return super().formatMessage(record)


class TextFormatter(_MessageFormatter):
    """A line of text: time, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name that logging calls
        """See :class:`logging.Formatter`. An exception may quote what a peer sent, so it begins no line of its own."""
        return "  " + printable(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """An object of JSON on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        record.message = record.getMessage()
        message = _shown(record)
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if (found := _PEER_ID.search(message)) is not None:
            line["peer"] = found.group()
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # escapes all but ASCII: a field may be another peer's text


class RepeatFilter(logging.Filter):
    """Leaves out repeated warnings of one cause and one peer, with growing pauses, and counts them.

    It also leaves out repeated lines at INFO that name a peer, such as those about a peer that has died. Two lines have
    one cause if they differ in numbers only.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        """See :class:`logging.Filter`."""
        message = record.getMessage()
        names_peer = _PEER_ID.search(message) is not None
        if record.levelno < (logging.INFO if names_peer else logging.WARNING):
            return True
        peers = " ".join(_PEER_ID.findall(message))
        left_out = self._repeats.heard(f"{record.name} {peers} {_DIGITS.sub('', message)}", self._clock())
        if left_out is None:
            return False
        record.left_out = left_out
        return True


class Repeats:
    """The rule for repeated causes: the first at once, the next ones after doubling pauses. It has no clock."""

    def __init__(self) -> None:
        self._causes: OrderedDict[str, _Cause] = OrderedDict()

    def heard(self, cause: str, now: float) -> int | None:
        """Return the number of lines left out since the last one, or ``None`` to leave this one out too."""
        known = self._causes.pop(cause, None)
        if known is None or now >= known.quiet_until + known.pause:  # it had stopped meanwhile
            known = _Cause(now, 0 if known is None else known.left_out)
        elif now >= known.quiet_until:
            known.pause = min(2 * known.pause, MAX_BACKOFF_SECONDS)
            known.quiet_until = now + known.pause
        else:
            known.left_out += 1
            self._causes[cause] = known
            return None
        self._causes[cause] = known
        if len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
        left_out, known.left_out = known.left_out, 0
        return left_out


class _Cause:
    __slots__ = ("left_out", "pause", "quiet_until")

    def __init__(self, now: float, left_out: int) -> None:
        self.pause = WARN_WAIT_SECONDS
        self.quiet_until = now + self.pause
        self.left_out = left_out


def _shown(record: logging.LogRecord) -> str:
    """Return a record's message as printable text without raw bytes, with the count of lines that were left out."""
    text = printable(record.message)
    left_out = getattr(record, "left_out", 0)
    return f"{text} (and {left_out} more like this)" if left_out else text


def printable(text: str) -> str:
    """Return text without raw bytes and control characters; line breaks stay, indented."""
    text = _BYTES.sub(_short_bytes, text)
    return "".join(each if each.isprintable() else "\n  " if each == "\n" else "?" for each in text)


def _short_bytes(found: re.Match[str]) -> str:
    try:
        value = ast.literal_eval(found.group())
    except (ValueError, SyntaxError):
        return "<bytes>"
    if not value:
        return "<0 bytes>"
    more = "…" if len(value) > _SHOWN_BYTES else ""
    return f"<{len(value)} bytes {value[:_SHOWN_BYTES].hex()}{more}>"
