"""A peer that strangers talk to: it serves every protocol, and tells how much processor time it has taken.

It prints one line of JSON: its addresses, its ports and the key of its run. For each line of standard input it prints
the seconds of its processor time so far. It ends with its standard input.

``python -m scripts.benchmarks.strangers_worker usual|spent``: with ``spent``, budgets of processor time are used up by
the first message.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import p2pavg
from p2pavg.metrics import PeerMetrics
from p2pavg.net.libp2p.transport import open_libp2p_transport
from p2pavg.net.limits.call_budget import CallRates
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.unix import open_unix_listener, serve_unix
from p2pavg.peer.peer import peer_over
from p2pavg.runs.membership.certificate import Role, issue
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.invitations import PROTOCOL as INVITE_PROTOCOL
from p2pavg.runs.records.invitations import Delegate, Invitations
from p2pavg.tools.control.messages import Done, Question
from p2pavg.tools.control.service import control_handler
from p2pavg.tools.monitor.serving import MonitorOptions, monitor_of
from p2pavg_dht import Ed25519Signer

RUN = "attacked"
SEED = bytes([7]) * 32
TINY = CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6, prefix_factor=1.0)


def spend_budgets() -> None:
    """Let every budget of processor time be used up by the first message."""
    vars(CallRates)["__init__"].__kwdefaults__.update(
        {name: getattr(TINY, name) for name in ("peer_seconds", "peer_burst_seconds", "prefix_factor")}
    )


def delegate(folder: Path) -> Delegate:
    """Return a delegate of a run with an authority, which serves invitation links."""
    authority = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
    public, now = authority.public_key().public_bytes_raw(), time.time()
    peer_id = Ed25519Signer(SEED).peer_id
    certificate = issue(
        sign=authority.sign,
        authority=public,
        peer_id=peer_id,
        roles=[Role.CONTRIBUTOR, Role.DELEGATE],
        max_weight=10.0,
        not_before=now - 60.0,
        expires=now + 86400.0,
        serial=bytes(16),
    )
    access = RunAccess(authority=public, secret=bytes(32), certificate=certificate.data)
    run = RunFile(run_id="private", authority=public, secret=bytes(32))
    return Delegate(run, Membership(access, peer_id), SEED, folder / "used")


async def answer(_: Question) -> Done:
    """Answer a question on the control socket."""
    await trio.lowlevel.checkpoint()
    return Done()


async def main(folder: Path) -> None:
    """See the top of this file."""
    async with (
        open_libp2p_transport(
            seed=SEED, listen=["/ip4/127.0.0.1/tcp/0"], options=ReachOptions(port_mapping=False)
        ) as transport,
        peer_over(transport, Ed25519Signer(SEED)) as peer,
        peer.averager(p2pavg.AveragingConfig(run_id=RUN, match_timeout=600.0)) as averager,
        monitor_of(averager, MonitorOptions()) as monitor,
        open_unix_listener(folder / "control.sock") as listener,
        trio.open_nursery() as nursery,
    ):
        context = peer.context
        invitations = Invitations(
            delegate(folder), wall_clock=context.wall_clock, run_in_thread=context.run_in_thread
        )
        transport.serve(INVITE_PROTOCOL, invitations.serve)
        nursery.start_soon(serve_unix, listener, control_handler(answer))
        averager.accumulate([torch.zeros(1000)])
        nursery.start_soon(partial(averager.step, wait=None))
        while averager._rounds is None:  # noqa: ASYNC110 - no event tells it
            await trio.sleep(0.05)  # until its step has begun
        with PeerMetrics(peer, [RUN]) as metrics:
            told = {
                "addresses": list(peer.addresses),
                "metrics": metrics.serve(),
                "monitor": int(monitor.rpartition(":")[2].strip("/")),
                "control": str(folder / "control.sock"),
                "key": averager._rounds.matchmaker.key.hex(),
            }
            print(json.dumps(told), flush=True)
            while await trio.to_thread.run_sync(sys.stdin.readline):
                print(time.process_time(), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    if sys.argv[1:] == ["spent"]:
        spend_budgets()
    with tempfile.TemporaryDirectory() as directory:
        trio.run(main, Path(directory))
