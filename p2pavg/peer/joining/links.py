"""A delegate that is online: it serves the links by which other peers join its run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import trio

from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.files import read_access, read_run_file
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.records.identity import load_seed
from p2pavg.runs.records.invitations import PROTOCOL, Delegate, Invitations
from p2pavg.runs.records.run_records import RunRecords
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)


def open_delegate(run_file: Path, certificate: Path, identity: Path) -> Delegate:
    """Read a delegate's files.

    Raises:
        ConfigError, IdentityError: a file cannot be read, the certificate is for another peer, or it does not have the
            role ``delegate``.
    """
    run = read_run_file(run_file)
    seed = load_seed(identity)
    membership = Membership(read_access(run, certificate), Ed25519Signer(seed).peer_id)
    return Delegate(run, membership, seed, identity.with_name(f"{identity.name}.used"))


@asynccontextmanager
async def serving_links(peer: Peer, delegate: Delegate | None) -> AsyncIterator[None]:
    """Admit peers by links until the end of the block; do nothing without a delegate.

    Raises:
        ConfigError: the file of used links cannot be read or is damaged; the message names it.
    """
    if delegate is None:
        yield
        return
    context = peer.context
    access = delegate.membership.access
    # A delegate that was revoked hears of it here, and serves no more links.
    revocations = peer.registry.revocations(access)
    delegate = replace(delegate, membership=Membership(access, peer.id, revocations.known))
    with closing(RunRecords(peer.records, delegate.membership, context.wall_clock)) as records:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revocations.run, records)
            invitations = Invitations(
                delegate, wall_clock=context.wall_clock, run_in_thread=context.run_in_thread
            )
            context.transport.serve(PROTOCOL, invitations.serve)
            logger.info("serving invitation links of the run %r", delegate.run.run_id)
            yield
            nursery.cancel_scope.cancel()
