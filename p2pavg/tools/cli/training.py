"""The work of ``p2pavg join`` in a run that has a job: fetch it, ask, and train, in a process behind a fence."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import PRIVATE, PUBLIC, keep_file, make_folder, read_text
from p2pavg.base.formats import in_bytes
from p2pavg.base.threads.exceptions import bare_exceptions
from p2pavg.net.gate.server import Gate, open_gate
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.joining.carrying import carrying_job, fetch_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import PEER_PROTOCOLS, Peer
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import read_certificate
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.state.joiner.fetching import DownloadProgress
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg.strategies import job as program
from p2pavg.tools.jobs.archive import unpack_job
from p2pavg.tools.jobs.environment import make_environment
from p2pavg.tools.jobs.fence import (
    HANDED,
    JOB,
    SCRATCH,
    FencedPlaces,
    fenced,
    limited,
    missing_fence,
    own_roots,
    python_places,
)
from p2pavg.tools.jobs.folder import write_folder
from p2pavg.tools.jobs.limits import GIB, JobEnd
from p2pavg.tools.jobs.manifest import JobManifest
from p2pavg.tools.jobs.packages import read_packages
from p2pavg.tools.jobs.page import JobPage, agreed
from p2pavg.tools.jobs.running import JobProgram

logger = logging.getLogger(__name__)

SIGNED = tuple(f"p2pavg-{name}/".encode() for name in ("record", "input", "output", "own", "held", "ticket"))
"""Beginnings of the messages that a peer signs in the rounds and records of its runs. A certificate for others begins
with another word, and so does the proof by which libp2p knows a peer."""
STOPPED = "stopped by its user"
MAX_LOG_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """A volunteer's part in a run that has a job."""

    release: JobRelease
    hash: str | None
    """Root of the one job that may run without a question, of ``--yes --job HASH``."""
    without_fence: bool
    """With ``hash``: run it also where this machine has no fence."""
    max_upload_mbps: float | None
    max_download_mbps: float | None
    bandwidth: float | None

    def check(self) -> None:
        """Raise ConfigError if the run's job is another one than the one that may run."""
        if self.hash is not None and self.hash.lower() != self.release.root.hex():
            raise ConfigError(
                f"the run's job is {self.release.root.hex()}, and --job allows {self.hash} only",
                remedy="look at the job with `p2pavg join` without --yes, and give its hash if you agree",
            )


async def train(
    peer: Peer,
    home: Home,
    run: RunFile,
    access: RunAccess,
    options: TrainingOptions,
    told_to_leave: Callable[[], Awaitable[None]],
) -> JobEnd:
    """Fetch the job, ask the user, and train until the program has ended or this process is told to leave.

    Args:
        told_to_leave: waits until this process is told to leave.

    Raises:
        ConfigError: the user does not agree, or something of this machine is in the way.
        StateError: no member has the job.
    """
    program: JobProgram | None = None
    with bare_exceptions():
        async with trio.open_nursery() as nursery:

            async def stop_when_told() -> None:
                await told_to_leave()
                if program is not None:
                    program.stop(STOPPED)
                else:  # whatever is fetched, asked or made
                    nursery.cancel_scope.cancel()

            nursery.start_soon(stop_when_told)
            began = trio.current_time()
            data = await fetch_job(peer, home, run, access, options.release, _Fetched())
            _tell(f"the job is here: {in_bytes(len(data))}, after {trio.current_time() - began:.1f} s")
            transport = peer.context.transport
            # While no program serves this peer's protocols, others get the job from this process.
            transport.serve(STATE_PROTOCOL, peer.state.serve)
            async with carrying_job(peer, home, run, access):
                manifest, python, places, no_fence = await _prepared(home, run, access, options, data)
                # From here on, other peers reach the program's peer, and this process passes their streams on.
                async with open_gate(
                    transport,
                    peer.context.signer,
                    places.handed / "gate",
                    PEER_PROTOCOLS,
                    lambda message: message.startswith(SIGNED),
                    named=run.bootstrap,
                    upload=RateLimit(options.max_upload_mbps),
                    download=RateLimit(options.max_download_mbps),
                    otherwise={STATE_PROTOCOL: peer.state.serve},
                ) as gate:
                    log = home.folder / "job.log"
                    program = _started(python, manifest, places, gate, run, fence=not no_fence, log=log)
                    end = await program.run()
            nursery.cancel_scope.cancel()
            return end
    return JobEnd(STOPPED, is_error=False)


async def _prepared(
    home: Home, run: RunFile, access: RunAccess, options: TrainingOptions, data: bytes
) -> tuple[JobManifest, Path, FencedPlaces, str]:
    """Ask the user about a job, and make all that its program needs.

    Returns:
        The manifest, the Python interpreter of its packages, the folders that it sees, and why there is no fence.
    """
    # A job may have 64 MiB: all that reads or writes it runs in threads.
    manifest, files = await trio.to_thread.run_sync(unpack_job, data)
    packages = read_packages(files[manifest.packages]) if manifest.packages else None
    no_fence = await trio.to_thread.run_sync(missing_fence)
    scratch = home.folder / "scratch"
    page = JobPage(
        run_id=run.run_id,
        release=options.release,
        manifest=manifest,
        files=len(files),
        packages=len(packages or ()),
        no_fence=no_fence,
        scratch=str(scratch),
        max_upload_mbps=options.max_upload_mbps,
    )
    await _agree(page, home, options)
    began = trio.current_time()
    # Ctrl-C ends the wait; an install that goes on is finished, or begun anew by the next start.
    python = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
        make_environment, packages, abandon_on_cancel=True
    )
    _tell(f"the environment is ready, after {trio.current_time() - began:.1f} s")
    places = FencedPlaces(
        job=await trio.to_thread.run_sync(_unpacked, home, options.release, files),
        scratch=make_folder(scratch),
        handed=await trio.to_thread.run_sync(_handed, home, run, access, options, data),
        python=python_places(python),
    )
    return manifest, python, places, no_fence


def _started(
    python: Path,
    manifest: JobManifest,
    places: FencedPlaces,
    gate: Gate,
    run: RunFile,
    *,
    fence: bool,
    log: Path,
) -> JobProgram:
    """Return the program of a job, ready to run."""
    needs = manifest.needs
    job, scratch, handed = (
        (JOB, SCRATCH, HANDED) if fence else map(str, (places.job, places.scratch, places.handed))
    )
    # Only these: the volunteer's own variables may hold passwords.
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(own_roots()),
        program.GATE: f"{handed}/gate",
        program.RUN_FILE: f"{handed}/job.run",
        program.CERTIFICATE: f"{handed}/job.cert",
        program.SCRATCH: scratch,
    }
    file_bytes = int(needs.disk_gb * GIB)
    command = [str(python), f"{job}/{manifest.program}"]
    if fence:
        command = fenced(
            command,
            places,
            environment,
            network=manifest.network,
            gpu=needs.gpu_memory_gb > 0.0,
            shared_bytes=int(needs.memory_gb * GIB / 2),
        )
    return JobProgram(
        limited(command, file_bytes),
        environment,
        needs,
        places.scratch,
        lambda _: gate.stop_program(),
        _LogFile(log, run.run_id).show,
    )


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
    if (
        options.hash is None
        and kept.exists()
        and mark in read_text(kept, "note", max_bytes=4096).splitlines()
    ):
        _tell(f"you have agreed to this job before: {root}")
        return
    for line in page.lines:
        _tell(line)
    if options.hash is not None and page.no_fence and not options.without_fence:
        raise ConfigError(
            f"--yes runs a job behind a fence only, and this machine has none: {page.no_fence}",
            remedy="install bubblewrap; or add --no-fence, with which the program may do all that this user may",
        )
    if options.hash is None:
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
    keep_file(kept, f"{mark}\n".encode(), mode=PRIVATE)


def _answer_to(question: str) -> str:
    try:
        return input(question)
    except EOFError:  # Ctrl-D
        return "no"


def _unpacked(home: Home, release: JobRelease, files: dict[str, bytes]) -> Path:
    """Return the job's folder, made anew: the program of an earlier start may have been changed."""
    folder = home.job(release.root).with_suffix("")
    # No link in it leads elsewhere: the job's program cannot write here.
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, files)
    return folder


def _handed(home: Home, run: RunFile, access: RunAccess, options: TrainingOptions, data: bytes) -> Path:
    """Return the folder with what the program's own peer needs: the run file with this user's limits, no key."""
    folder = make_folder(home.folder / "handed")
    own = {
        name: getattr(options, name)
        for name in ("max_upload_mbps", "max_download_mbps", "bandwidth")
        if getattr(options, name) is not None
    }
    keep_file(folder / "job.run", replace(run, **own).text.encode(), mode=PRIVATE)
    keep_file(
        folder / "job.cert", certificate_text(read_certificate(access.certificate)).encode(), mode=PRIVATE
    )
    job = Home(folder).job(options.release.root)
    make_folder(job.parent)
    keep_file(job, data, mode=PUBLIC)
    return folder


def _tell(line: str) -> None:
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
            _tell(f"fetching the job: {done:.0%} of {in_bytes(progress.total)}")


class _LogFile:
    """Shows the program's words, and keeps the last of them in a file."""

    def __init__(self, file: Path, run_id: str) -> None:
        self._file = file
        self._run_id = run_id

    def show(self, line: str) -> None:
        """Show a line, and keep it."""
        _tell(f"{self._run_id}: {line}")
        try:
            if self._file.exists() and self._file.stat().st_size > MAX_LOG_BYTES:
                self._file.replace(self._file.with_suffix(".log.1"))
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(line + "\n")
        except OSError as error:
            logger.debug("cannot keep the program's words in %s: %s", self._file, error)
