"""The file of a run's job: members give it to one another in verified pieces, as they do with states."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.files import PUBLIC, keep_file, make_folder
from p2pavg.base.limits import LOOK_SECONDS, START_SECONDS
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.transport import Buffer
from p2pavg.peer.host import Host
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.state.blobs import BlobKind
from p2pavg.state.donor.service import stored_key
from p2pavg.state.joiner.fetching import BlobDownload, DownloadProgress, Wanted
from p2pavg.state.joiner.sessions import open_sessions
from p2pavg.state.joiner.sink import FileSink
from p2pavg.state.manifest import BlobManifest
from p2pavg.state.tree import CHUNK_BYTES, DIGEST_BYTES, chunk_count, chunk_digests, root_of

MAX_DONORS = 16
"""Peers that are asked for a job at once."""


class JobHoldings:
    """The file of one job, for other peers."""

    def __init__(self, root: bytes, data: bytes) -> None:
        self._root = root
        self._data = memoryview(data)
        self._digests = chunk_digests(data)

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        """Return the manifest of the job; ``None`` for any other blob."""
        return b"".join(self._digests) if (kind, blob_id) == (BlobKind.JOB, self._root) else None

    def piece(self, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        """Return a piece of the job; ``None`` for any other blob."""
        if (kind, blob_id) != (BlobKind.JOB, self._root) or not 0 <= index < len(self._digests):
            return None
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def kept_job(file: Path, release: JobRelease) -> bytes | None:
    """Return the bytes of a job's file if it is the one that the authority has signed; ``None`` if it is not there."""
    try:
        data = file.read_bytes() if file.stat().st_size == release.size else b""
    except OSError:
        return None
    return data if root_of(chunk_digests(data), len(data)) == release.root else None


@asynccontextmanager
async def carrying_job(host: Host, home: Home, run: RunFile, access: RunAccess) -> AsyncIterator[None]:
    """Give the job of a run to other members until the end of the block; do nothing if it is not here."""
    release = run.release
    data = None
    if release is not None:
        data = await host.context.run_in_thread(kept_job, home.job(release.root), release)
    if release is None or data is None:
        yield
        return
    # As states are: to members only, by their certificates.
    membership = Membership(access, host.id)
    holdings = JobHoldings(release.root, data)
    host.state.join(run.run_id, membership, holdings)
    try:
        yield
    finally:
        host.state.leave(run.run_id, membership, holdings)


async def fetch_job(
    host: Host,
    home: Home,
    run: RunFile,
    access: RunAccess,
    release: JobRelease,
    on_progress: Callable[[DownloadProgress], None] = lambda _: None,
) -> bytes:
    """Return the file of a run's job, which is kept in the folder; it is fetched from other members if need be.

    A fetch that is cut off goes on with the pieces that are here. A peer that sends a wrong one is asked for no more.

    Raises:
        StateError: no member with the job answered for three minutes.
        ConfigError: the folder cannot be written.
    """
    file, in_thread = home.job(release.root), host.context.run_in_thread
    if (kept := await in_thread(kept_job, file, release)) is not None:
        return kept
    draft = file.with_suffix(".part")
    make_folder(file.parent)
    count = chunk_count(release.size)

    def read(data: bytes) -> BlobManifest:
        digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
        if len(digests) != count or root_of(digests, release.size) != release.root:
            raise RemoteProtocolError("its pieces are those of another job")
        sizes = [CHUNK_BYTES] * (count - 1) + [release.size - CHUNK_BYTES * (count - 1)]
        return BlobManifest(sizes=sizes, digests=digests)

    membership = Membership(access, host.id)
    async with open_sessions(
        host.context,
        host.lobby,
        key=stored_key(run.run_id, membership),
        certificate=access.certificate,
    ) as sessions:
        download = BlobDownload(
            sessions,
            Wanted(BlobKind.JOB, release.root, DIGEST_BYTES * count, read),
            lambda manifest: FileSink(draft, manifest.sizes, manifest.digests),
            on_progress=on_progress,
            # The peer that made the link may just be starting.
            patience=START_SECONDS,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_name_donors, host, run, download)
            sink = await download.run()
            nursery.cancel_scope.cancel()
    try:
        # Its pieces were verified when they came, and those of an earlier fetch when this one began.
        data = bytes(sink.take())
        await in_thread(partial(keep_file, file, data, mode=PUBLIC))
    finally:
        sink.close()
    assert isinstance(sink, FileSink)
    sink.remove()
    return data


async def _name_donors(host: Host, run: RunFile, download: BlobDownload) -> None:
    """Name all peers that may have the job: those of the run file, then those that this peer has met."""
    while True:
        donors: dict[str, list[str]] = {}
        for address in run.bootstrap:
            _, peer_id = parse_peer_address(address)
            donors.setdefault(peer_id, []).append(address)
        for contact in host.records.contacts:
            donors.setdefault(contact.peer_id, list(contact.addresses))
        donors.pop(host.id, None)
        download.set_donors(dict(list(donors.items())[:MAX_DONORS]))
        await trio.sleep(LOOK_SECONDS)
