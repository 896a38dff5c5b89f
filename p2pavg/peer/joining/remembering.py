"""The peers that a peer knew when it last ran, and through which it joins the network again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from p2pavg.base.errors import BootstrapError
from p2pavg.base.formats import count
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer

logger = logging.getLogger(__name__)

REMEMBER_SECONDS = 300.0
JOIN_AGAIN_SECONDS = 30.0


@asynccontextmanager
async def remembering(peer: Peer, home: Home | None) -> AsyncIterator[None]:
    """Note the peers that answer, now and then and at the end of the block; do nothing without a folder."""
    if home is None:
        yield
        return
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_remember_now_and_then, peer, home)
            yield
            nursery.cancel_scope.cancel()
    finally:
        _remember(peer, home)


async def _remember_now_and_then(peer: Peer, home: Home) -> None:
    while True:
        await trio.sleep(REMEMBER_SECONDS)
        _remember(peer, home)


def _remember(peer: Peer, home: Home) -> None:
    """Note the peers that answer now: the next start can join through them if all bootstrap addresses are dead."""
    addresses = [address for contact in peer.records.contacts for address in contact.addresses[:2]]
    if not addresses:
        return
    try:
        home.remember(addresses)
    except OSError as error:
        logger.warning("cannot note the peers of the network in %s: %s", home.folder, error.strerror)


async def join_again(peer: Peer, addresses: Sequence[str]) -> None:
    """Join the network through peers that were known at the last start, as soon as one of them or another is there.

    For a daemon from which others bootstrap: it may be the first one that starts after all were stopped, so it waits
    for no other peer.
    """
    while not peer.records.contacts:
        try:
            await peer.join(addresses)
        except BootstrapError as error:
            logger.debug("none of the peers of the last start is there: %s", error)
            await trio.sleep(JOIN_AGAIN_SECONDS)
        else:
            logger.info("joined the network again: %s answered", count(len(peer.records.contacts), "peer"))
