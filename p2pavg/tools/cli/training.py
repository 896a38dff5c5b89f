"""The work of ``p2pavg join`` in a run that has a job: fetch it, ask, and train, in a process behind a fence."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import trio

from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.gate.server import Gate, open_gate
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.joining.carrying import carrying_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import PEER_PROTOCOLS, Peer
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg.strategies import job as program
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.jobs.fence import HANDED, JOB, SCRATCH, FencedPlaces, fenced, limited, own_roots
from p2pavg.tools.jobs.limits import GIB, JobEnd
from p2pavg.tools.jobs.running import JobProgram
from p2pavg.tools.jobs.versions import JobVersions, ReadyJob, TrainingOptions, print_line

logger = logging.getLogger(__name__)

SIGNED = tuple(f"p2pavg-{name}/".encode() for name in ("record", "input", "output", "own", "held", "ticket"))
"""Beginnings of the messages that a peer signs in the rounds and records of its runs. A certificate for others begins
with another word, and so does the proof by which libp2p knows a peer."""
STOPPED = "stopped by its user"
MAX_LOG_BYTES = 8 * 2**20
FAILURES = 2
"""Of a program in a row, after which the next version takes over early: a single one may be this machine's."""


async def train(
    peer: Peer, home: Home, run: RunFile, access: RunAccess, options: TrainingOptions, life: DaemonProcess
) -> JobEnd:
    """Fetch the job, ask the user, and train until the program has ended or this process is told to leave.

    Raises:
        ConfigError: the user does not agree, or something of this machine is in the way.
        StateError: no member has the job.
    """
    program: JobProgram | None = None
    is_told = False
    with bare_exceptions():
        async with trio.open_nursery() as nursery:

            async def stop_when_told() -> None:
                nonlocal is_told
                await life.leaving.wait()
                is_told = True
                if program is not None:
                    program.stop(STOPPED)
                else:  # whatever is fetched, asked or made
                    nursery.cancel_scope.cancel()

            nursery.start_soon(stop_when_told)
            versions = JobVersions(peer, home, run, access, options)
            life.given = versions.given
            job = await versions.ready(await versions.to_start())
            transport = peer.context.transport
            # While no program serves this peer's protocols, others get the job from this process.
            transport.serve(STATE_PROTOCOL, peer.state.serve)
            async with (
                carrying_job(peer, home, run, access),
                # From here on, other peers reach the program's peer, and this process passes their streams on.
                open_gate(
                    transport,
                    peer.context.signer,
                    versions.handed / "gate",
                    PEER_PROTOCOLS,
                    SIGNED,
                    named=run.bootstrap,
                    upload=RateLimit(options.max_upload_mbps),
                    download=versions.download,
                    otherwise={STATE_PROTOCOL: peer.state.serve},
                ) as gate,
            ):
                nursery.start_soon(versions.receive, gate)
                nursery.start_soon(versions.say_given)
                while True:
                    places = await versions.lay_out(job)
                    program = _started(job, places, gate, run, home.folder / "job.log")
                    async with trio.open_nursery() as watching:
                        watching.start_soon(versions.note_next, job.release)
                        watching.start_soon(versions.prepare_next, job.release)
                        watching.start_soon(_end_if_it_fails, program, versions, job.release)
                        end = await program.run()
                        program = None
                        # One that has ended in order makes room for the next version, if there is one.
                        if is_told or end.is_error or not versions.has_newer(job.release):
                            nursery.cancel_scope.cancel()
                            return end
                        job = await versions.next()
                        watching.cancel_scope.cancel()
    return JobEnd(STOPPED, is_error=False)


async def _end_if_it_fails(program: JobProgram, versions: JobVersions, release: JobRelease) -> None:
    """End a program that fails again and again when there is a newer version, which may be the one that is mended."""
    while not (program.failures >= FAILURES and versions.has_newer(release)):
        # It may fail before its own peer has heard of one.
        if program.failures >= FAILURES:
            await versions.poll()
        await trio.sleep(LOOK_SECONDS)
    program.stop("it fails, and makes room for the next version")


def _started(job: ReadyJob, places: FencedPlaces, gate: Gate, run: RunFile, log: Path) -> JobProgram:
    """Return the program of a job, ready to run."""
    manifest, fence = job.manifest, not job.no_fence
    needs = manifest.needs
    folder, scratch, handed = (
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
        program.GPU_MEMORY: f"{needs.gpu_memory_gb:g}",
    }
    file_bytes = int(needs.disk_gb * GIB)
    command = [str(job.python), f"{folder}/{manifest.program}"]
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
        limited(command, file_bytes), environment, needs, places.scratch, gate, _LogFile(log, run.run_id).show
    )


class _LogFile:
    """Shows the program's words, and keeps the last of them in a file."""

    def __init__(self, file: Path, run_id: str) -> None:
        self._file = file
        self._run_id = run_id

    def show(self, line: str) -> None:
        """Show a line, and keep it."""
        print_line(f"{self._run_id}: {line}")
        try:
            if self._file.exists() and self._file.stat().st_size > MAX_LOG_BYTES:
                self._file.replace(self._file.with_suffix(".log.1"))
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(line + "\n")
        except OSError as error:
            logger.debug("cannot keep the program's words in %s: %s", self._file, error)
