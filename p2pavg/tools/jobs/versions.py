"""The versions of a run's job at one volunteer: fetched, agreed to, made ready, and laid out for their programs."""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from p2pavg import verify_certificate
from p2pavg.base.errors import CertificateError, ConfigError, P2PAvgError, RemoteProtocolError, StateError
from p2pavg.base.files import PRIVATE, PUBLIC, keep_file, make_folder, read_text
from p2pavg.base.formats import in_bytes
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.peer_text import PeerText
from p2pavg.net.gate.messages import TellNotice, TellUpdate
from p2pavg.net.gate.server import Gate
from p2pavg.optim.coordination.job_change import NOTE
from p2pavg.peer.joining.carrying import fetch_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import read_certificate
from p2pavg.runs.membership.job_release import (
    MAX_RELEASE_CHARS,
    JobRelease,
    decode_release,
    read_release,
    release_to_start,
)
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.notice import NewestNotice
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.notices import look, releases_of
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.state.joiner.fetching import DownloadProgress
from p2pavg.tools.daemon.life import TOTALS_SECONDS
from p2pavg.tools.jobs.archive import unpack_job
from p2pavg.tools.jobs.environment import make_environment
from p2pavg.tools.jobs.fence import (
    FencedPlaces,
    missing_fence,
    python_places,
)
from p2pavg.tools.jobs.folder import write_folder
from p2pavg.tools.jobs.given import GivenWork, read_given
from p2pavg.tools.jobs.manifest import JobManifest
from p2pavg.tools.jobs.packages import read_packages
from p2pavg.tools.jobs.page import JobPage, agreed
from p2pavg.tools.jobs.progress import read_progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """A volunteer's part in a run that has a job."""

    release: JobRelease
    hashes: tuple[str, ...]
    """Roots of the jobs that may run, without a question, of ``--yes --job HASH``; empty: the user is asked."""
    without_fence: bool
    """With ``hashes``: run it also where this machine has no fence."""
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
    data: bytes
    """The job's file."""
    manifest: JobManifest
    files: dict[str, bytes]
    python: Path
    """The interpreter of its packages."""
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
        self._kept = home.folder / "release"
        known = NewestNotice(options.release)
        if self._kept.exists():
            text = read_text(self._kept, "release of a job", max_bytes=MAX_RELEASE_CHARS).strip()
            known.learn(read_release(text, run.authority, run.run_id))
        self._known = known
        self._newer = trio.Event()
        known.changed.append(self._note_newer)
        self._next: ReadyJob | P2PAvgError | None = None
        self._is_prepared = trio.Event()
        self.handed = make_folder(home.folder / "handed")
        self._given_file = home.folder / "given"
        self.given = GivenWork()
        """The work of all starts."""
        if self._given_file.exists():
            self.given = read_given(read_text(self._given_file, "file of what was given", max_bytes=4096))

    def _note_newer(self) -> None:
        self._newer.set()
        self._newer = trio.Event()

    async def hear(self, gate: Gate) -> None:
        """Take what the program's peer tells, until cancelled. Only signatures count, and of the loss its own word."""
        async for told in gate.told:
            try:
                match told:
                    case TellNotice(notice):
                        self._known.learn(decode_release(notice, self._run.authority, self._run.run_id))
                    case TellUpdate(epoch, certificate, metric, value):
                        if certificate:
                            shown = verify_certificate(certificate)
                            self.given.took(self._peer.id, shown.group_id, shown.weights)
                        self.given.measured(epoch, PeerText(metric), value)
            except (RemoteProtocolError, CertificateError) as error:
                logger.warning("the program tells of something that counts for nothing: %s", error)

    async def say_given(self) -> None:
        """Say and keep each minute what this machine has given, until cancelled; once more then."""
        began, before = trio.current_time(), self.given.seconds
        said = ""
        try:
            while True:
                await trio.sleep(TOTALS_SECONDS)
                self.given.seconds = before + trio.current_time() - began
                if (sentence := self.given.sentence) != said:
                    tell(sentence)
                said = sentence
                keep_file(self._given_file, self.given.text.encode(), mode=PRIVATE)
        finally:
            self.given.seconds = before + trio.current_time() - began
            keep_file(self._given_file, self.given.text.encode(), mode=PRIVATE)
            if self.given.updates:
                tell(self.given.sentence)

    def has_newer(self, release: JobRelease) -> bool:
        """Return whether the authority has released a newer version."""
        return self._known.newest.number > release.number

    async def to_start(self) -> JobRelease:
        """Return the version with which to begin: a run file may be older than the run's job."""
        with trio.move_on_after(REPLY_SECONDS):
            await look(self._records, releases_of(self._run), self._known)
        newest, own = self._known.newest, self._options.release
        if newest.number == own.number:
            return own
        with trio.move_on_after(REPLY_SECONDS):
            return release_to_start(newest, own, await read_progress(self._records, self._run.run_id))
        return newest

    async def ready(self, release: JobRelease) -> ReadyJob:
        """Fetch a version, ask the user about it, and make the environment for its packages.

        Raises:
            ConfigError: the user does not agree, or something of this machine is in the way.
            StateError: no member has it.
        """
        home, options = self._home, self._options
        options.check(release)
        began = trio.current_time()
        data = await fetch_job(self._peer, home, self._run, self._access, release, _Fetched())
        tell(f"the job is here: {in_bytes(len(data))}, after {trio.current_time() - began:.1f} s")
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
            scratch=str(self._scratch),
            max_upload_mbps=options.max_upload_mbps,
        )
        await _agree(page, home, options)
        began = trio.current_time()
        # Ctrl-C ends the wait; an install that goes on is finished, or begun anew by the next start.
        python = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
            make_environment, packages, abandon_on_cancel=True
        )
        tell(f"the environment is ready, after {trio.current_time() - began:.1f} s")
        return ReadyJob(release, data, manifest, files, python, no_fence)

    @property
    def _scratch(self) -> Path:
        return self._home.folder / "scratch"

    async def lay_out(self, job: ReadyJob) -> FencedPlaces:
        """Write the files of a version that is to start, and remove those of earlier ones."""
        return await trio.to_thread.run_sync(self._lay_out, job)

    def _lay_out(self, job: ReadyJob) -> FencedPlaces:
        keep = {self._known.newest.root, job.release.root}
        for jobs in (self._home.jobs, Home(self.handed).jobs):
            for found in jobs.iterdir() if jobs.exists() else ():
                if found.stem not in {root.hex() for root in keep}:
                    shutil.rmtree(found) if found.is_dir() else found.unlink()
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
        self._hand(job)
        # Made anew, because the program of an earlier start may have been changed. No link in it leads elsewhere: a
        # job's program cannot write here.
        folder = self._home.job(job.release.root).with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(folder, job.files)
        return FencedPlaces(
            job=folder,
            scratch=make_folder(self._scratch),
            handed=self.handed,
            python=python_places(job.python),
        )

    def _hand(self, job: ReadyJob) -> None:
        """Let the program's peer give a version to other members."""
        file = Home(self.handed).job(job.release.root)
        make_folder(file.parent)
        keep_file(file, job.data, mode=PUBLIC)

    async def prepare_next(self, present: JobRelease) -> None:
        """Wait for a newer version than the one that runs, and make it ready."""
        self._next, self._is_prepared = None, trio.Event()
        while not self.has_newer(present):
            await self._newer.wait()
        newest = self._known.newest
        tell(
            f"the run's authority has released version {newest.number} of the job, which takes over after update"
            f" {newest.since}"
        )
        # From here on, a restart finds it, and the program ends after the update.
        keep_file(self._kept, f"{newest.text}\n".encode(), mode=PRIVATE)
        keep_file(self.handed / NOTE, f"{newest.since}\n".encode(), mode=PUBLIC)
        try:
            job = await self.ready(newest)
            await trio.to_thread.run_sync(self._hand, job)
            self._next = job
        except P2PAvgError as error:
            tell(f"this machine will not go on with version {newest.number}: {error}")
            self._next = error
        self._is_prepared.set()

    async def next(self) -> ReadyJob:
        """Return the next version when it is ready.

        Raises:
            ConfigError, StateError: see :meth:`ready`.
        """
        await self._is_prepared.wait()
        assert self._next is not None
        if isinstance(self._next, StateError):
            # Those that have it may have been few before the change.
            return await self.ready(self._known.newest)
        if isinstance(self._next, P2PAvgError):
            raise self._next
        return self._next


async def _agree(page: JobPage, home: Home, options: TrainingOptions) -> None:
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
        tell(f"you have agreed to this job before: {root}")
        return
    for line in page.lines:
        tell(line)
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
        # Ctrl-C ends the wait; the thread is left, because nothing wakes a read of the terminal.
        answer = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
            _answer_to, page.question, abandon_on_cancel=True
        )
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


def tell(line: str) -> None:
    """Print a line for the user."""
    # A terminal that has no sign for a letter shows another one.
    code = sys.stdout.encoding or "utf-8"
    print(line.encode(code, "replace").decode(code), flush=True)


class _Fetched:
    """Says how far the fetch is, now and then."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, progress: DownloadProgress) -> None:
        done = progress.done / progress.total if progress.total else 0.0
        if done < 1.0 and done >= self._told + 0.1:
            self._told = done
            tell(f"fetching the job: {done:.0%} of {in_bytes(progress.total)}")
