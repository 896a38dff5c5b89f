"""The options of the log stand before or after a command's name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from p2pavg.base.logs import LOGGERS, JsonFormatter
from p2pavg.tools.cli import main, options
from p2pavg.tools.cli.options import LogFormat, LogLevel, log_to_stderr
from tests.unit.tools.cli.commands import Commands


class LoggedError(Exception):
    """Ends the command once its log is set up."""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def note(*how: Any) -> None:
        found.append(how)
        raise LoggedError

    for module in (main, options):
        monkeypatch.setattr(module, "log_to_stderr", note)
    return found


def run(*arguments: str) -> None:
    typer.main.get_command(main.app).main(list(arguments), standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["peer"], (LogFormat.TEXT, LogLevel.INFO)),
        (["peer", "--log-format", "json"], (LogFormat.JSON, LogLevel.INFO)),
        (["--log-format", "json", "--log-level", "error", "peer"], (LogFormat.JSON, LogLevel.ERROR)),
        (["--log-level", "error", "peer", "--log-level", "debug"], (LogFormat.TEXT, LogLevel.DEBUG)),
        (["--log-level", "debug", "monitor", "lab"], (LogFormat.TEXT, LogLevel.DEBUG)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_the_options_of_the_log(
    heard: list[tuple[Any, ...]], arguments: list[str], expected: tuple[LogFormat, LogLevel]
) -> None:
    with pytest.raises(LoggedError):
        run(*arguments)
    assert heard == [expected]


def test_a_configuration_file_leaves_the_options_before_the_command(
    heard: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('log-format = "text"\nlog-level = "debug"\n', encoding="utf-8")
    with pytest.raises(LoggedError):
        run("--log-format", "json", "peer", "--config", str(file))
    assert heard == [(LogFormat.JSON, LogLevel.DEBUG)]


@contextmanager
def plain_root() -> Iterator[logging.Logger]:
    """Give the root logger without handlers, as in a new process; pytest adds its own before each test."""
    root = logging.getLogger()
    handlers, levels = list(root.handlers), {name: logging.getLogger(name).level for name in ("", *LOGGERS)}
    root.handlers = []
    try:
        yield root
    finally:
        root.handlers = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_a_command_without_options_of_its_own_logs_as_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands = Commands(monkeypatch, capsys)
    with plain_root() as root:
        commands.succeeds("--log-format", "json", "identity", tmp_path / "peer.key")
        [handler] = root.handlers
        assert isinstance(handler.formatter, JsonFormatter)
        assert logging.getLogger("p2pavg").level == logging.WARNING


def test_other_libraries_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_root():
        log_to_stderr(LogFormat.JSON, LogLevel.INFO)
        logging.getLogger("a.library").info("noise")
        logging.getLogger("a.library").warning("heed")
        logging.getLogger("p2pavg.rounds").info("a round")
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["heed", "a round"]
