"""The file of a run's job: members give it to one another in verified pieces, as they do with states."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from p2pavg.base.files import PUBLIC, keep_file, make_folder
from p2pavg.base.limits import LOOK_SECONDS, START_SECONDS
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.transport import Buffer
from p2pavg.peer.host import Host
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import MAX_RELEASE_BYTES, JobRelease
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import Offered
from p2pavg.state.joiner.fetching import BlobDownload, DownloadProgress, chunked
from p2pavg.state.joiner.sessions import open_sessions
from p2pavg.state.joiner.sink import FileSink
from p2pavg.state.tree import CHUNK_BYTES, BlobKind, chunk_digests, root_of

logger = logging.getLogger(__name__)

MAX_DONORS = 16
"""Peers that are asked for a job at once."""
MAX_CARRIED = 2
"""Jobs that are given to others: the present version, and the next one."""


class JobHoldings:
    """The files of a run's jobs, for other peers."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, tuple[memoryview, list[bytes]]] = {}
        """Bytes and digests, by root."""

    def put(self, jobs: Mapping[bytes, bytes]) -> None:
        """Offer the files of these jobs, by root, in place of those before."""
        self._jobs = {root: (memoryview(data), chunk_digests(data)) for root, data in jobs.items()}

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        """Return the manifest of a job; ``None`` for any other blob."""
        if kind != BlobKind.JOB or blob_id not in self._jobs:
            return None
        return b"".join(self._jobs[blob_id][1])

    def piece(self, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        """Return a piece of a job; ``None`` for any other blob."""
        if kind != BlobKind.JOB or blob_id not in self._jobs:
            return None
        data, digests = self._jobs[blob_id]
        if not 0 <= index < len(digests):
            return None
        return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def kept_job(file: Path, release: JobRelease) -> bytes | None:
    """Return the bytes of a job's file if it is the one that the authority has signed; ``None`` if it is not there."""
    try:
        data = file.read_bytes() if file.stat().st_size == release.size else b""
    except OSError:
        return None
    return data if root_of(chunk_digests(data), len(data)) == release.root else None


@asynccontextmanager
async def carrying_job(host: Host, home: Home, run: RunFile, access: RunAccess) -> AsyncIterator[None]:
    """Give the jobs of a run that its folder has to other members until the end of the block.

    A version that comes into the folder later is given, too. Without a job in the run file, nothing happens.
    """
    if run.release is None:
        yield
        return
    # As states are: to members only, by their certificates.
    membership = Membership(access, host.id)
    holdings, seen = JobHoldings(), await host.context.run_in_thread(_files_in, home)

    async def poll() -> None:
        nonlocal seen
        while True:
            await trio.sleep(LOOK_SECONDS)
            if (now := _files_in(home)) != seen:
                seen = now
                await host.context.run_in_thread(_offer, holdings, seen)

    await host.context.run_in_thread(_offer, holdings, seen)
    host.state.join(run.run_id, membership, Offered(holdings))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            yield
            nursery.cancel_scope.cancel()
    finally:
        host.state.leave(run.run_id, membership, holdings)


def _files_in(home: Home) -> list[tuple[Path, int]]:
    """Return the files of the last jobs in a folder, each with its time of change: a new version replaces no file."""
    found = []
    for file in home.jobs.glob("*.job"):
        # One that is removed meanwhile, as an old version is, counts no more.
        with suppress(OSError):
            found.append((file, file.stat().st_mtime_ns))
    return sorted(found, key=lambda each: each[1])[-MAX_CARRIED:]


def _offer(holdings: JobHoldings, files: Sequence[tuple[Path, int]]) -> None:
    jobs = {}
    for file, _ in files:
        try:
            data = file.read_bytes() if file.stat().st_size <= MAX_RELEASE_BYTES else b""
        except OSError as error:
            logger.warning("cannot give the job %s to other members: %s", file, error)
            continue
        root = root_of(chunk_digests(data), len(data))
        # Named by its root: what was changed on the disk is no job of the run.
        if root.hex() == file.stem:
            jobs[root] = data
    holdings.put(jobs)


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
    membership = Membership(access, host.id)
    async with open_sessions(
        host.context, host.lobby, key=stored_key(run.run_id, membership), certificate=access.certificate
    ) as sessions:
        download = BlobDownload(
            sessions,
            chunked(BlobKind.JOB, release.root, release.size),
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
