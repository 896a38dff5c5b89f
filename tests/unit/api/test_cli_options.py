"""The command line, option by option: users' scripts and unit files depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import typer
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce.context import RunContext
from p2pavg.group.bandwidth import DEFAULT_MBPS
from p2pavg.peer.auxiliary import HelpedRounds, assist
from p2pavg.round.round import Round
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.tools.cli import daemon
from p2pavg.tools.cli.main import app

FROZEN = Path(__file__).with_name("cli_options.txt")
"""Each command with its options and arguments, one a line."""


def line_of(parameter: Any) -> str:
    """Return the line of an option or argument: its spellings, if it is required or repeated, and its default."""
    words = [", ".join(parameter.opts)]
    if parameter.required:
        words.append("(required)")
    if parameter.param_type_name == "option" and parameter.multiple:
        words.append("(repeated)")
    if parameter.default is not None:
        words.append(f"= {getattr(parameter.default, 'value', parameter.default)!r}")
    return " ".join(words)


def section(name: str, command: Any) -> str:
    return "\n  ".join([f"p2pavg {name}".strip(), *map(line_of, command.params)]) + "\n"


def test_commands_and_options_are_frozen() -> None:
    """A change of them needs a deliberate change of the file."""
    program: Any = typer.main.get_command(app)
    sections = [section("", program)]
    for name, command in program.commands.items():
        if hasattr(command, "commands"):
            sections += [section(f"{name} {inner}", each) for inner, each in command.commands.items()]
        else:
            sections.append(section(name, command))
    assert "\n".join(sections) == FROZEN.read_text(encoding="utf-8")


class LeftError(Exception):
    """Ends the auxiliary once it has been called."""


@pytest.mark.parametrize(
    ("given", "bandwidth", "upload", "download", "name"),
    [
        ([], None, None, None, ""),
        (
            [
                *("--bandwidth", "50", "--max-upload-mbps", "8.5", "--max-download-mbps", "40"),
                "--name",
                "garage",
            ],
            *(50.0, 8.5, 40.0, "garage"),
        ),
    ],
)
def test_link_options_reach_the_auxiliary(
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    bandwidth: float | None,
    upload: float | None,
    download: float | None,
    name: str,
) -> None:
    heard: dict[str, Any] = {}

    async def record_and_leave(peer: p2pavg.Peer, run_id: str, **how: object) -> None:
        heard.update(how, run_id=run_id)
        raise LeftError

    monkeypatch.setattr(daemon, "assist", record_and_leave)
    arguments = ["peer", "--listen", "/ip4/127.0.0.1/tcp/0", "--run-id", "run", *given]
    with pytest.raises(LeftError):
        typer.main.get_command(app).main(arguments, standalone_mode=False)
    assert isinstance(heard.pop("helping"), HelpedRounds)
    assert heard == {
        "run_id": "run",
        "bandwidth": bandwidth,
        "max_upload_mbps": upload,
        "max_download_mbps": download,
        "access": None,
        "name": name,
    }


async def test_concurrent_auxiliary_rounds_share_one_limit(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[RunContext] = []

    async def note(self: Round[Any]) -> None:
        if self.role.auxiliary:
            used.append(self._rounds.context)
            await trio.sleep_forever()
        await run(self)

    run = Round.run

    monkeypatch.setattr(Round, "run", note)
    config = p2pavg.AveragingConfig(run_id="sim", match_timeout=60.0)
    async with (
        simulated_peers(MemoryNetwork(latency=(0.0005, 0.002)), 3) as (helper, one, another),
        one.averager(config) as of_few,
        another.averager(config) as of_many,
        trio.open_nursery() as nursery,
    ):
        for averager, elements in ((of_few, 100), (of_many, 200)):
            averager.accumulate([torch.ones(elements)])
            await averager.step(wait=1.0)

        async def help_on() -> None:
            await assist(helper, "sim", max_upload_mbps=8.0, max_download_mbps=30.0)

        nursery.start_soon(help_on)
        await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    first, second = used
    assert first.upload is second.upload
    assert first.download is second.download
    assert first.upload is not first.download
    assert not first.upload.unlimited
    assert not first.download.unlimited
    assert first.meter is not second.meter
    assert first.meter.mbps == second.meter.mbps == 8.0 < DEFAULT_MBPS


@pytest.mark.parametrize("name", ["bandwidth", "max_upload_mbps", "max_download_mbps"])
async def test_out_of_range_options_are_refused_like_an_averagers(name: str) -> None:
    async with simulated_peers(MemoryNetwork(), 1) as (peer,):
        with pytest.raises(p2pavg.ConfigError, match=rf"^{name} must be a number (above 0|from 0.1 to)"):
            await assist(peer, "sim", **{name: -1.0})  # type: ignore[arg-type]
