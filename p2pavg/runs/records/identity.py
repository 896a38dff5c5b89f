"""A key file: 32 bytes of an Ed25519 private key, readable by its owner only."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from p2pavg.base.errors import IdentityError
from p2pavg.base.files import PRIVATE, create_file, naming_errors

logger = logging.getLogger(__name__)

SEED_BYTES = 32
_FOLDER_MODE = 0o700  # the owner of a key alone looks at what is beside it


def load_or_make_seed(path: str | os.PathLike[str] | None) -> bytes:
    """Return the private key in ``path``, which is created when missing, with its folder; a fresh key for ``None``.

    Raises:
        IdentityError: the file cannot be read or written, is readable by others, or holds no key.
    """
    if path is None:
        return secrets.token_bytes(SEED_BYTES)
    file = Path(path)
    with naming_errors(f"cannot read the identity {file}", file, IdentityError), suppress(FileNotFoundError):
        return _load(file, "identity")
    with naming_errors(f"cannot make the identity {file}", file, IdentityError):
        try:
            file.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            return _make(file)
        except FileExistsError:  # two processes create one at the same time, and both use the first
            return load_seed(file)


_locked: set[int] = set()
"""The descriptors of the locked key files."""


def _close_locked_after_fork() -> None:
    """Close a forked child's copies, e.g. of a worker of a DataLoader: it would keep the lock of its parent."""
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locked_after_fork)


@contextmanager
def identity_of_this_process(path: str | os.PathLike[str] | None) -> Iterator[bytes]:
    """Return the private key in ``path``, as :func:`load_or_make_seed` does; no other process of this machine has it.

    Two processes with one identity would replace each other's records, and take each other's streams.

    Raises:
        IdentityError: as :func:`load_or_make_seed`, or another process has the file.
    """
    seed = load_or_make_seed(path)
    if path is None or fcntl is None:
        yield seed
        return
    locked = os.open(path, os.O_RDONLY)
    _locked.add(locked)
    try:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IdentityError(
                f"another peer that runs on this machine has the identity {path}; each peer needs a file of its own",
                remedy="end the other peer, or give this one another file: p2pavg identity FILE",
            ) from None
        except OSError as error:  # a file system without locks
            logger.debug("the identity %s cannot be locked: %s", path, error)
        yield seed
    finally:
        if locked in _locked:  # not in a forked child, which has closed its copy
            _locked.remove(locked)
            with suppress(OSError):  # a file system without locks
                # Also for a child that has just been forked, and has a copy.
                fcntl.flock(locked, fcntl.LOCK_UN)
            os.close(locked)


def load_seed(path: str | os.PathLike[str], *, what: str = "identity") -> bytes:
    """Return the private key in ``path``.

    Args:
        what: the name of the file in messages.

    Raises:
        IdentityError: the file is missing, cannot be read, is readable by others, or holds no key.
    """
    # An error is, for example, a dangling symbolic link.
    with naming_errors(f"cannot read the {what} {os.fspath(path)}", path, IdentityError):
        return _load(Path(path), what)


def make_seed(path: str | os.PathLike[str], *, what: str) -> bytes:
    """Create ``path`` with a fresh private key, and return the key.

    Args:
        what: the name of the file in messages.

    Raises:
        IdentityError: there is such a file, which stays as it is, or it cannot be written.
    """
    with naming_errors(f"cannot make the {what} {os.fspath(path)}", path, IdentityError):
        return _make(Path(path))


def _load(file: Path, what: str) -> bytes:
    with file.open("rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        # Windows has no such mode bits; there the user's folder keeps other users out.
        if os.name == "posix" and mode & 0o077:
            raise IdentityError(
                f"others can read the {what} {file} (mode {mode:04o}); chmod 600 it",
                remedy=f"chmod 600 {file}; if another user may have read it, make a new one",
            )
        seed = opened.read(SEED_BYTES + 1)
    if len(seed) != SEED_BYTES:
        article = "an" if what[0] in "aeiou" else "a"
        raise IdentityError(
            f"{file} is not {article} {what}: it does not have {SEED_BYTES} bytes",
            remedy=f"name the file of the {what}, or restore it from a copy",
        )
    return seed


def _make(file: Path) -> bytes:
    seed = secrets.token_bytes(SEED_BYTES)
    create_file(file, seed, mode=PRIVATE)
    return seed
