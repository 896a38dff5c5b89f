"""Releases of a run's job: they reach members that come later, and only the authority's signature counts."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace

from p2pavg.base.limits import RECORD_LIFE_SECONDS
from p2pavg.net.gate.messages import MAX_NOTICE_BYTES, TellNotice, TellUpdate
from p2pavg.runs.membership.job_release import sign_release
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import NewestNotice
from p2pavg.runs.records.notices import NoticeSpreading, poll_notices, releases_of
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.tools.daemon.life import TOTALS_SECONDS
from p2pavg.tools.jobs import versions as module
from p2pavg.tools.jobs.given import read_given
from p2pavg.tools.jobs.versions import JobVersions, TrainingOptions
from tests.simulation.test_carrying import AUTHORITY, JOB, RELEASE, Member, members, release_of
from tests.unit.runs.membership.runs import Authority

SECOND = release_of(JOB, 2)
FORGED = replace(release_of(JOB, 9), since=5)
OF_ANOTHER = sign_release(
    AUTHORITY.sign, authority=AUTHORITY.public, run_id="other", number=9, root=b"r" * 32, size=9
)
OTHER = Authority(b"o" * 32)
OF_A_STRANGER = sign_release(
    OTHER.sign, authority=OTHER.public, run_id="lab", number=9, root=b"r" * 32, size=9
)
HOSTILE = [
    b"",
    b"\xc1",
    bytes(MAX_NOTICE_BYTES),
    *(each.encode() for each in (FORGED, OF_ANOTHER, OF_A_STRANGER)),
]


def records_of(member: Member) -> RunRecords:
    return RunRecords(
        member.peer.records, Membership(member.access, member.peer.id), member.peer.context.wall_clock
    )


async def test_a_release_reaches_those_that_come_long_after_it(tmp_path: Path) -> None:
    """The member that trains with it began with it: its program's own run file has it."""
    async with members(tmp_path, 3) as (first, _, late), trio.open_nursery() as nursery:
        kind = releases_of(first.run)
        with closing(records_of(first)) as ours, closing(records_of(late)) as theirs:
            nursery.start_soon(NoticeSpreading(kind, NewestNotice(SECOND), first=1).run, ours)
            await trio.sleep(2 * RECORD_LIFE_SECONDS)
            known = NewestNotice(RELEASE)
            await poll_notices(theirs, kind, known)
            assert known.newest == SECOND
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("hostile", [each for each in HOSTILE if each], ids=range(5))
async def test_a_member_that_publishes_what_is_not_signed_changes_nothing(
    tmp_path: Path, hostile: bytes
) -> None:
    async with members(tmp_path, 3) as (liar, _, late):
        kind = releases_of(liar.run)
        with closing(records_of(liar)) as ours, closing(records_of(late)) as theirs:
            await ours.publish(kind.key, hostile, ttl=60.0)
            known = NewestNotice(RELEASE)
            await poll_notices(theirs, kind, known)
            assert known.newest == RELEASE


def versions_of(member: Member) -> JobVersions:
    limits: dict[str, Any] = dict.fromkeys(("max_upload_mbps", "max_download_mbps", "bandwidth"))
    options = TrainingOptions(hashes=(), without_fence=False, files=None, **limits)
    return JobVersions(member.peer, member.home, member.run, member.access, options)


async def test_a_terminal_that_was_stopped_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, printed_here = threading.Event(), False

    def stopped(_: str) -> None:
        nonlocal printed_here
        printed_here |= threading.current_thread() is threading.main_thread()
        goes_on.wait(5.0)

    monkeypatch.setattr(module, "print_line", stopped)
    async with members(tmp_path, 1) as (member,), trio.open_nursery() as nursery:
        versions = versions_of(member)
        versions.given.took("me", "group", {"me": 1.0})
        nursery.start_soon(versions.say_given)
        await trio.sleep(2 * TOTALS_SECONDS)
        nursery.cancel_scope.cancel()
    goes_on.set()
    assert not printed_here
    assert read_given((member.home.folder / "given").read_text()).updates == 1


async def test_a_program_that_tells_lies_changes_nothing_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(tmp_path, 1) as (member,), trio.open_nursery() as nursery:
        versions = versions_of(member)
        send, told = trio.open_memory_channel[Any](100)
        nursery.start_soon(versions.receive, cast(Any, SimpleNamespace(told=told)))
        for notice in HOSTILE:
            await send.send(TellNotice(notice))
            await send.send(TellUpdate(5, notice or b"x", "loss", 1.0))
        while told.statistics().current_buffer_used:
            await trio.sleep(0.1)
        assert not versions.has_newer(RELEASE)
        assert (versions.given.samples, versions.given.updates, versions.given.sentence) == (0.0, 0, "")
        assert caplog.text.count("counts for nothing") == 1
        # The truth still counts.
        await send.send(TellNotice(SECOND.encode()))
        with trio.fail_after(5.0):
            while not versions.has_newer(RELEASE):
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
