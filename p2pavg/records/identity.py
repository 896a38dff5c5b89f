"""A key file: 32 bytes of an Ed25519 private key, readable by its owner only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from p2pavg.base.errors import IdentityError
from p2pavg.base.files import PRIVATE, create_file

SEED_BYTES = 32


def load_or_make_seed(path: str | os.PathLike[str] | None) -> bytes:
    """Return the private key in ``path``, which is created when missing; a fresh key for ``None``.

    Raises:
        IdentityError: the file cannot be read or written, is readable by others, or holds no key.
    """
    if path is None:
        return secrets.token_bytes(SEED_BYTES)
    file = Path(path)
    try:
        return _load(file, "identity")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise IdentityError(f"cannot read the identity {file}: {error.strerror}") from None
    try:
        return _make(file)
    except FileExistsError:  # two processes create one at the same time, and both use the first
        return load_seed(file)
    except OSError as error:
        raise IdentityError(f"cannot make the identity {file}: {error.strerror}") from None


def load_seed(path: str | os.PathLike[str], *, what: str = "identity") -> bytes:
    """Return the private key in ``path``.

    Args:
        what: the name of the file in messages.

    Raises:
        IdentityError: the file is missing, cannot be read, is readable by others, or holds no key.
    """
    try:
        return _load(Path(path), what)
    except OSError as error:  # for example a dangling symbolic link
        raise IdentityError(f"cannot read the {what} {path}: {error.strerror}") from None


def make_seed(path: str | os.PathLike[str], *, what: str) -> bytes:
    """Create ``path`` with a fresh private key, and return the key.

    Args:
        what: the name of the file in messages.

    Raises:
        IdentityError: there is such a file, which stays as it is, or it cannot be written.
    """
    try:
        return _make(Path(path))
    except OSError as error:
        raise IdentityError(f"cannot make the {what} {path}: {error.strerror}") from None


def _load(file: Path, what: str) -> bytes:
    with file.open("rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        # Windows has no such mode bits; there the user's folder keeps other users out.
        if os.name == "posix" and mode & 0o077:
            raise IdentityError(f"others can read the {what} {file} (mode {mode:04o}); chmod 600 it")
        seed = opened.read(SEED_BYTES + 1)
    if len(seed) != SEED_BYTES:
        article = "an" if what[0] in "aeiou" else "a"
        raise IdentityError(f"{file} is not {article} {what}: it does not have {SEED_BYTES} bytes")
    return seed


def _make(file: Path) -> bytes:
    seed = secrets.token_bytes(SEED_BYTES)
    create_file(file, seed, mode=PRIVATE)
    return seed
