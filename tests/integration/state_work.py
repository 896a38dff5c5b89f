"""The work functions of the processes in the tests and the benchmark of states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import trio

import p2pavg
from p2pavg.net.limits.rate import RateLimit
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import Offered
from p2pavg.state.joiner.fetching import BlobDownload, DownloadProgress
from p2pavg.state.joiner.sessions import open_sessions
from p2pavg.state.joiner.sink import FileSink
from p2pavg.testing.swarm import Member
from tests.integration.hosts import LOOPBACK
from tests.unit.state.blobs import Blob, Held

RUN = "states"
PIECE_BYTES = 1 << 20


def blob_of(arguments: Mapping[str, Any]) -> Blob:
    return Blob(0, arguments["pieces"], PIECE_BYTES)


def donate(member: Member) -> None:
    """Serve a blob, and report the number of pieces sent at each message of the test."""
    trio.run(_donate, member)


async def _donate(member: Member) -> None:
    held = Held(blob_of(member.arguments))
    async with p2pavg.open_peer(listen=[LOOPBACK], bootstrap=member.bootstrap) as peer:
        peer.state.join(RUN, None, Offered(held, RateLimit(member.arguments["mbps"])))
        member.report(address=peer.addresses[0], peer_id=peer.id)
        while True:
            if await trio.to_thread.run_sync(member.told, 60.0) is not None:
                member.report(sent=len(held.sent))


def donate_or_join(member: Member) -> None:
    """Serve a blob, or fetch it into a file with ``folder`` among the arguments."""
    if "folder" in member.arguments:
        trio.run(_join, member)
    else:
        donate(member)


async def _join(member: Member) -> None:
    blob = blob_of(member.arguments)
    path = Path(member.arguments["folder"]) / "blob"
    donors = {address.rpartition("/")[2]: [address] for address in member.bootstrap}
    before = -1

    def report(progress: DownloadProgress) -> None:
        nonlocal before
        if progress.done != before:
            before = progress.done
            member.report(done=progress.done, total=progress.total)

    async with p2pavg.open_peer(listen=[LOOPBACK], bootstrap=member.bootstrap) as peer:
        member.report(address=peer.addresses[0], peer_id=peer.id)
        async with open_sessions(peer.context, peer.lobby, key=stored_key(RUN, None)) as sessions:
            fetch = BlobDownload(
                sessions,
                blob.wanted,
                lambda manifest: FileSink(path, manifest.sizes, manifest.digests),
                on_progress=report,
            )
            fetch.set_donors(donors)
            sink = await fetch.run()
            member.report(
                right=bytes(sink.take()) == blob.data,
                lanes=all(session.over_lane for session in sessions._open.values()),
                threads=psutil.Process().num_threads(),
            )
            sink.close()
