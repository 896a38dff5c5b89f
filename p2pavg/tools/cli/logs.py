"""The options of the log, for all commands."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Annotated

import typer

from p2pavg.base.logs import LOGGERS, level_number, make_handler


class LogFormat(StrEnum):
    """The forms of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


FORMAT = typer.Option(
    "--log-format", envvar="P2PAVG_LOG_FORMAT", help="Log lines for people, or one JSON object a line."
)
LEVEL = typer.Option("--log-level", envvar="P2PAVG_LOG_LEVEL", help="Log this level and those above.")
FormatOption = Annotated[LogFormat, FORMAT]
LevelOption = Annotated[LogLevel, LEVEL]
COMMANDS_WITH_OPTIONS = ("peer", "join", "doctor", "monitor")
"""Commands that have these options themselves."""


def log_all(context: typer.Context, form: LogFormat | None, level: LogLevel | None) -> None:
    """Take the options that stand before the command's name; a command's own ones count more."""
    given = {"log_format": form, "log_level": level}
    named = {name: value.value for name, value in given.items() if value is not None}
    if not named:
        return
    context.default_map = dict.fromkeys(COMMANDS_WITH_OPTIONS, named)
    if context.invoked_subcommand not in COMMANDS_WITH_OPTIONS:
        log_to_stderr(form or LogFormat.TEXT, level or LogLevel.WARNING)


def log_to_stderr(form: LogFormat = LogFormat.TEXT, level: LogLevel = LogLevel.INFO) -> None:
    """Log to standard error: this library's lines from ``level`` on, and warnings of other libraries."""
    logging.basicConfig(handlers=[make_handler(form)], level=logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level_number(level))
