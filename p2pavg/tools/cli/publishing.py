"""The handing over of what an authority has signed to the members of its run: revocations, and versions of a job."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import trio

from p2pavg.base.errors import BootstrapError, BusyError, ConfigError
from p2pavg.base.files import PUBLIC, keep_file, locked, make_folder
from p2pavg.base.formats import count
from p2pavg.base.limits import RECORD_LIFE_SECONDS, SPREAD_LOOK_SECONDS
from p2pavg.net.nat.reach.options import ONLY_ASKS
from p2pavg.peer.joining.finding import files_in
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import peer_over
from p2pavg.runs.membership.certificate import SERIAL_BYTES, Role, issue
from p2pavg.runs.membership.job_release import JobRelease, SeenProgress, sign_release
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import read_revocations_file
from p2pavg.runs.records.identity import SEED_BYTES
from p2pavg.runs.records.notices import releases_of, revocations_of, spread
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.tools.cli.authority import Authority, open_authority
from p2pavg.tools.jobs.folder import read_job
from p2pavg.tools.jobs.releases import keep_releases, kept_releases, read_progress
from p2pavg_dht import Ed25519Signer

PUBLISH_LIST_SECONDS = 3 * SPREAD_LOOK_SECONDS


def publish(authority: Authority, bootstrap: Sequence[str]) -> list[str]:
    """Hand the newest list to the members of the run, as a peer that the authority admits for some minutes.

    Args:
        bootstrap: addresses of peers, besides those in the run file.

    Raises:
        ConfigError: there is no list, or no address of a peer.
        BootstrapError: no peer could be reached.
    """
    if not authority.revoked_file.exists():
        raise ConfigError(f"{authority.revoked_file} does not exist: no certificate was revoked yet")
    newest = read_revocations_file(authority.revoked_file, authority.run.authority)
    addresses = _addresses(authority, bootstrap)

    async def hand_over() -> int:
        async with _records_of(authority, addresses) as records:
            # A certificate that is on the list counts no more, also here.
            assert records.membership is not None
            records.membership.known.learn(newest)
            kind = revocations_of(authority.run.authority)
            return await spread(records, kind, newest, timeout=PUBLISH_LIST_SECONDS)

    told = trio.run(hand_over)
    if not told:
        return [
            f"no member took list {newest.number} within {PUBLISH_LIST_SECONDS:.0f} s. When the run is up again:",
            "  p2pavg run publish NAME.run",
        ]
    return [
        f"list {newest.number} is published by {count(told, 'member')}; the others get it within a minute"
    ]


def publish_job(folder: Path, file: Path, bootstrap: Sequence[str], since: int | None) -> list[str]:
    """Sign a version of a run's job, and hand it to the members, who change to it after one of the next updates.

    The file of the version that is published already is handed over again.

    Args:
        folder: of the run, as ``p2pavg run create`` has made it; its member gives the job to others.
        bootstrap: addresses of peers, besides those of the folder.
        since: the update; ``None``: about three minutes from now, at the run's pace.

    Raises:
        ConfigError: the run has no job, or a file cannot be read or written.
        BootstrapError: no peer could be reached, and ``since`` is not given: the present update is not known.
    """
    run_file = files_in(folder).run_file
    authority, home = open_authority(run_file, None), Home(folder)
    run, job = authority.run, read_job(file)
    # Of two calls at once, each would sign a version with the same number.
    with locked(folder / "releases.lock"):
        known = kept_releases(home, run)
        if not known:
            raise ConfigError(
                f"the run {run.run_id!r} has no job: p2pavg run create NAME --job FILE makes one with it"
            )
        addresses = _addresses(authority, [*bootstrap, *home.addresses])
        newest, told = trio.run(_release, authority, home, known, job, addresses, since)
    lines = [
        f"version {newest.number} of the job takes over after update {newest.since}: {newest.root.hex()}"
    ]
    if told:
        lines.append(f"it is published by {count(told, 'member')}; the others get it within a minute")
    else:
        lines.append(
            "no member took it yet. The member of this folder finds it; the same command hands it to the others"
        )
    try:
        with locked(home.lock):
            lines.append(
                f"Start `p2pavg join {folder}` now: the others fetch the new version from this machine"
            )
    except BusyError:
        pass  # it runs
    return lines


async def _release(
    authority: Authority,
    home: Home,
    known: Sequence[JobRelease],
    job: tuple[bytes, bytes],
    addresses: Sequence[str],
    since: int | None,
) -> tuple[JobRelease, int]:
    """Sign a version, unless it is the newest one already, and hand it over; return it, and how many took it."""
    run, (data, root) = authority.run, job

    def signed(since: int) -> JobRelease:
        found = sign_release(
            authority.key.sign,
            authority=run.authority,
            run_id=run.run_id,
            number=known[-1].number + 1,
            root=root,
            size=len(data),
            since=since,
        )
        # On the disk before any member hears of it: another file would get the same number.
        keep_releases(home, [*known, found])
        return found

    # Once the members have heard of the version, they ask for its bytes.
    make_folder(home.jobs)
    keep_file(home.job(root), data, mode=PUBLIC)
    newest = known[-1]
    try:
        async with _records_of(authority, addresses) as records:
            seen = await read_progress(records, run.run_id)
            if not seen.version:  # a first look may come before this peer has met the others
                await trio.sleep(SPREAD_LOOK_SECONDS)
                seen = await read_progress(records, run.run_id)
            # One that no member has taken in time is of no use: members change together after an update to come.
            is_late = newest.number > 1 and seen.version < newest.number and newest.since <= seen.epoch
            if root != newest.root or is_late:
                if since is not None and seen.version and since <= seen.epoch:
                    raise ConfigError(
                        f"--since must be above {seen.epoch}, the run's present update: all members have to hear of it"
                    )
                newest = signed(await _next_change(records, run.run_id, seen) if since is None else since)
            return newest, await spread(records, releases_of(run), newest, timeout=PUBLISH_LIST_SECONDS)
    except BootstrapError:
        if root != newest.root:
            if since is None:
                raise
            # As when the program fails on all machines, and no peer of it answers: the member of this machine finds the
            # release in its folder, and the others then hear of it there.
            newest = signed(since)
        return newest, 0


def _addresses(authority: Authority, bootstrap: Sequence[str]) -> list[str]:
    addresses = list(dict.fromkeys([*bootstrap, *authority.run.bootstrap]))
    if not addresses:
        raise ConfigError(
            "the run file has no bootstrap address; name a peer of the run with --bootstrap ADDR"
        )
    return addresses


async def _next_change(records: RunRecords, run_id: str, before: SeenProgress) -> int:
    """Return the update that the run will have taken when all members know of a release."""
    if not before.version:
        return 0  # no one trains: all begin with the newest version
    began = trio.current_time()
    await trio.sleep(SPREAD_LOOK_SECONDS)
    now = await read_progress(records, run_id)
    pace = max(now.epoch - before.epoch, 0) / (trio.current_time() - began)
    # All members hear of a release within a minute, and fetch the job then. Where an update takes hours, it is not the
    # one that is being made, which some may have begun.
    return max(now.epoch, before.epoch) + max(2, math.ceil(3.0 * PUBLISH_LIST_SECONDS * pace))


@asynccontextmanager
async def _records_of(authority: Authority, addresses: Sequence[str]) -> AsyncIterator[RunRecords]:
    """Join a run for some minutes, as a peer that the authority admits."""
    # libp2p takes 0.2 s to import.
    from p2pavg.net.libp2p.transport import open_libp2p_transport

    seed = secrets.token_bytes(SEED_BYTES)
    signer = Ed25519Signer(seed)
    certificate = issue(
        authority.key.sign,
        authority=authority.run.authority,
        peer_id=signer.peer_id,
        roles=[Role.OBSERVER],
        max_weight=1.0,
        not_before=time.time(),
        expires=time.time() + RECORD_LIFE_SECONDS,
        serial=secrets.token_bytes(SERIAL_BYTES),
    )
    access = RunAccess(
        authority=authority.run.authority, secret=authority.run.secret, certificate=certificate.data
    )
    async with (
        open_libp2p_transport(seed=seed, listen=["/ip4/0.0.0.0/tcp/0"], options=ONLY_ASKS) as transport,
        peer_over(transport, signer, bootstrap=addresses) as peer,
    ):
        with closing(RunRecords(peer.records, Membership(access, peer.id), time.time)) as records:
            yield records
