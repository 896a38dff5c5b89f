"""The command line, option by option: users' scripts and unit files depend on it."""

from __future__ import annotations

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
from p2pavg.tools.cli.daemon_commands import LogFormat, LogLevel
from p2pavg.tools.cli.main import app

# (spellings, may be given several times, default)
CERTIFICATE: dict[str, tuple[list[str], bool, object]] = {
    "run_file": (["run_file"], False, None),
    "peer_id": (["peer_id"], False, None),
    "max_weight": (["--max-weight"], False, None),
    "days": (["--days"], False, None),
    "role": (["--role"], True, ["contributor"]),
    "key": (["--key"], False, None),
    "output": (["--output", "-o"], False, None),
}
LINK: dict[str, tuple[list[str], bool, object]] = {
    "listen": (["--listen"], True, []),
    "bootstrap": (["--bootstrap"], True, []),
    "identity": (["--identity"], False, None),
    "certificate": (["--certificate"], False, None),
    "delegate": (["--delegate"], False, False),
    "name": (["--name"], False, ""),
    "bandwidth": (["--bandwidth"], False, None),
    "max_upload_mbps": (["--max-upload-mbps"], False, None),
    "max_download_mbps": (["--max-download-mbps"], False, None),
    "announce": (["--announce"], True, []),
    "port_mapping": (["--port-mapping"], False, True),
    "relay_mbps": (["--relay-mbps"], False, 10.0),
    "home": (["--home"], False, None),
    "config": (["--config"], False, None),
    "verbose": (["--verbose", "-v"], False, False),
    "metrics": (["--metrics"], False, None),
    "log_format": (["--log-format"], False, LogFormat.TEXT),
    "log_level": (["--log-level"], False, LogLevel.INFO),
}
DAEMON: dict[str, tuple[list[str], bool, object]] = {
    "run": (["run"], False, None),
    "home": (["--home"], False, None),
}
OPTIONS: dict[str, dict[str, tuple[list[str], bool, object]]] = {
    "": {
        "version": (["--version"], False, False),
        "install_completion": (["--install-completion"], False, None),
        "show_completion": (["--show-completion"], False, None),
        "log_format": (["--log-format"], False, None),
        "log_level": (["--log-level"], False, None),
    },
    "join": LINK
    | {
        "run": (["run"], False, None),
        "link": (["--link"], False, None),
        "plain": (["--plain"], False, False),
        "only_help": (["--only-help"], False, False),
        "yes": (["--yes"], False, False),
        "no_fence": (["--no-fence"], False, False),
        "job": (["--job"], True, []),
        "files": (["--files"], False, None),
        "monitor": (["--monitor"], False, None),
    },
    "status": DAEMON | {"json": (["--json"], False, False)},
    "stop": DAEMON | {"timeout": (["--timeout"], False, 70.0)},
    "peer": LINK
    | {
        "run_id": (["--run-id"], False, None),
        "open_run": (["--open", "--open-run"], False, False),
        "run": (["--run"], False, None),
        "monitor": (["--monitor"], False, None),
    },
    "monitor": {
        "run": (["run"], False, None),
        "bootstrap": (["--bootstrap"], True, []),
        "port": (["--port"], False, None),
        "listen": (["--listen"], False, None),
        "token_file": (["--token-file"], False, None),
        "name": (["--name"], True, []),
        "history": (["--history"], False, None),
        "terminal": (["--terminal"], False, False),
        "certificate": (["--certificate"], False, None),
        "identity": (["--identity"], False, None),
        "peer_listen": (["--peer-listen"], True, []),
        "config": (["--config"], False, None),
        "log_format": (["--log-format"], False, LogFormat.TEXT),
        "log_level": (["--log-level"], False, LogLevel.WARNING),
    },
    "identity": {"file": (["file"], False, None)},
    "files": {"folder": (["folder"], False, None)},
    "doctor": {
        "listen": (["--listen"], True, ["/ip4/0.0.0.0/tcp/0"]),
        "bootstrap": (["--bootstrap"], True, []),
        "identity": (["--identity"], False, None),
        "run_id": (["--run-id"], False, None),
        "run": (["--run"], False, None),
        "certificate": (["--certificate"], False, None),
        "announce": (["--announce"], True, []),
        "port_mapping": (["--port-mapping"], False, True),
        "config": (["--config"], False, None),
        "json": (["--json"], False, False),
        "verbose": (["--verbose", "-v"], False, False),
        "log_format": (["--log-format"], False, LogFormat.TEXT),
    },
    "launch": {
        "program": (["program"], False, None),
        "count": (["-n", "--peers"], False, 2),
        "job": (["--job"], False, None),
        "elastic": (["--elastic"], False, False),
    },
    "job check": {"folder": (["folder"], False, None)},
    "job pack": {"folder": (["folder"], False, None), "output": (["--output", "-o"], False, None)},
    "job show": {"file": (["file"], False, None)},
    "job unpack": {"file": (["file"], False, None), "folder": (["folder"], False, None)},
    "job publish": {
        "folder": (["folder"], False, None),
        "file": (["file"], False, None),
        "since": (["--since"], False, None),
        "bootstrap": (["--bootstrap"], True, []),
    },
    "job fence": {"test": (["--test"], False, False)},
    "run create": {
        "job": (["--job"], False, None),
        "name": (["name"], False, None),
        "group_size": (["--group-size"], False, 4),
        "min_group_size": (["--min-group-size"], False, 2),
        "match_timeout": (["--match-timeout"], False, 30.0),
        "exchange_timeout": (["--exchange-timeout"], False, 60.0),
        "compression": (["--compression"], False, "blockwise8"),
        "max_weight": (["--max-weight"], False, None),
        "robust": (["--robust"], False, None),
        "max_norm": (["--max-norm"], False, None),
        "audit": (["--audit"], False, "after"),
        "topology": (["--topology"], False, "butterfly"),
        "bandwidth": (["--bandwidth"], False, None),
        "max_upload_mbps": (["--max-upload-mbps"], False, None),
        "max_download_mbps": (["--max-download-mbps"], False, None),
        "relay_mbps": (["--relay-mbps"], False, None),
        "strategy": (["--strategy"], False, None),
        "bootstrap": (["--bootstrap"], True, []),
        "address": (["--address"], False, None),
        "count": (["--count"], False, 1),
        "days": (["--days"], False, 7.0),
        "output": (["--output", "-o"], False, None),
    },
    "run invite": CERTIFICATE,
    "run delegate": CERTIFICATE,
    "run revoke": {
        "run_file": (["run_file"], False, None),
        "what": (["what"], False, None),
        "key": (["--key"], False, None),
        "number": (["--number"], False, None),
        "bootstrap": (["--bootstrap"], True, []),
        "offline": (["--offline"], False, False),
    },
    "run publish": {
        "run_file": (["run_file"], False, None),
        "key": (["--key"], False, None),
        "bootstrap": (["--bootstrap"], True, []),
    },
    "run rotate": {"run_file": (["run_file"], False, None), "output": (["--output", "-o"], False, None)},
    "run show": {"file": (["file"], False, None), "secret": (["--secret"], False, False)},
    "run link": {
        "run_file": (["run_file"], False, None),
        "certificate": (["--certificate"], False, None),
        "identity": (["--identity"], False, None),
        "address": (["--address"], False, None),
        "count": (["--count"], False, 1),
        "days": (["--days"], False, 7.0),
        "certificate_days": (["--certificate-days"], False, None),
        "role": (["--role"], True, []),
        "max_weight": (["--max-weight"], False, None),
    },
    "checkpoint show": {"file": (["file"], False, None)},
    "checkpoint verify": {"file": (["file"], False, None)},
    "checkpoint export": {
        "file": (["file"], False, None),
        "output": (["output"], False, None),
        "form": (["--format"], False, None),
        "force": (["--force"], False, False),
        "like": (["--like"], False, None),
        "dtype": (["--dtype"], False, None),
    },
    "archive": {
        "folder": (["folder"], False, None),
        "run": (["--run"], False, None),
        "home": (["--home"], False, None),
        "keep": (["--keep"], False, None),
        "log_format": (["--log-format"], False, LogFormat.TEXT),
        "log_level": (["--log-level"], False, LogLevel.INFO),
    },
    "history verify": {
        "folder": (["folder"], False, None),
        "run": (["--run"], False, None),
        "model": (["--model"], False, None),
        "first": (["--from"], False, None),
        "last": (["--to"], False, None),
        "sample": (["--sample"], False, None),
        "again": (["--again"], False, False),
        "device": (["--device"], False, "cpu"),
    },
    "history credits": {
        "folder": (["folder"], False, None),
        "run": (["--run"], False, None),
        "form": (["--format"], False, "table"),
        "output": (["--output", "-o"], False, None),
        "same": (["--same"], True, []),
        "against": (["--against"], False, None),
    },
    "history receipt": {
        "peer": (["peer"], False, None),
        "folder": (["folder"], False, None),
        "output": (["--output", "-o"], False, None),
        "check": (["--check"], False, False),
    },
    "history merge": {"output": (["output"], False, None), "folders": (["folders"], False, None)},
    "history same": {"output": (["output"], False, None), "identities": (["identities"], False, None)},
}


def options_of(command: Any) -> dict[str, tuple[list[str], bool, object]]:
    return {
        parameter.name: (
            parameter.opts,
            parameter.multiple if parameter.param_type_name == "option" else False,
            parameter.default,
        )
        for parameter in command.params
    }


def commands() -> dict[str, Any]:
    """Return each command by its name, those of a group after the group's name."""
    program: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in program.commands.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {inner}": each for inner, each in command.commands.items()}
        else:
            found[name] = command
    return found


def test_commands_and_options_are_frozen() -> None:
    found = {"": options_of(typer.main.get_command(app))}
    found |= {name: options_of(command) for name, command in commands().items()}
    assert found == OPTIONS


def test_required_arguments() -> None:
    required = {
        name: {parameter.name for parameter in command.params if parameter.required}
        for name, command in commands().items()
    }
    assert required == {
        "join": {"run"},
        "status": set(),
        "stop": set(),
        "peer": set(),
        "monitor": {"run"},
        "identity": {"file"},
        "files": {"folder"},
        "doctor": set(),
        "run create": {"name"},
        "run invite": {"run_file", "peer_id", "max_weight", "days"},
        "run delegate": {"run_file", "peer_id", "max_weight", "days"},
        "run revoke": {"run_file", "what"},
        "run publish": {"run_file"},
        "run rotate": {"run_file", "output"},
        "run show": {"file"},
        "run link": {"run_file"},
        "checkpoint show": {"file"},
        "checkpoint verify": {"file"},
        "checkpoint export": {"file", "output"},
        "launch": set(),
        "job check": {"folder"},
        "job pack": {"folder"},
        "job show": {"file"},
        "job unpack": {"file", "folder"},
        "job publish": {"folder", "file"},
        "job fence": set(),
        "archive": {"run", "folder"},
        "history verify": {"folder"},
        "history credits": {"folder"},
        "history receipt": {"peer"},
        "history merge": {"output", "folders"},
        "history same": {"output", "identities"},
    }


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
