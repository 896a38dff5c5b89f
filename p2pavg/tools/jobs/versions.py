"""The versions of a run's job at one volunteer: fetched, agreed to, made ready, and laid out for their programs."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from p2pavg import verify_certificate
from p2pavg.base.errors import CertificateError, ConfigError, P2PAvgError, RemoteProtocolError, StateError
from p2pavg.base.files import PRIVATE, PUBLIC, keep_file, make_folder, naming_errors, read_text
from p2pavg.base.formats import in_bytes
from p2pavg.base.limits import ASK_AGAIN_SECONDS, LOOK_SECONDS, REPLY_SECONDS, RETRY_SECONDS, START_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.gate.messages import TellNotice, TellUpdate
from p2pavg.net.gate.server import Gate
from p2pavg.net.limits.rate import RateLimit
from p2pavg.optim.coordination.view import NOTE, JobNote
from p2pavg.peer.joining.carrying import fetch_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import read_certificate
from p2pavg.runs.membership.job_release import JobRelease, SeenProgress, decode_release, release_to_start
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import NewestNotice
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.notices import poll_notices, releases_of
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.state.joiner.fetching import DownloadProgress
from p2pavg.tools.daemon.life import TOTALS_SECONDS
from p2pavg.tools.jobs.archive import unpack_job
from p2pavg.tools.jobs.environment import cache_folder, make_environment
from p2pavg.tools.jobs.fence import FencedPlaces, missing_fence, python_places
from p2pavg.tools.jobs.folder import write_folder
from p2pavg.tools.jobs.given import MAX_GIVEN_BYTES, GivenWork, read_given
from p2pavg.tools.jobs.manifest import JobManifest, read_packages
from p2pavg.tools.jobs.page import JobPage, agreed
from p2pavg.tools.jobs.releases import keep_releases, kept_releases, read_progress
from p2pavg.tools.jobs.running import in_left_thread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """A volunteer's part in a run that has a job."""

    hashes: tuple[str, ...]
    """Roots of the jobs that may run, without a question, of ``--yes --job HASH``; empty: the user is asked."""
    without_fence: bool
    """With ``hashes``: run it also where this machine has no fence."""
    files: Path | None
    """A folder that may have larger files of the job."""
    max_upload_mbps: float | None
    max_download_mbps: float | None
    bandwidth: float | None

    def check(self, release: JobRelease) -> None:
        """Raise ConfigError if a job is none of those that may run."""
        if self.hashes and release.root.hex() not in self.hashes:
            raise ConfigError(
                f"the run's job is {release.root.hex()}, and --job allows {' and '.join(self.hashes)} only",
                remedy="look at the job with `p2pavg join` without --yes, and give its hash if you agree",
            )


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """A version of the job that the user agreed to, with all that its program needs."""

    release: JobRelease
    manifest: JobManifest
    folder: Path
    """Its files, unpacked."""
    python: Path
    """The interpreter of its packages."""
    files: Mapping[str, Path]
    """Places of its larger files, by name."""
    no_fence: str
    """The reason for which there is no fence; empty if there is one."""


class JobVersions:
    """The versions of a run's job at one volunteer: it looks for newer ones, and makes them ready while one runs."""

    def __init__(
        self, peer: Peer, home: Home, run: RunFile, access: RunAccess, options: TrainingOptions
    ) -> None:
        self._peer = peer
        self._home = home
        self._run = run
        self._access = access
        self._options = options
        self._records = RunRecords(peer.records, Membership(access, peer.id), peer.context.wall_clock)
        self._kept = {release.number: release for release in kept_releases(home, run)}
        self._known = NewestNotice(self._kept[max(self._kept)])
        self._newer = trio.Event()
        self._known.changed.append(self._note_newer)
        self._next: ReadyJob | P2PAvgError | None = None
        self._prepared = trio.Event()
        """Set when the newest version is ready, or cannot be."""
        self.handed = make_folder(home.folder / "handed")
        self._given_file = home.folder / "given"
        self.given = _given_before(self._given_file)
        """The work of all starts."""
        self.download = RateLimit(options.max_download_mbps)
        """The user's limit, of the rounds and of larger files together."""
        self._warns = True

    def _note_newer(self) -> None:
        self._kept[self._known.newest.number] = self._known.newest
        self._next, self._prepared = None, trio.Event()
        self._newer.set()
        self._newer = trio.Event()

    async def receive(self, gate: Gate) -> None:
        """Take what the program's peer tells, until cancelled. Only signatures count, and of the loss its own word."""
        async for told in gate.told:
            try:
                match told:
                    case TellNotice(notice):
                        self._known.learn(decode_release(notice, self._run.authority, self._run.run_id))
                    case TellUpdate(epoch, certificate, metric, value):
                        if certificate:
                            # Many signatures: a program that tells of thousands must not hold up the network.
                            shown = await self._peer.context.run_in_thread(verify_certificate, certificate)
                            self.given.took(self._peer.id, shown.group_id, shown.weights)
                        self.given.measured(epoch, metric, value)
            except (RemoteProtocolError, CertificateError) as error:
                # Once: a program could fill the disk with them.
                if self._warns:
                    logger.warning("the program tells of something that counts for nothing: %s", error)
                self._warns = False

    async def say_given(self) -> None:
        """Say and keep each minute what this machine has given, until cancelled; once more then."""
        began, before = trio.current_time(), self.given.seconds
        said = ""
        try:
            while True:
                await trio.sleep(TOTALS_SECONDS)
                self.given.seconds = before + trio.current_time() - began
                await trio.to_thread.run_sync(self._keep_given, self.given.text)  # the disk may be slow
                if (sentence := self.given.sentence) != said:
                    await tell(sentence)
                    said = sentence
        finally:
            self.given.seconds = before + trio.current_time() - began
            self._keep_given(self.given.text)
            if self.given.sentence != said:
                # A terminal that was stopped with Ctrl-S does not keep the run from its end: only the last flush waits.
                with trio.move_on_after(LOOK_SECONDS) as scope:
                    scope.shield = True
                    await tell(self.given.sentence)

    def _keep_given(self, text: str) -> None:
        try:
            keep_file(self._given_file, text.encode(), mode=PRIVATE)
        except ConfigError as error:  # no reason to end the training
            logger.warning("what this machine has given is not kept: %s", error)

    def has_newer(self, release: JobRelease) -> bool:
        """Return whether the authority has released a newer version."""
        return self._known.newest.number > release.number

    async def to_start(self) -> JobRelease:
        """Return the version with which to begin: a run file may be older than the run's job.

        Raises:
            ConfigError: the run trains with a version that this peer has heard nothing of.
        """
        seen = SeenProgress(version=0, epoch=0)
        with trio.move_on_after(START_SECONDS):
            while True:
                await self.poll()
                seen = await read_progress(self._records, self._run.run_id)
                if seen.version <= self._known.newest.number:
                    break
                # Those that train with it publish it: they may not have found this peer yet.
                await trio.sleep(LOOK_SECONDS)
        newest = self._known.newest
        if seen.version > newest.number:
            raise ConfigError(
                f"the run trains with version {seen.version} of its job, and no member has told of it",
                remedy="start the command again later, or ask the run's operator for a new link",
            )
        before = [release for number, release in sorted(self._kept.items()) if number < newest.number]
        found = release_to_start(newest, before[-1], seen) if before else newest
        keep_releases(self._home, self._kept.values())
        return found

    async def poll(self) -> None:
        """Look for a newer release in the folder, where `p2pavg job publish` puts it, and shortly at other members."""
        for release in await trio.to_thread.run_sync(kept_releases, self._home, self._run):
            self._known.learn(release)
        with trio.move_on_after(REPLY_SECONDS):
            await poll_notices(self._records, releases_of(self._run), self._known)

    async def ready(self, release: JobRelease) -> ReadyJob:
        """Fetch a version, ask the user about it, and make the environment for its packages.

        Nothing of it runs before the user has agreed.

        Raises:
            ConfigError: the user does not agree, or something of this machine is in the way.
            StateError: no member has it, or no mirror has one of its larger files.
        """
        home, options = self._home, self._options
        began = trio.current_time()
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                shown = _Fetched(nursery)
                data = await fetch_job(self._peer, home, self._run, self._access, release, shown)
                nursery.cancel_scope.cancel()
        await tell(f"the job is here: {in_bytes(len(data))}, after {trio.current_time() - began:.1f} s")
        # Others get it from here also where it does not run. These are signed bytes.
        await trio.to_thread.run_sync(self._hand, release, data)
        options.check(release)
        # A job may have 64 MiB: all that reads or writes it runs in threads.
        manifest, files = await trio.to_thread.run_sync(unpack_job, data)
        packages = read_packages(files[manifest.packages]) if manifest.packages else None
        no_fence = await trio.to_thread.run_sync(missing_fence)
        page = JobPage(
            run_id=self._run.run_id,
            release=release,
            manifest=manifest,
            files=len(files),
            packages=len(packages or ()),
            no_fence=no_fence,
            kept_files=str(_files_folder()),
            scratch=str(self._scratch),
            max_upload_mbps=options.max_upload_mbps,
        )
        await agree(page, home, options)
        began = trio.current_time()
        # Ctrl-C ends the wait; an install that goes on is finished, or begun anew by the next start.
        python = await in_left_thread(make_environment, packages)
        await tell(f"the environment is ready, after {trio.current_time() - began:.1f} s")
        larger = await self._larger_files(manifest)
        folder = await trio.to_thread.run_sync(self._unpack, release, files, larger, bool(no_fence))
        return ReadyJob(release, manifest, folder, python, larger, no_fence)

    async def _larger_files(self, manifest: JobManifest) -> dict[str, Path]:
        if not manifest.files:
            return {}
        from p2pavg.tools.jobs.mirrors import MirrorFiles  # most jobs have none, and need no client of HTTP

        mirrors = MirrorFiles(self._options.files, _files_folder(), self.download, tell)
        began = trio.current_time()
        found = await mirrors.find(manifest.files)
        await tell(f"its larger files are here, after {trio.current_time() - began:.1f} s")
        return found

    def _unpack(
        self, release: JobRelease, files: dict[str, bytes], larger: dict[str, Path], has_links: bool
    ) -> Path:
        """Return the job's folder, made anew: the program of an earlier start may have been changed."""
        folder = self._home.job(release.root).with_suffix("")
        # No link in it leads elsewhere: the job's program cannot write here.
        shutil.rmtree(folder, ignore_errors=True)
        # Where the fence shows the larger files. Without one, links to them.
        write_folder(folder, files | dict.fromkeys(larger, b""))
        with naming_errors(f"{folder} cannot be written", folder):
            for name, place in larger.items() if has_links else ():
                (folder / name).unlink()
                (folder / name).symlink_to(place)
        return folder

    @property
    def _scratch(self) -> Path:
        return self._home.folder / "scratch"

    async def lay_out(self, job: ReadyJob) -> FencedPlaces:
        """Write the files of a version that is to start, and remove those of earlier ones.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with naming_errors(f"{self._home.folder} cannot be written", self._home.folder):
            return await trio.to_thread.run_sync(self._lay_out, job)

    def _lay_out(self, job: ReadyJob) -> FencedPlaces:
        # Not all that is unknown: the operator's machine may just be publishing the next version.
        for number in [number for number in self._kept if number < job.release.number]:
            root = self._kept.pop(number).root
            for place in (self._home, Home(self.handed)):
                place.job(root).unlink(missing_ok=True)
                shutil.rmtree(place.job(root).with_suffix(""), ignore_errors=True)
        (self.handed / NOTE).unlink(missing_ok=True)
        own = {
            name: getattr(self._options, name)
            for name in ("max_upload_mbps", "max_download_mbps", "bandwidth")
            if getattr(self._options, name) is not None
        }
        # What the program's own peer needs: the run file with this user's limits, and no key.
        run = replace(self._run, job=job.release.text, **own)
        keep_file(self.handed / "job.run", run.text.encode(), mode=PRIVATE)
        certificate = certificate_text(read_certificate(self._access.certificate))
        keep_file(self.handed / "job.cert", certificate.encode(), mode=PRIVATE)
        return FencedPlaces(
            job=job.folder,
            scratch=make_folder(self._scratch),
            handed=self.handed,
            python=python_places(job.python),
            files=job.files,
        )

    def _hand(self, release: JobRelease, data: bytes) -> None:
        """Let the program's peer give a version to other members."""
        file = Home(self.handed).job(release.root)
        make_folder(file.parent)
        keep_file(file, data, mode=PUBLIC)

    async def note_next(self, present: JobRelease) -> None:
        """Tell the program of each newer version than the one that runs, at once, until cancelled."""
        while True:
            newer = self._newer
            if self.has_newer(present):
                newest = self._known.newest
                await tell(
                    f"the run's authority has released version {newest.number} of the job, which takes over after"
                    f" update {newest.since}"
                )
                try:
                    await trio.to_thread.run_sync(self._note, newest)
                except ConfigError as error:  # no reason to end the training now
                    await tell(f"the program will not hear of version {newest.number}: {error}")
            await newer.wait()

    def _note(self, newest: JobRelease) -> None:
        # From here on, a restart finds it, and the program ends after the update.
        keep_releases(self._home, self._kept.values())
        note = JobNote(newest.number, newest.since).text
        keep_file(self.handed / NOTE, note.encode(), mode=PUBLIC)

    async def prepare_next(self, present: JobRelease) -> None:
        """Make the newest version ready whenever there is a newer one than that which runs, until cancelled."""
        while True:
            newer, newest = self._newer, self._known.newest
            if newest.number > present.number:
                found: ReadyJob | P2PAvgError
                try:
                    found = await self.ready(newest)
                except P2PAvgError as error:
                    await tell(f"this machine will not go on with version {newest.number}: {error}")
                    found = error
                if newest is self._known.newest:
                    self._next = found
                    self._prepared.set()
            await newer.wait()

    async def next(self) -> ReadyJob:
        """Return the next version when it is ready.

        Raises:
            ConfigError: see :meth:`ready`.
        """
        pause = ASK_AGAIN_SECONDS
        while True:
            await self._prepared.wait()
            found, newest = self._next, self._known.newest
            match found:
                case ReadyJob():
                    return found
                case StateError():
                    # Those that have it may be starting it. The user sees why it waits, and may end it.
                    try:
                        return await self.ready(newest)
                    except StateError as error:
                        await tell(f"version {newest.number} cannot be had yet: {error}")
                        await trio.sleep(pause)
                        pause = min(2.0 * pause, RETRY_SECONDS)
                case P2PAvgError():
                    raise found


def _files_folder() -> Path:
    return cache_folder() / "files"


def _given_before(file: Path) -> GivenWork:
    try:
        if file.exists():
            return read_given(read_text(file, "file of what was given", max_bytes=MAX_GIVEN_BYTES))
    except ConfigError as error:
        logger.warning("what this machine gave before is not counted: %s: %s", file, error)
    return GivenWork()


async def agree(page: JobPage, home: Home, options: TrainingOptions) -> None:
    """Ask the user, unless the same job was agreed to before.

    Raises:
        ConfigError: the user does not agree, or cannot be asked.
    """
    kept = home.folder / "agreed"
    root = page.release.root.hex()
    # Without its fence, the same job is another matter.
    fence = "without a fence" if page.no_fence else "fenced"
    mark = f"{root} {fence}, {'with the network' if page.manifest.network else 'no network'}"
    if not options.hashes and kept.exists() and mark in read_text(kept, "note", max_bytes=4096).splitlines():
        await tell(f"you have agreed to this job before: {root}")
        return
    await tell("\n".join(page.lines))
    if options.hashes and page.no_fence and not options.without_fence:
        raise ConfigError(
            f"--yes runs a job behind a fence only, and this machine has none: {page.no_fence}",
            remedy="install bubblewrap; or add --no-fence, with which the program may do all that this user may",
        )
    if not options.hashes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                "there is no terminal to ask on whether this job may run",
                remedy=f"start it with --yes --job {root}, or with --only-help, which runs nothing",
            )
        # Ctrl-C ends the wait; nothing wakes a read of the terminal.
        answer = await in_left_thread(_answer_to, page.question)
        if not agreed(answer, default=page.default):
            raise ConfigError(
                "you did not agree to the job, so nothing of it ran",
                remedy="p2pavg join with --only-help averages and relays for the run, and runs nothing",
            )
    # The one before, too: a restart before the change goes on with it.
    before = read_text(kept, "note", max_bytes=4096).splitlines()[-1:] if kept.exists() else []
    keep_file(kept, "".join(f"{each}\n" for each in (*before, mark)).encode(), mode=PRIVATE)


def _answer_to(question: str) -> str:
    try:
        return input(question)
    except EOFError:  # Ctrl-D
        return "no"


async def tell(text: str) -> None:
    """Print a line, or several, for the user."""
    # A terminal that was stopped with Ctrl-S must not stop the network.
    await in_left_thread(print_line, text)


def print_line(line: str) -> None:
    """Print a line for the user, in a thread that may wait for the terminal."""
    # A terminal that has no sign for a letter shows another one.
    code = sys.stdout.encoding or "utf-8"
    print(line.encode(code, "replace").decode(code), flush=True)


class _Fetched:
    """Says how far the fetch is, now and then, in tasks of a nursery: the terminal may have been stopped."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._told = 0.0

    def __call__(self, progress: DownloadProgress) -> None:
        done = progress.done / progress.total if progress.total else 0.0
        if done < 1.0 and done >= self._told + 0.1:
            self._told = done
            self._nursery.start_soon(tell, f"fetching the job: {done:.0%} of {in_bytes(progress.total)}")
