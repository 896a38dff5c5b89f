"""A job's file in words, for the command line and the page that asks a volunteer."""

from __future__ import annotations

from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import what_to_do
from p2pavg.base.formats import count, in_bytes
from p2pavg.tools.jobs.archive import MAX_ARCHIVE_BYTES, job_root, unpack_job


def read_job(file: Path) -> tuple[bytes, bytes]:
    """Return the bytes of a job's file, and its root.

    Raises:
        ConfigError: it cannot be read, or is no job's file.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_ARCHIVE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {what_to_do(error, file)}") from None
    unpack_job(data)
    return data, job_root(data)


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
