"""The log: its forms, no raw bytes, and a rate limit for what is repeated."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from p2pavg.base import logs
from p2pavg.base.logs import (
    MAX_CAUSES,
    JsonFormatter,
    RepeatFilter,
    Repeats,
    TextFormatter,
    configure,
    printable,
)
from p2pavg_dht import Ed25519Signer

PEER, OTHER = (Ed25519Signer(bytes([seed]) * 32).peer_id for seed in (1, 2))


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream for the library's log, whose loggers are restored."""
    before = {
        name: (logger.level, logger.propagate, list(logger.handlers))
        for name in (*logs.LOGGERS, *logs.NOISY)
        for logger in [logging.getLogger(name)]
    }
    yield io.StringIO()
    for name, (level, propagate, handlers) in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def record(message: str, *args: object, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("p2pavg.test", level, __file__, 1, message, args, None)
    vars(made).update(fields)
    return made


def of_an_exception(text: str) -> logging.LogRecord:
    made = record("it failed")
    made.exc_info = (ValueError, ValueError(text), None)
    return made


class TestForms:
    def test_an_exception_begins_no_line_and_obeys_no_terminal(self) -> None:
        """It may quote what a peer sent."""
        forged = "wrong\x1b[2J\n2026-11-23 00:00:00 INFO p2pavg: all is well"
        first, *others = TextFormatter().format(of_an_exception(forged)).splitlines()
        assert first.endswith("it failed")
        assert others
        assert all(line.startswith("  ") and "\x1b" not in line for line in others)

    def test_a_line_of_json_is_ascii(self) -> None:
        line = JsonFormatter().format(record("x", run="a\u202eb\x9b2J"))
        assert line.isascii()
        assert json.loads(line)["run"] == "a\u202eb\x9b2J"

    def test_a_line_of_json_has_the_fields_that_are_known(self) -> None:
        line = record("lost %s", PEER, run="lab", round="0a1b2c3d")
        assert json.loads(JsonFormatter().format(line)) == {
            "time": round(line.created, 3),
            "level": "warning",
            "logger": "p2pavg.test",
            "message": f"lost {PEER}",
            "peer": PEER,
            "run": "lab",
            "round": "0a1b2c3d",
        }

    def test_an_exception_is_a_field_on_the_same_line(self) -> None:
        made = record("failed")
        made.exc_info = (ValueError, ValueError("wrong"), None)
        text = JsonFormatter().format(made)
        assert "\n" not in text
        assert "ValueError: wrong" in json.loads(text)["exception"]

    def test_a_line_of_text(self) -> None:
        assert TextFormatter().format(record("hello")).endswith(" WARNING p2pavg.test: hello")

    def test_raw_bytes_and_control_characters_are_not_written(self) -> None:
        text = printable(f"Send(group_id={bytes(range(32))!r}, ok={b''!r}) \x1b[31m and b'broken")
        assert text == "Send(group_id=<32 bytes 00010203…>, ok=<0 bytes>) ?[31m and b'broken"

    def test_each_form_hides_raw_bytes(self) -> None:
        for formatter in (TextFormatter(), JsonFormatter()):
            assert "<2 bytes ff00>" in formatter.format(record("%r", b"\xff\x00"))


class TestConfigure:
    def test_it_writes_one_line_each_and_replaces_earlier_settings(self, stream: io.StringIO) -> None:
        configure(level="info", form="text", stream=stream)
        configure(level="info", form="json", stream=stream)
        logging.getLogger("p2pavg.x").info("seen")
        logging.getLogger("p2pavg_dht.x").debug("not seen")
        [line] = stream.getvalue().splitlines()
        assert json.loads(line)["message"] == "seen"

    @pytest.mark.parametrize("wrong", [{"level": "loud"}, {"form": "xml"}])
    def test_unknown_settings_are_refused(self, wrong: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"loud|xml"):
            configure(**wrong)  # type: ignore[arg-type]


class TestRepeats:
    def test_a_dead_peer_fills_no_log(self) -> None:
        """One line a second for an hour, each with another number."""
        clock = Clock()
        kept = RepeatFilter(clock)
        shown = []
        for second in range(3600):
            clock.now = float(second)
            line = record("cannot reach %s: timed out after %d s", PEER, second)
            if kept.filter(line):
                shown.append((second, vars(line)["left_out"]))
        assert shown[:4] == [(0, 0), (10, 9), (30, 19), (70, 39)]
        assert len(shown) < 13
        assert sum(left for _, left in shown) + len(shown) + 3599 - shown[-1][0] == 3600

    def test_the_count_is_in_the_text(self) -> None:
        line = record("gone", left_out=7)
        assert TextFormatter().format(line).endswith("gone (and 7 more like this)")

    def test_another_peer_and_another_cause_are_shown_at_once(self) -> None:
        kept = RepeatFilter(Clock())
        assert kept.filter(record("cannot reach %s", PEER))
        assert kept.filter(record("cannot reach %s", OTHER))
        assert kept.filter(record("was refused by %s", PEER))
        assert not kept.filter(record("cannot reach %s", PEER))

    def test_a_cause_that_had_stopped_is_shown_at_once(self) -> None:
        clock = Clock()
        kept = RepeatFilter(clock)
        assert kept.filter(record("gone"))
        clock.now = 25.0
        assert kept.filter(record("gone"))
        clock.now = 34.0
        assert not kept.filter(record("gone"))
        clock.now = 36.0
        assert kept.filter(record("gone"))

    def test_lines_of_rounds_are_not_left_out(self) -> None:
        kept = RepeatFilter(Clock())
        assert all(kept.filter(record("averaged %d", number, level=logging.INFO)) for number in range(9))
        lines = [record("%s left", PEER, level=logging.INFO) for _ in range(3)]
        assert [kept.filter(line) for line in lines] == [True, False, False]

    def test_the_number_of_causes_is_bounded(self) -> None:
        repeats = Repeats()
        for number in range(2 * MAX_CAUSES):
            assert repeats.heard(f"cause {number}", 0.0) == 0
        assert len(repeats._causes) == MAX_CAUSES


@contextmanager
def bare(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take all handlers away, as in a program that has set up no log; ``stream`` is its standard error."""
    monkeypatch.setattr("sys.stderr", stream)
    for name in (*logs.LOGGERS, *logs.NOISY):
        logging.getLogger(name).handlers = []
    logs.install_default()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


class Exhausted(trio.abc.Listener[trio.abc.Stream]):
    """A listener of a process that has no file left."""

    async def accept(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class TestDefault:
    """A program that has set up no log."""

    def test_repeated_warnings_are_left_out(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with bare(stream, monkeypatch):
            for _ in range(5):
                logging.getLogger("p2pavg.net").warning("%s does not answer", PEER)
        assert stream.getvalue() == f"{PEER} does not answer\n"

    def test_a_listener_for_which_no_file_can_be_opened_is_reported_once(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def serve(_: trio.abc.Stream) -> None:
            raise AssertionError("no connection comes")

        async def listen() -> None:
            with trio.move_on_after(5.0):
                await trio.serve_listeners(serve, [Exhausted()])

        with bare(stream, monkeypatch):
            trio.run(listen, clock=trio.testing.MockClock(autojump_threshold=0))
        assert stream.getvalue().count("accept returned EMFILE") == 1

    def test_what_is_no_warning_is_not_written(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with bare(stream, monkeypatch):
            logger = logging.getLogger("p2pavg")
            logger.setLevel(logging.INFO)
            logger.info("a peer has come")
        assert not stream.getvalue()

    def test_a_program_with_a_log_of_its_own_gets_each_line_once(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = io.StringIO()
        with bare(stream, monkeypatch):
            logging.getLogger().addHandler(logging.StreamHandler(own))
            logging.getLogger("p2pavg.net").warning("once")
        assert (own.getvalue(), stream.getvalue()) == ("once\n", "")

    @pytest.mark.parametrize(("name", "handled"), [("p2pavg", "p2pavg"), ("trio.serve_listeners", "trio")])
    def test_so_does_one_with_handlers_below_the_root(
        self, name: str, handled: str, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = io.StringIO()
        handler = logging.StreamHandler(own)
        with bare(stream, monkeypatch):
            logging.getLogger(handled).addHandler(handler)
            logging.getLogger(name).warning("once")
            logging.getLogger(handled).removeHandler(handler)
        assert (own.getvalue(), stream.getvalue()) == ("once\n", "")

    def test_configure_takes_its_place(self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
        configured = io.StringIO()
        with bare(stream, monkeypatch):
            configure(stream=configured)
            logging.getLogger("p2pavg.net").warning("once")
        assert "once" in configured.getvalue()
        assert not stream.getvalue()
