"""The work behind ``p2pavg monitor`` and ``p2pavg peer --monitor``: a page or a terminal view of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import read_text
from p2pavg.net.nat.reach.options import EVERYWHERE, LOOPBACK, way_out
from p2pavg.peer.peer import open_peer
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import read_access, read_run_file
from p2pavg.runs.records.identity import load_seed
from p2pavg.tools.daemon.life import until_signal
from p2pavg.tools.monitor.guard import MIN_TOKEN_CHARS
from p2pavg.tools.monitor.serving import DEFAULT_HOST, MonitorOptions, check_installed, serve_run
from p2pavg.tools.monitor.watching import board_source, watching
from p2pavg_dht import Ed25519Signer

MAX_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """The run to look at, and how to get there."""

    run_id: str
    bootstrap: tuple[str, ...]
    access: RunAccess | None = None


def find_run(
    run: str, *, bootstrap: Sequence[str], certificate: Path | None, identity: Path | None
) -> MonitoredRun:
    """Return the run that a user has named: by its id, or by the run file of a run that has an authority.

    Raises:
        ConfigError, IdentityError: the options do not fit together, or a file cannot be read or is for another peer.
    """
    if not run.endswith(".run"):
        if certificate is not None:
            raise ConfigError("--certificate needs a run file: p2pavg monitor NAME.run --certificate FILE")
        if not bootstrap:
            raise ConfigError("--bootstrap ADDR is needed: the address of a peer of the run's network")
        AveragingConfig(run_id=run)  # raises if no run can have this id
        return MonitoredRun(run, tuple(bootstrap))
    if certificate is None or identity is None:
        raise ConfigError(
            f"{run} is of a run with an authority: --certificate FILE and --identity FILE, for which the certificate "
            "was made, are needed. Use an own identity for the monitor: one that a running peer has disturbs that peer"
        )
    found = read_run_file(run)
    access = read_access(found, certificate)
    # Raises if the certificate is for another peer.
    Membership(access, Ed25519Signer(load_seed(identity)).peer_id)
    named = (*bootstrap, *found.bootstrap)
    if not named:
        raise ConfigError(f"--bootstrap ADDR is needed: {run} names no address")
    return MonitoredRun(found.run_id, named, access)


def options_of(
    port: int | None,
    listen: str | None,
    token_file: Path | None,
    names: Sequence[str],
    history: Path | None = None,
) -> MonitorOptions:
    """Return where the page is served.

    Raises:
        ConfigError: the options do not fit together, or the token's file cannot be read.
    """
    token = None
    if token_file is not None:
        token = read_text(token_file, "token file", max_bytes=MAX_TOKEN_FILE_BYTES).strip()
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"{token_file}: a token has at least {MIN_TOKEN_CHARS} characters")
    pages = None
    if history is not None:
        from p2pavg.tools.history.commands import CreditsPage

        pages = {"/credits": CreditsPage(history)}
    host, number = DEFAULT_HOST, port or 0
    if listen is not None:
        if port is not None:
            raise ConfigError("--port and --listen exclude each other: --listen HOST:PORT has the port")
        host, colon, text = listen.rpartition(":")
        if not colon or not host or not text.isdecimal():
            raise ConfigError(f"--listen must be HOST:PORT, such as 0.0.0.0:8080, got {listen!r}")
        host, number = host.strip("[]"), int(text)
    return MonitorOptions(port=number, host=host, token=token, names=tuple(names), pages=pages)


def run_monitor(
    run: MonitoredRun, options: MonitorOptions | None, *, identity: Path | None, listen: Sequence[str]
) -> None:
    """Show a run until SIGINT or SIGTERM.

    Args:
        options: where the page is served; ``None``: the run is shown in the terminal.
        identity: the key file; ``None`` takes an identity that is not kept.
        listen: addresses on which the peer listens for other peers. Empty: all interfaces, or loopback for a run of
            which all bootstrap addresses are of this machine.

    Raises:
        P2PAvgError: the network cannot be joined, the page cannot be served, or a package is missing.
    """
    if options is not None:
        check_installed()

    if not listen:
        listen = EVERYWHERE if way_out(LOOPBACK, run.bootstrap, ()) else LOOPBACK

    async def main() -> None:
        opened = open_peer(
            listen=listen, bootstrap=run.bootstrap, identity=identity, port_mapping=False, relay_mbps=0
        )
        async with until_signal(), opened as peer:
            if options is None:
                from p2pavg.tools.monitor.terminal import show

                board = board_source(peer, run.run_id, run.access)
                async with board as source, watching(source) as watcher:
                    await show(watcher)
            else:
                async with serve_run(peer, run.run_id, options, access=run.access) as address:
                    print(address, flush=True)
                    await trio.sleep_forever()

    trio.run(main)
