"""Messages of an attached process about the states of its run, carried out at the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from p2pavg.attached.guest import Guest
from p2pavg.attached.messages import check_digest, read_donors
from p2pavg.attached.shared_run import SharedRun
from p2pavg.attached.shared_states import SharedStates
from p2pavg.state.news import SnapshotOffer

STATE_REQUESTS = frozenset(
    (
        "share",
        "stand",
        "took",
        "begin",
        "log_bytes",
        "offer",
        "unwanted",
        "fetch_snapshot",
        "fetch_average",
        "donors",
        "drop",
        "look",
    )
)
"""The kinds of messages that :func:`take_state_request` takes."""


async def take_state_request(
    run: SharedRun, guest: Guest, kind: str, fields: tuple[Any, ...], descriptor: Callable[[], int]
) -> None:
    """Carry out one message.

    Args:
        fields: of the message after its channel.
        descriptor: returns the next descriptor that the process has passed.

    Raises:
        RemoteProtocolError: a field is out of range, or the process shares no states.
        P2PAvgError: this peer cannot share states; the message says why.
    """
    if kind == "share":
        await run.share(guest, *fields)
        return
    _TAKE[kind](run.states_of(guest), guest.name, fields, descriptor)
    await trio.lowlevel.checkpoint()


_Take = Callable[[SharedStates, str, tuple[Any, ...], Callable[[], int]], None]


def _took(states: SharedStates, name: str, fields: tuple[Any, ...], _: Callable[[], int]) -> None:
    group_id, epoch = fields
    check_digest(group_id)
    states.took(name, group_id, epoch)


def _begin(states: SharedStates, name: str, fields: tuple[Any, ...], _: Callable[[], int]) -> None:
    epoch, root = fields
    if root:
        check_digest(root)
    states.begin(name, epoch, root)


def _offer(states: SharedStates, name: str, fields: tuple[Any, ...], descriptor: Callable[[], int]) -> None:
    epoch, state, size = fields
    states.offer(name, epoch, state, size, descriptor())


def _fetch_snapshot(states: SharedStates, name: str, fields: tuple[Any, ...], _: Callable[[], int]) -> None:
    number, epoch, state, root, size = fields
    states.fetch_snapshot(name, number, SnapshotOffer(epoch=epoch, state=state, root=root, size=size))


def _fetch_average(states: SharedStates, name: str, fields: tuple[Any, ...], _: Callable[[], int]) -> None:
    number, group_id = fields
    check_digest(group_id)
    states.fetch_average(name, number, group_id)


_TAKE: dict[str, _Take] = {
    "stand": lambda states, name, fields, _: states.stand(name, *fields),
    "took": _took,
    "begin": _begin,
    "log_bytes": lambda states, _name, fields, _: states.set_log_bytes(*fields),
    "offer": _offer,
    "unwanted": lambda states, _name, _fields, _: states.unwanted(),
    "fetch_snapshot": _fetch_snapshot,
    "fetch_average": _fetch_average,
    "donors": lambda states, name, fields, _: states.set_donors(name, fields[0], read_donors(fields[1])),
    "drop": lambda states, name, fields, _: states.drop(name, *fields),
    "look": lambda states, _name, _fields, _: states.look(),
}
