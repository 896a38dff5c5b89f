"""Fetching another member's snapshot: from its publisher, and from all peers that offer the same one. It never waits.

:func:`fetch` is a generator. It yields a :class:`Pause` whenever its driver has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.state.joiner.transfers import SnapshotTransfer, Transfer
from p2pavg.state.sharing import StateSharing

LOOK_SECONDS = 0.5  # between two looks at words and transfers, when nothing is heard
STILL_SECONDS = 8.0
"""A copy is given up when no donor has been of use for so long."""

Donors: TypeAlias = dict[str, tuple[str, ...]]
"""Addresses of the peers that may have a snapshot, by peer id."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The driver has to wait: for another peer's word, or for a transfer."""

    version: int
    """The board's, before the last look at it."""
    seconds: float
    """At most."""
    transfer: Transfer | None = None


def donors_of(sharing: StateSharing, publishers: Iterable[str], root: bytes) -> Donors:
    """Return the publishers of a snapshot, and all other peers that offer the same one, with their addresses."""
    news = sharing.news()
    named = {peer: news[peer].addresses if peer in news else () for peer in publishers}
    same = {
        peer: said.addresses
        for peer, said in news.items()
        if said.snapshot is not None and said.snapshot.root == root
    }
    return named | same


def fetch(
    transfer: SnapshotTransfer,
    *,
    donors: Callable[[], Donors],
    has_left: Callable[[Donors], bool],
    version: Callable[[], int],
    clock: Callable[[], float],
    timeout: float,
) -> Generator[Pause, float | None, str]:
    """Fetch a snapshot; return the reason if that failed, or an empty text.

    Args:
        transfer: has begun. The caller cancels it if it has not ended.
        donors: looks at the board, and returns the present donors.
        has_left: returns whether the member that published the snapshot has left, and no other donor has it.
        version: the board's.
        clock: seconds, at any pace that never goes back.
        timeout: seconds for the whole copy.
    """
    began = useful = clock()
    while not transfer.ended:
        seen, now = version(), clock()
        found = donors()
        transfer.set_donors(found)
        useful = useful if transfer.stands_still else now
        if has_left(found):
            return "it has left"
        if now - useful > STILL_SECONDS:
            return f"it has not sent anything of use for {STILL_SECONDS:.0f} s"
        if now - began > timeout:
            return f"the copy took longer than copy_timeout, {timeout:g} s"
        yield Pause(seen, LOOK_SECONDS, transfer)
    return transfer.failure
