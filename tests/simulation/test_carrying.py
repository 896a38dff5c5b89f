"""The file of a run's job travels between members only, in verified pieces, whatever its donors send."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from p2pavg.base.errors import StateError
from p2pavg.base.limits import START_SECONDS
from p2pavg.net.transport import Buffer
from p2pavg.peer.joining.carrying import JobHoldings, carrying_job, fetch_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.job_release import JobRelease, sign_release
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.state.donor.serving import Offered
from p2pavg.state.joiner.fetching import DownloadProgress
from p2pavg.state.tree import CHUNK_BYTES, chunk_digests, root_of
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN
from tests.unit.runs.membership.runs import SECRET, Authority

JOB = random.Random(7).randbytes(5 * CHUNK_BYTES + 100)
AUTHORITY = Authority()


def release_of(data: bytes, number: int) -> JobRelease:
    return sign_release(
        AUTHORITY.sign,
        authority=AUTHORITY.public,
        run_id="lab",
        number=number,
        root=root_of(chunk_digests(data), len(data)),
        size=len(data),
    )


RELEASE = release_of(JOB, 1)


class Liar(JobHoldings):
    """Sends a wrong third piece."""

    def __init__(self) -> None:
        super().__init__()
        self.put({RELEASE.root: JOB})

    def piece(self, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        piece = super().piece(kind, blob_id, index)
        return bytes(len(piece)) if piece is not None and index == 2 else piece


@dataclass
class Member:
    peer: Peer
    home: Home
    access: RunAccess
    run: RunFile

    async def fetch(self, told: list[float] | None = None) -> bytes:
        def note(progress: DownloadProgress) -> None:
            if told is not None:
                told.append(progress.done)

        return await fetch_job(self.peer, self.home, self.run, self.access, RELEASE, note)


@asynccontextmanager
async def members(folder: Path, count: int) -> AsyncIterator[list[Member]]:
    """Open members of a run with a job, whose first one has it; none of them serves it yet."""
    network = MemoryNetwork(latency=LAN, bandwidth=100e6 / 8)
    async with simulated_peers(network, count) as peers:
        now = peers[0].context.wall_clock()
        found = []
        for index, peer in enumerate(peers):
            home = Home(folder / str(index))
            home.make()
            access = AUTHORITY.access(simulated_signer(index), not_before=now - 1.0, expires=now + 1e6)
            run = RunFile(
                run_id="lab",
                authority=AUTHORITY.public,
                secret=SECRET,
                bootstrap=tuple(peers[0].addresses),
                job=RELEASE.text,
            )
            found.append(Member(peer, home, access, run))
        keep(found[0])
        yield found


def keep(member: Member) -> None:
    file = member.home.job(RELEASE.root)
    file.parent.mkdir()
    file.write_bytes(JOB)


async def test_a_member_gets_the_job_and_gives_it_on(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as (first, second, third):
        # What was changed on the disk is not what was signed: it is fetched again.
        kept = second.home.job(RELEASE.root)
        kept.parent.mkdir()
        kept.write_bytes(b"x")
        async with carrying_job(first.peer, first.home, first.run, first.access):
            assert await second.fetch() == JOB
        assert kept.read_bytes() == JOB
        assert list(kept.parent.iterdir()) == [kept]
        # The first one is gone: what it gave is here, and is enough for a third.
        async with carrying_job(second.peer, second.home, second.run, second.access):
            assert await third.fetch() == JOB


async def test_a_member_that_sends_a_wrong_piece_is_asked_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(tmp_path, 4) as found, AsyncExitStack() as stack:
        liars, honest, joiner = found[:2], found[2], found[3]
        for liar in liars:
            membership = Membership(liar.access, liar.peer.id)
            liar.peer.state.join("lab", membership, Offered(Liar()))
        keep(honest)
        await stack.enter_async_context(carrying_job(honest.peer, honest.home, honest.run, honest.access))
        assert await joiner.fetch() == JOB
        assert "sent piece 2" in caplog.text
        assert honest.peer.id not in caplog.text


async def test_a_fetch_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 2) as (first, second),
        carrying_job(first.peer, first.home, first.run, first.access),
    ):
        told: list[float] = []
        with trio.CancelScope() as scope:

            def note(progress: DownloadProgress) -> None:
                if progress.done >= 2 * CHUNK_BYTES:
                    scope.cancel()

            await fetch_job(second.peer, second.home, second.run, second.access, RELEASE, note)
        assert scope.cancelled_caught
        assert await second.fetch(told) == JOB
        assert min(each for each in told if each) >= 2 * CHUNK_BYTES


async def test_who_is_no_member_any_more_gets_nothing(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as (first, second):
        now = first.peer.context.wall_clock()
        second.access = AUTHORITY.access(simulated_signer(1), not_before=now - 1000.0, expires=now - 500.0)
        async with carrying_job(first.peer, first.home, first.run, first.access):
            began = trio.current_time()
            with pytest.raises(StateError):
                await second.fetch()
            assert trio.current_time() - began >= START_SECONDS
        assert not second.home.job(RELEASE.root).exists()


async def test_a_file_that_was_changed_is_not_carried(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as (first, second):
        first.home.job(RELEASE.root).write_bytes(JOB[:-1] + b"x")
        async with carrying_job(first.peer, first.home, first.run, first.access):
            with pytest.raises(StateError):
                await second.fetch()


async def test_a_version_that_comes_later_is_given_too(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 2) as (first, second),
        carrying_job(first.peer, first.home, first.run, first.access),
    ):
        later = random.Random(8).randbytes(CHUNK_BYTES + 1)
        release = release_of(later, 2)
        first.home.job(release.root).write_bytes(later)
        found = await fetch_job(second.peer, second.home, second.run, second.access, release)
        assert found == later
        # The present version goes on being given.
        assert await second.fetch() == JOB
