"""Files that have their whole content or do not exist, also if the process is killed while it writes them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from p2pavg.base.errors import BusyError, ConfigError, ControlError, P2PAvgError

if sys.platform != "win32":
    import fcntl

Buffer = bytes | bytearray | memoryview
PRIVATE = 0o600
PUBLIC = 0o644
_DRAFT = re.compile(r"\.(.+)\.[0-9]+\.[0-9a-f]{8}")  # the file's name, a process, a random number


_REMEDIES = {
    errno.ENOENT: "check the name {file}, and that its folder is there",
    errno.ENOTDIR: "name another path: a part of {file} is a file and no folder",
    errno.EISDIR: "name a file: {file} is a folder",
    errno.EACCES: "run the command as the user that owns {file}, or give this user access to it and to its folder",
    errno.EPERM: "run the command as the user that owns {file}, or give this user access to it and to its folder",
    errno.EROFS: "name a path on a file system that can be written to: that of {file} is mounted read-only",
    errno.ENOSPC: "make room on the file system of {file}, or name a path on another one",
    errno.EDQUOT: "make room within this user's quota on the file system of {file}, or name a path on another one",
    errno.EMFILE: "let the process open more files (`ulimit -n`)",
    errno.EIO: "check the disk of {file}: it reports errors",
}


def what_to_do(error: OSError, file: str | os.PathLike[str]) -> str:
    """Return the remedy for an error of a file, for a :class:`~p2pavg.base.errors.P2PAvgError`."""
    remedy = _REMEDIES.get(error.errno or 0, "check {file} and its folder, or name another path")
    return remedy.format(file=os.fspath(file))


@contextmanager
def naming_errors(
    said: str, place: str | os.PathLike[str], kind: type[P2PAvgError] = ConfigError
) -> Iterator[None]:
    """Turn an error of the system into one that names a file or folder, and says what to do.

    Args:
        said: the beginning of its text, which names the place: ``f"cannot read {place}"``.
        place: a file, or a folder. If a file in it is in the way, or a folder above it, the text names that one, too.
        kind: of the error that is raised.
    """
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename  # of a rename, it is the target that is in the way
        # Users know nothing of drafts.
        if not isinstance(named, str) or _DRAFT.fullmatch(os.path.basename(named)):
            named = os.fspath(place)
        other = "" if named == os.fspath(place) else f" ({named})"
        text = f"{said}: {error.strerror or error}{other}"
        raise kind(text, remedy=what_to_do(error, named)) from None


def create_file(file: Path, data: Buffer, *, mode: int) -> None:
    """Create a file. It is linked into place when it is complete.

    Raises:
        FileExistsError: there is a file of this name, which stays as it is.
        OSError: the file cannot be written.
    """
    with creating(file, mode=mode) as opened:
        opened.write(data)


def replace_file(file: Path, data: Buffer, *, mode: int) -> None:
    """Write a file in place of the one that has its name, if any. The data are not copied.

    Raises:
        OSError: the file cannot be written; the earlier one stays as it is.
    """
    with replacing(file, mode=mode) as opened:
        opened.write(data)


def keep_file(file: Path, data: Buffer, *, mode: int) -> None:
    """Write a file as :func:`replace_file` does, for a caller whose user has to mend what is in the way.

    Raises:
        ConfigError: the file cannot be written; the message names it, and says what to do.
    """
    with naming_errors(f"cannot write {file}", file):
        replace_file(file, data, mode=mode)


def make_folder(folder: Path) -> Path:
    """Make a folder for its owner only, unless it is there; return it.

    Raises:
        ConfigError: it cannot be made; the message names it, and says what to do.
    """
    with naming_errors(f"cannot make the folder {folder}", folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def creating(file: Path, *, mode: int) -> Iterator[BinaryIO]:
    """Open a new file. It gets its name at the end of the block, unless the block raises.

    Raises:
        FileExistsError: there is a file of this name, which stays as it is.
        OSError: the file cannot be written.
    """
    with _draft(file, mode) as (draft, opened):
        yield opened
        _store(opened)
        os.link(draft, file)


@contextmanager
def replacing(file: Path, *, mode: int) -> Iterator[BinaryIO]:
    """Open a file that takes the place of the one that has its name, if any, at the end of the block.

    Raises:
        OSError: the file cannot be written. The earlier one stays as it is then, and also if the block raises.
    """
    with _draft(file, mode) as (draft, opened):
        yield opened
        _store(opened)
        os.replace(draft, file)
    if os.name == "posix":  # else a crash of the system may bring back the earlier file
        directory = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def remove_drafts(directory: Path, names: re.Pattern[str]) -> None:
    """Remove what killed processes left of files with such names. What a process is writing now stays.

    Raises:
        OSError: the directory cannot be read, or a draft cannot be removed.
    """
    for entry in directory.iterdir():
        found = _DRAFT.fullmatch(entry.name)
        if found and names.fullmatch(found[1]) and not _is_being_written(entry):
            entry.unlink(missing_ok=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing and stays, until the end of the block.

    Raises:
        BusyError: another process holds it.
        ControlError: the file cannot be opened.
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        yield
        return
    with naming_errors(f"cannot open {file}", file, ControlError):
        # The file is never removed: a process that has it open would lock another file than one that comes later.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            # The kernel frees the lock when the process ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another process uses the folder {file.parent}: it holds {file.name}") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _draft(file: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            _lock(opened.fileno())
            yield draft, opened
    finally:
        draft.unlink(missing_ok=True)


def _store(opened: BinaryIO) -> None:
    opened.flush()
    os.fsync(opened.fileno())
    if os.name != "posix":
        opened.close()  # such systems do not rename an open file


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or the process ends. Return whether this is the only lock.

    A file system without locks has the only effect that drafts of killed processes stay there.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_being_written(draft: Path) -> bool:
    try:
        descriptor = os.open(draft, os.O_RDONLY)
    except FileNotFoundError:
        return True  # until a moment ago
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def check_readable(file: Path, what: str) -> None:
    """Raise ConfigError if a file of the user is not there, or cannot be read; ``what`` is its name in the message."""
    with naming_errors(f"cannot read the {what} {file}", file), file.open("rb") as opened:
        opened.read(1)  # a folder can be opened on some systems


def read_text(file: Path, what: str, *, max_bytes: int) -> str:
    """Return the text of a file of the user.

    Args:
        what: the name of the file in messages, such as ``"run file"``.

    Raises:
        ConfigError: the file cannot be read, is too long, or is no UTF-8; the message names it.
    """
    with naming_errors(f"cannot read the {what} {file}", file), file.open("rb") as opened:
        data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigError(f"{file} is no {what}: it has more than {max_bytes} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no {what}: it is not text") from None
