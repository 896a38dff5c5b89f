"""Reads the files of a run that has an authority. Errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import read_text
from p2pavg.runs.membership.armour import MAX_TEXT_CHARS, parse_certificate, parse_revocations
from p2pavg.runs.membership.certificate import Certificate
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.membership.run_file import MAX_EDITED_BYTES, RunFile, parse_run_file


def read_run_file(path: str | os.PathLike[str]) -> RunFile:
    """Read a run file.

    Raises:
        ConfigError: the file cannot be read or is no run file; the message names the file and the key.
    """
    text = read_text(Path(path), "run file", max_bytes=MAX_EDITED_BYTES)
    with _naming(path):
        return parse_run_file(text)


def read_certificate_file(path: str | os.PathLike[str]) -> Certificate:
    """Read a certificate. Its signatures are not checked.

    Raises:
        ConfigError: the file cannot be read or is no certificate; the message names the file.
    """
    text = read_text(Path(path), "certificate", max_bytes=MAX_TEXT_CHARS)
    with _naming(path):
        return parse_certificate(text)


def read_revocations_file(path: str | os.PathLike[str], authority: bytes) -> RevocationList:
    """Read a list of revoked certificates and check its signature.

    Raises:
        ConfigError: the file cannot be read or is no list of this authority; the message names the file.
    """
    text = read_text(Path(path), "list of revoked certificates", max_bytes=MAX_TEXT_CHARS)
    with _naming(path):
        return parse_revocations(text, authority)


def read_access(run_file: RunFile, certificate: str | os.PathLike[str]) -> RunAccess:
    """Return the access of the peer whose certificate is in a file.

    Raises:
        ConfigError: the file cannot be read, or is no certificate of this run; the message names the file.
    """
    data = read_certificate_file(certificate).data
    with _naming(certificate):
        return RunAccess(authority=run_file.authority, secret=run_file.secret, certificate=data)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None
