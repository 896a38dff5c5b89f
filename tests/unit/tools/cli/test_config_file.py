"""Configuration files: every option is a key, wrong keys and types are named, and the command line wins."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer

from p2pavg.base.errors import ConfigError
from p2pavg.tools.cli import config_file
from p2pavg.tools.cli.config_file import COMMANDS, parse
from p2pavg.tools.cli.main import app
from tests.unit.tools.cli.commands import Commands

# Of each kind: TOML, and the value that the command gets.
SAMPLES: dict[type, tuple[str, object]] = {
    bool: ("true", True),
    int: ("7", 7),
    float: ("2.5", 2.5),
    str: ('"some text"', "some text"),
    Path: ('"a/file"', Path("/folder/a/file")),
}
WRONG: dict[type, tuple[str, ...]] = {
    bool: ("1", '"true"', "[true]"),
    int: ("1.5", '"7"', "true"),
    float: ('"50"', "true", "[1.0]", "1979-05-27"),
    str: ("5", '["a"]', "false"),
    Path: ("5", '["a"]'),
}


def commands() -> dict[str, Any]:
    program: Any = typer.main.get_command(app)
    return {name: command for name, command in program.commands.items() if name in COMMANDS}


EVERY = [(command, name) for command in sorted(COMMANDS) for name in COMMANDS[command]]


def element_of(kind: Any) -> Any:
    """Return the type of one value of an option."""
    return get_args(kind)[0] if get_origin(kind) is list else kind


def sample_of(kind: Any) -> tuple[str, object]:
    """Return a value of an option as TOML, and what the command gets."""
    if get_origin(kind) is list:
        sample, value = SAMPLES[element_of(kind)]
        return f"[{sample}]", [value]
    if issubclass(kind, Enum):
        last = list(kind)[-1]
        return f'"{last.value}"', last
    return SAMPLES[kind]


def test_every_option_of_every_configurable_command_is_a_key() -> None:
    assert set(COMMANDS) >= {"peer", "join", "doctor", "monitor"}
    for name, command in commands().items():
        options = {each.name for each in command.params if each.param_type_name == "option"}
        # A monitor's --listen and --name are of its page, and those of other commands of a peer.
        others = {"listen", "name"} if name == "monitor" else set()
        assert set(COMMANDS[name]) == options - {"config", "help"} - others, name


def test_a_key_means_the_same_in_every_command() -> None:
    kinds: dict[str, Any] = {}
    for command, name in EVERY:
        # The doctor's --run is a file, and that of `peer` too; what `join` takes is an argument.
        assert kinds.setdefault(name, COMMANDS[command][name]) == COMMANDS[command][name], (command, name)


@pytest.mark.parametrize(("command", "name"), EVERY)
def test_every_key_takes_a_value_of_its_type_and_no_other(command: str, name: str) -> None:
    kind = COMMANDS[command][name]
    sample, value = sample_of(kind)
    folder = Path("/folder")
    for written in (name, name.replace("_", "-")):
        assert parse(f"{written} = {sample}", command, folder) == {name: value}
    for wrong in WRONG.get(element_of(kind), ("5", '"none"', '["a"]')):
        text = f"[{wrong}]" if get_origin(kind) is list else wrong
        with pytest.raises(ConfigError, match=rf"^{name} must be "):
            parse(f"{name} = {text}", command, folder)


@pytest.mark.parametrize(("command", "name"), EVERY)
def test_every_key_reaches_the_command_and_the_command_line_wins(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = COMMANDS[command][name]
    sample, value = sample_of(kind)
    (tmp_path / "c.toml").write_text(f"{name} = {sample}")
    found: dict[str, Any] = {}
    called = commands()[command]
    monkeypatch.setattr(called, "callback", lambda **values: found.update(values))
    run = ["some.run"] if command in ("join", "monitor") else []
    config = ["--config", str(tmp_path / "c.toml")]

    def main(*given: str) -> object:
        found.clear()
        called.main([*run, *given], standalone_mode=False, prog_name=command)
        return found[name]

    assert str(main(*config)) == str(tmp_path / "a/file" if kind is Path else value)
    (option,) = [each for each in called.params if each.name == name]
    if kind is bool:
        if option.secondary_opts:
            assert main(*config, option.secondary_opts[0]) is False
        return
    words = {int: "9", float: "9.5", str: "other", Path: "other"}
    given = words.get(element_of(kind)) or next(iter(kind)).value
    won = main(*config, option.opts[0], given)
    assert str(won) == str([given] if get_origin(kind) is list else given)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "pattern"),
        [
            ("bandwith = 5", r"c\.toml: unknown key 'bandwith'; did you mean bandwidth\?"),
            ("max-uplod-mbps = 5", r"unknown key 'max-uplod-mbps'; did you mean max_upload_mbps\?"),
            ("xyzzy = 5", r"unknown key 'xyzzy'; the keys are announce, "),
            ("[peer]\nbandwidth = 5", r"unknown key 'peer'"),
            ("[listen]\na = 5", r"listen must be a list.*, got a table"),
            ('bandwidth = "50"', r"c\.toml: bandwidth must be a number, such as 50\.0, got '50'"),
            ("listen = 5", r"listen must be a list, each of it text in quotation marks, .*, got 5"),
            ("run-id = 'a'\nrun_id = 'a'", "run_id is there twice"),
            ("bandwidth = ", r"c\.toml: it is not TOML"),
            ("bandwidth = 0", r"c\.toml: bandwidth must be a number from 0\.1 to 100000, got 0\.0"),
            ("max-upload-mbps = -1.0", r"c\.toml: max_upload_mbps must be a number above 0"),
            ("relay_mbps = -1", r"c\.toml: relay_mbps must be a number"),
            ('listen = ["127.0.0.1:4001"]', r"c\.toml: '127\.0\.0\.1:4001' is not an address"),
            ('run = "missing.run"', r"c\.toml: --run needs --certificate FILE"),
        ],
    )
    def test_file_and_key_are_named(self, p2pavg: Commands, text: str, pattern: str) -> None:
        Path("c.toml").write_text(text)
        done = p2pavg("peer", "--config", "c.toml")
        assert done.code == 1
        assert done.out == ""

        assert re.search(pattern, done.err), done.err
        assert "Traceback" not in done.err

    def test_a_value_of_the_command_line_does_not_name_the_file(self, p2pavg: Commands) -> None:
        Path("c.toml").write_text("relay_mbps = 5")
        assert "c.toml" not in p2pavg("peer", "--config", "c.toml", "--bandwidth", "0").err

    def test_a_file_that_is_missing_or_too_long(self, p2pavg: Commands) -> None:
        assert (
            "cannot read the configuration file missing.toml"
            in p2pavg("peer", "--config", "missing.toml").err
        )
        Path("c.toml").write_text("#" * (config_file.MAX_BYTES + 1))
        assert "has more than" in p2pavg("peer", "--config", "c.toml").err

    def test_keys_of_other_commands_are_passed_over(self) -> None:
        assert parse("bandwidth = 5\nidentity = 'a'", "doctor", Path("/x")) == {"identity": Path("/x/a")}


def test_paths_are_relative_to_the_file_and_a_tilde_is_the_users_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = parse('identity = "~/peer.key"\nhome = "h"\ncertificate = "/c"', "peer", Path("/etc/p2pavg"))
    assert found == {
        "identity": Path("/home/me/peer.key"),
        "home": Path("/etc/p2pavg/h"),
        "certificate": Path("/c"),
    }
