"""The one file of a job, and its root, which names it. No I/O, no clock, no random source.

The file is a message: the job's files with their names, in order. It has no links, devices, owners, times or modes, so
the same files give the same bytes. A reader writes it again and compares, so there is no second file with its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.formats import count, in_bytes
from p2pavg.base.messages import Message
from p2pavg.state.tree import chunk_digests, root_of
from p2pavg.tools.jobs.manifest import (
    MANIFEST,
    MAX_ERROR_CHARS,
    MAX_FILES,
    MAX_JOB_BYTES,
    MAX_NAME_CHARS,
    JobManifest,
    problems,
    read_manifest,
)

MAX_SHOWN = 5  # problems of a job, in an error
MAX_ARCHIVE_BYTES = MAX_JOB_BYTES + MAX_FILES * (MAX_NAME_CHARS + 16)


class JobFile(Message, frozen=True):
    """A file of a job."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    content: Annotated[bytes, Meta(max_length=MAX_JOB_BYTES)]


class JobArchive(Message, frozen=True, tag="p2pavg-job/1"):
    """The files of a job, in the order of their names."""

    files: Annotated[tuple[JobFile, ...], Meta(min_length=1, max_length=MAX_FILES)]

    def __post_init__(self) -> None:
        names = [each.name for each in self.files]
        if names != sorted(set(names)):
            raise ValueError("a job whose files are not in order")


def some_of(problems: list[str]) -> str:
    """Return the first of some problems: a hostile job may have thousands."""
    shown = "; ".join(each[:MAX_ERROR_CHARS] for each in problems[:MAX_SHOWN])
    return f"{shown}; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else shown


def pack_job(files: Mapping[str, bytes]) -> bytes:
    """Return the file of a job, the same bytes for the same files.

    Raises:
        ConfigError: the files are no job; the message names all that is wrong.
    """
    if found := problems(files):
        raise ConfigError(some_of(found))
    return JobArchive(tuple(JobFile(name, files[name]) for name in sorted(files))).encode()


def unpack_job(data: bytes) -> tuple[JobManifest, dict[str, bytes]]:
    """Return the manifest and the files of a job.

    Raises:
        ConfigError: ``data`` is no job; the message says why.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ConfigError(f"a job of {len(data)} bytes; it may have {MAX_ARCHIVE_BYTES}")
    try:
        files = {each.name: each.content for each in JobArchive.decode(data).files}
    except RemoteProtocolError as error:
        raise ConfigError(f"no file of a job: {error}") from None
    if found := problems(files):
        raise ConfigError(some_of(found))
    return read_manifest(files[MANIFEST]), files


def job_root(data: bytes) -> bytes:
    """Return the 32 bytes that name a job's file; they are what the authority of a run signs."""
    return root_of(chunk_digests(data), len(data))


def describe(data: bytes) -> list[str]:
    """Return a job's file as lines of text: who made it, what it does, and what it needs."""
    manifest, files = unpack_job(data)
    needs = manifest.needs
    gpu = f", {needs.gpu_memory_gb:g} GB of a GPU's" if needs.gpu_memory_gb else ""
    lines = [
        f"{manifest.name}, by {manifest.author}",
        *manifest.about.splitlines(),
        f"runs {manifest.program}, with {'connections of its own' if manifest.network else 'no connection of its own'}",
        f"needs {needs.memory_gb:g} GB of memory{gpu}, and {needs.disk_gb:g} GB of the disk",
        f"packages: {manifest.packages or 'none'}",
    ]
    lines.append(f"{count(len(files), 'file')}, {in_bytes(sum(map(len, files.values())))}:")
    lines += [
        f"  {file.name} ({in_bytes(file.bytes)}, of its own: {' '.join(file.urls) or 'no mirror'})"
        for file in manifest.files
    ]
    lines += [f"  {name} ({in_bytes(len(content))})" for name, content in sorted(files.items())]
    return [*lines, f"root {job_root(data).hex()}"]
