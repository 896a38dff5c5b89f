"""Facts of this peer's files: key file, run file and certificate."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.run_file import RunFile, read_certificate_file, read_run_file
from p2pavg.tools.doctor.rules.files import SEED_BYTES, KeyFile, NamedCertificate
from p2pavg_dht import Ed25519Signer


def key_file(path: Path) -> KeyFile:
    """Return the key file as it is. It is never made here."""
    try:
        with path.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            seed = opened.read(SEED_BYTES + 1)
    except FileNotFoundError:
        return KeyFile(path=str(path), missing=True)
    except OSError as error:
        return KeyFile(path=str(path), error=error.strerror or str(error))
    return KeyFile(
        path=str(path),
        mode=mode if os.name == "posix" else 0o600,
        size=len(seed),
        peer_id=Ed25519Signer(seed).peer_id if len(seed) == SEED_BYTES else None,
    )


def run_file(path: Path | None) -> tuple[RunFile | None, str]:
    """Return the run, and the reason for which its file cannot be read; empty if it can, or if there is none."""
    if path is None:
        return None, ""
    try:
        return read_run_file(path), ""
    except ConfigError as error:
        return None, str(error)


def certificate(path: Path | None) -> NamedCertificate | None:
    """Return the certificate as it is; ``None`` without a path. Nothing of it is checked here."""
    if path is None:
        return None
    try:
        return NamedCertificate(path=str(path), certificate=read_certificate_file(path))
    except ConfigError as error:
        return NamedCertificate(path=str(path), error=str(error).removeprefix(f"{path}: "))
