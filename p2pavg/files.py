"""Files that have their whole content or do not exist, also if the process is killed while it writes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2pavg.errors import ConfigError

PRIVATE = 0o600
PUBLIC = 0o644


def create_file(file: Path, data: bytes, *, mode: int) -> None:
    """Create a file. It is linked into place when it is complete.

    Raises:
        FileExistsError: there is a file of this name, which stays as it is.
        OSError: the file cannot be written.
    """
    with _draft(file, data, mode) as draft:
        os.link(draft, file)


def replace_file(file: Path, data: bytes, *, mode: int) -> None:
    """Write a file in place of the one that has its name, if any.

    Raises:
        OSError: the file cannot be written; the earlier one stays as it is.
    """
    with _draft(file, data, mode) as draft:
        os.replace(draft, file)
    if os.name == "posix":  # else a crash of the system may bring back the earlier file
        directory = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _draft(file: Path, data: bytes, mode: int) -> Iterator[Path]:
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def read_text(file: Path, what: str, *, max_bytes: int) -> str:
    """Return the text of a file of the user.

    Args:
        what: the name of the file in messages, such as ``"run file"``.

    Raises:
        ConfigError: the file cannot be read, is too long, or is no UTF-8; the message names it.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {file}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{file} is no {what}: it has more than {max_bytes} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no {what}: it is not text") from None
