"""A peer's key file: 32 bytes of an Ed25519 private key, readable by its owner only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from p2pavg.errors import IdentityError

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
        return _load(file)
    except FileNotFoundError:
        return _make(file)
    except OSError as error:
        raise IdentityError(f"cannot read the identity {file}: {error.strerror}") from None


def _load(file: Path) -> bytes:
    with file.open("rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        # Windows has no such mode bits; there the user's folder keeps other users out.
        if os.name == "posix" and mode & 0o077:
            raise IdentityError(f"others can read the identity {file} (mode {mode:04o}); chmod 600 it")
        seed = opened.read(SEED_BYTES + 1)
    if len(seed) != SEED_BYTES:
        raise IdentityError(f"{file} is not an identity: it does not have {SEED_BYTES} bytes")
    return seed


def _make(file: Path) -> bytes:
    """Create the key file.

    It is linked into place when complete, so that no process reads half a key. If two processes create one at the same
    time, both use the first.
    """
    seed = secrets.token_bytes(SEED_BYTES)
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(seed)
                opened.flush()
                os.fsync(opened.fileno())
            os.link(draft, file)
        finally:
            draft.unlink()
    except FileExistsError:
        try:
            return _load(file)
        except OSError as error:  # e.g. a dangling symbolic link
            raise IdentityError(f"cannot read the identity {file}: {error.strerror}") from None
    except OSError as error:
        raise IdentityError(f"cannot make the identity {file}: {error.strerror}") from None
    return seed
