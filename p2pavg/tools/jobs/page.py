"""The page that a volunteer reads before a job runs, and the question. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.base.formats import PeerText, count, in_bytes
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.tools.jobs.manifest import JobManifest, LargeFile, origin_of

MAX_ORIGINS = 5
"""Servers that are named. More would scroll away what the page says before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """The facts on the page."""

    run_id: str
    release: JobRelease
    manifest: JobManifest
    files: int
    """Of the job."""
    packages: int
    """That are to be installed, 0 if none."""
    no_fence: str
    """The reason for which this machine has no fence; empty if it has one."""
    kept_files: str
    """The folder for its larger files."""
    scratch: str
    """The folder that the job writes to."""
    max_upload_mbps: float | None

    @property
    def lines(self) -> list[str]:
        """The page."""
        manifest, needs = self.manifest, self.manifest.needs
        network = "the run's peers"
        if manifest.network:
            network = "all of the network with this machine's own programs, as it asks for"
        touches = f"the folder {self.scratch}, and {network}; no other file, no other process"
        head = f"The run {self.run_id!r} asks this machine to train."
        if self.no_fence:
            touches = "all files of this user, all of the network"
            head = f"THERE IS NO FENCE AROUND THIS PROGRAM: {self.no_fence}. It can read and change all that you can."
        sends = "as much as the rounds need; --max-upload-mbps sets a limit"
        if self.max_upload_mbps is not None:
            hourly = self.max_upload_mbps * 1e6 / 8 * 3600
            sends = f"at most {in_bytes(hourly)} an hour, by --max-upload-mbps {self.max_upload_mbps:g}"
        gpu = f"and a GPU, {needs.gpu_memory_gb:g} GB by its word" if needs.gpu_memory_gb else "no GPU"
        files = count(self.files, "file")
        rows = [
            ("signed by", f"the authority of the run, {self.release.authority.hex()[:16]}…"),
            ("job", f"{manifest.name}, version {self.release.number}, by {PeerText(manifest.author)}"),
            *(("", PeerText(line)) for line in manifest.about.splitlines()),
            ("its hash", self.release.root.hex()),
            ("runs", f"{manifest.program}, a program of {files} that its author has written"),
            ("touches", touches),
            ("takes", f"up to {needs.memory_gb:g} GB of memory and {needs.disk_gb:g} GB of the disk; {gpu}"),
            ("sends", sends),
            *([("fetches", _fetches(manifest.files, self.kept_files))] if manifest.files else []),
            ("packages", f"{count(self.packages, 'package')} to install" if self.packages else "none"),
            ("to stop", f"Ctrl-C, or `p2pavg stop {self.run_id}`; to go on, the same command again"),
        ]
        return [head, *(f"  {name:<10}{text}" for name, text in rows)]

    @property
    def default(self) -> bool:
        """The answer to an empty line: no, if the program could touch more than its own folder and the run."""
        return not self.no_fence and not self.manifest.network

    @property
    def question(self) -> str:
        """The question."""
        bare = "There is no fence around it. " if self.no_fence else ""
        return f"{bare}Train with it? [{'Y/n' if self.default else 'y/N'}] "


def _fetches(files: Sequence[LargeFile], folder: str) -> str:
    """Return from where larger files come, and where they are kept."""
    origins = list(dict.fromkeys(origin_of(url) for file in files for url in file.urls))
    shown = origins[:MAX_ORIGINS] + (["others"] if len(origins) > MAX_ORIGINS else [])
    shown += ["your --files"] if not all(file.urls for file in files) else []
    size = in_bytes(sum(file.bytes for file in files))
    return f"{count(len(files), 'larger file')}, {size}, from {', '.join(shown)}; kept in {folder}"


def agreed(answer: str, *, default: bool) -> bool:
    """Return what an answer means; anything but a clear yes is a no."""
    said = answer.strip().lower()
    return default if not said else said in ("y", "yes")
