"""A daemon's status in words, as JSON, and as an exit code. No I/O, no clock, no random source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum

from msgspec.structs import asdict

from p2pavg.base.formats import count, in_bytes, in_time
from p2pavg.runs.membership.certificate import date_of
from p2pavg.tools.control.messages import DaemonStatus


class ExitCode(IntEnum):
    """The exit codes of all commands. ``docs/how-to/run-a-peer.md`` lists them, and unit files depend on them."""

    DONE = 0
    MISTAKE = 1
    """A person must mend something: a file, an option's value, a certificate. The doctor found a fault."""
    USAGE = 2
    """The command line does not exist so."""
    NOT_RUNNING = 3
    ALONE = 4
    """The daemon runs, and no other peer of the network answers it."""
    REFUSED = 5
    """The daemon runs, and other members refuse it, because its certificate has expired or was revoked."""
    BUG = 70
    """An exception that is a bug; the traceback is in the log."""
    TRY_AGAIN = 75
    """The network, a port or another process was in the way. Another try may succeed."""


def exit_code(status: DaemonStatus) -> ExitCode:
    """Return the exit code of ``p2pavg status`` for a daemon that runs."""
    if status.refusal:
        return ExitCode.REFUSED
    return ExitCode.DONE if status.is_connected else ExitCode.ALONE


def as_json(statuses: Sequence[tuple[str, DaemonStatus]]) -> str:
    """Return statuses as a JSON array of objects.

    Args:
        statuses: folder and status of each daemon.
    """
    found = [
        {"home": home, **asdict(status), "connected": status.is_connected, "code": int(exit_code(status))}
        for home, status in statuses
    ]
    return json.dumps(found, indent=2)


def as_lines(home: str, status: DaemonStatus) -> list[str]:
    """Return a status as lines of text."""
    rows = [
        ("state", _state(status)),
        ("run", _run(status)),
        ("peer id", status.peer_id),
        *(("address" if not i else "", address) for i, address in enumerate(status.addresses)),
        ("reachability", status.reachability),
        ("peers", f"{count(status.peers, 'other peer')} of the network, {status.run_peers} of the run"),
        ("training", status.training),
        ("rounds", "" if status.training else _rounds(status)),
        (
            "traffic",
            f"{in_bytes(status.bytes_sent)} sent, {in_bytes(status.bytes_received)} received in rounds",
        ),
        ("certificate", f"valid until {date_of(expires)}" if (expires := status.certificate_expires) else ""),
        ("version", f"p2pavg {status.version}, process {status.pid}"),
        ("folder", home),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows if text]


def _rounds(status: DaemonStatus) -> str:
    return f"{helped(status.rounds, status.failed_rounds)}; reduced {status.elements:,} elements"


def helped(rounds: int, failed: int) -> str:
    """Return how many rounds this peer has helped. Those that failed are no part of that number, here or elsewhere."""
    return f"helped {count(rounds, 'round')}{f', and {failed} failed' if failed else ''}"


def _state(status: DaemonStatus) -> str:
    if status.leaving:
        return "finishes its rounds, and then ends"
    since = f"runs for {in_time(status.uptime)}"
    if status.refusal:
        return f"{since}; other members refuse it: {status.refusal}"
    return since if status.is_connected else f"{since}, without other peers"


def _run(status: DaemonStatus) -> str:
    roles = f" as {', '.join(status.roles)}" if status.roles else ""
    return f"{status.run_id}{roles}" if status.run_id else "none: it keeps the network's records"
