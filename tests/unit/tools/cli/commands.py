"""Runs the command line in this process, because starting Python with torch takes seconds."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from p2pavg.tools.cli.main import main


@dataclass(frozen=True)
class Done:
    """Output of a command, and its exit code."""

    code: int
    out: str
    err: str


class Commands:
    """The command line of a user in one folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Done:
        """Run ``p2pavg`` with these arguments."""
        self._monkeypatch.setattr(sys, "argv", ["p2pavg", *map(str, arguments)])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = self._capsys.readouterr()
        return Done(code, out, err)

    def succeeds(self, *arguments: object) -> str:
        """Return the output of a command that succeeds."""
        done = self(*arguments)
        assert (done.code, done.err) == (0, ""), done
        return done.out

    def fails(self, *arguments: object, code: int = 1) -> str:
        """Return the first line of a command that reports a mistake; the second one says what to do."""
        done = self(*arguments)
        assert (done.code, done.out) == (code, ""), done
        said, remedy = done.err.splitlines()
        assert said.startswith("p2pavg: ")
        assert remedy.startswith("p2pavg: what to do: ")
        return f"{said}\n"
