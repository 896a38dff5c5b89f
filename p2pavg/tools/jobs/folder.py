"""The folder of a job, read to pack it and written to run it, and the job's file."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import naming_errors
from p2pavg.tools.jobs.archive import MAX_ARCHIVE_BYTES, job_root, unpack_job
from p2pavg.tools.jobs.manifest import (
    LARGER_DATA,
    MANIFEST,
    MAX_FILES,
    MAX_JOB_BYTES,
    MAX_MANIFEST_BYTES,
    LargeFile,
    read_manifest,
)

LEFT_OUT = frozenset({"__pycache__"})
"""Folders that are no part of a job, beside those and files whose names begin with a dot."""


def read_job(file: Path) -> tuple[bytes, bytes]:
    """Return the bytes of a job's file, and its root.

    Raises:
        ConfigError: it cannot be read, or is no job's file.
    """
    with naming_errors(f"{file} cannot be read", file), file.open("rb") as opened:
        data = opened.read(MAX_ARCHIVE_BYTES + 1)
    unpack_job(data)
    return data, job_root(data)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name, with ``/`` between folders, but for those that members do not carry.

    Raises:
        ConfigError: the folder, or a file in it, cannot be read, or is a link or a device; or there is too much of it.
    """
    found: dict[str, bytes] = {}
    left = MAX_JOB_BYTES
    with naming_errors(f"{folder} cannot be read", folder):
        large = {file.name for file in large_files(folder)}
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if name in large:
                continue
            if len(found) >= MAX_FILES or (left := left - path.stat().st_size) < 0:
                raise ConfigError(
                    f"{folder} has more than {MAX_FILES} files or {MAX_JOB_BYTES} bytes: {LARGER_DATA}"
                )
            found[name] = path.read_bytes()
    return found


def large_files(folder: Path) -> tuple[LargeFile, ...]:
    """Return the files that the manifest of a folder names beside those that members carry.

    A manifest that cannot be read names none: :func:`~p2pavg.tools.jobs.manifest.problems` says what is wrong with it.

    Raises:
        OSError: there is a manifest, and its file cannot be read.
    """
    try:
        with (folder / MANIFEST).open("rb") as opened:
            return read_manifest(opened.read(MAX_MANIFEST_BYTES + 1)).files
    except (FileNotFoundError, ConfigError):
        return ()


def has_bytes(place: Path, file: LargeFile) -> bool:
    """Return whether there is a file with the bytes that a manifest names.

    Raises:
        OSError: it cannot be read.
    """
    return place.is_file() and place.stat().st_size == file.bytes and _digest(place) == file.sha256


def _digest(place: Path) -> str:
    with place.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def wrong_copies(folder: Path) -> list[str]:
    """Return sentences on the larger files that lie in a job's folder and are not those that its manifest names.

    Raises:
        ConfigError: one cannot be read.
    """
    found = []
    with naming_errors(f"{folder} cannot be read", folder):
        for file in large_files(folder):
            place = folder / file.name
            if place.is_file() and not has_bytes(place, file):
                own = f"bytes = {place.stat().st_size}, sha256 = {_digest(place)!r}"
                found.append(f"{place} has {own}, and {MANIFEST} names others")
    return found


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name in LEFT_OUT:
            continue
        path = Path(entry.path)
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield from _files(path)
        elif stat.S_ISREG(mode):
            yield path
        else:
            # A link may lead out of the folder, on this machine or on another one.
            raise ConfigError(f"{path} is a link, a pipe or a device; a job has plain files only")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with the files of a job, whole or not at all.

    Args:
        folder: must not exist.
        files: those of :func:`~p2pavg.tools.jobs.archive.unpack_job`, whose names are safe.

    Raises:
        ConfigError: the folder exists, or cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not")
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        with naming_errors(f"{folder} cannot be written", folder):
            for name, content in files.items():
                path = draft / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
