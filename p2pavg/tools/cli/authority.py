"""The work of a run's authority, behind ``p2pavg run``: its key, certificates, and the list of revoked ones.

The authority keeps four files in one folder: ``NAME.key``, ``NAME.run``, ``NAME.issued`` (the ledger of its
certificates) and ``NAME.revoked``. Each function returns the lines that the command prints.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.base.errors import BusyError, ConfigError, ControlError
from p2pavg.base.files import PRIVATE, PUBLIC, create_file, keep_file, locked, naming_errors, read_text
from p2pavg.base.limits import DAY_SECONDS
from p2pavg.net.addresses import parse_peer_address
from p2pavg.runs.membership.armour import (
    COMMENT,
    certificate_text,
    identifiers_of,
    ledger_line,
    parse_ledger,
    revocations_text,
    still_revoked,
)
from p2pavg.runs.membership.certificate import (
    SERIAL_BYTES,
    Certificate,
    MemberCertificateError,
    Role,
    date_of,
    is_genuine,
    issue,
)
from p2pavg.runs.membership.job_release import sign_release
from p2pavg.runs.membership.membership import SECRET_BYTES
from p2pavg.runs.membership.revocation import no_revocations
from p2pavg.runs.membership.revocation import revoke as sign_revocations
from p2pavg.runs.membership.run_file import (
    RunFile,
    read_certificate_file,
    read_revocations_file,
    read_run_file,
)
from p2pavg.runs.membership.words import describe
from p2pavg.runs.records.identity import load_seed, make_seed
from p2pavg_dht import PeerIdError, public_key_of

logger = logging.getLogger(__name__)

MAX_DAYS = 36500.0
MAX_LEDGER_BYTES = 64 * 1024 * 1024  # 70,000 certificates
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IDENTIFIER = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True)
class Authority:
    """A run's authority: the run file, and the key beside which its other files are."""

    run: RunFile
    key_file: Path
    key: Ed25519PrivateKey

    @property
    def ledger_file(self) -> Path:
        """The file of all certificates."""
        return self.key_file.with_suffix(".issued")

    @property
    def revoked_file(self) -> Path:
        """The file of the newest list of revoked certificates."""
        return self.key_file.with_suffix(".revoked")


def open_authority(run_file: Path, key_file: Path | None) -> Authority:
    """Read an authority's files.

    Args:
        key_file: ``None`` for the file beside the run file, with the same name and ``.key``.

    Raises:
        ConfigError, IdentityError: a file cannot be read, or the key is of another run.
    """
    run = read_run_file(run_file)
    key_file = run_file.with_suffix(".key") if key_file is None else key_file
    key = Ed25519PrivateKey.from_private_bytes(load_seed(key_file, what="authority's key"))
    # With another key, every certificate would be signed in vain: members know this authority only.
    if key.public_key().public_bytes_raw() != run.authority:
        raise ConfigError(f"{key_file} is not the key of the authority that {run_file} names")
    return Authority(run, key_file, key)


def create(
    name: str,
    directory: Path,
    bootstrap: Sequence[str],
    settings: dict[str, Any],
    job: tuple[bytes, int] | None = None,
) -> None:
    """Make an authority's key and the run file.

    Args:
        job: root and size of the file of the job that the run trains.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"NAME must be 1 to 64 letters, digits, dots, dashes and underscores, got {name!r}: "
            "it is the name of the run and of its files"
        )
    # All that can be wrong is checked before the first file is made.
    for address in bootstrap:
        parse_peer_address(address)
    # With a key of zeros: settings that are out of range leave no files behind.
    draft = RunFile(
        run_id=name,
        authority=bytes(32),
        secret=secrets.token_bytes(SECRET_BYTES),
        bootstrap=tuple(bootstrap),
        **settings,
    )
    key_file, run_file = directory / f"{name}.key", directory / f"{name}.run"
    # The key first: the run file names its public half.
    key = Ed25519PrivateKey.from_private_bytes(make_seed(key_file, what="authority's key"))
    public = key.public_key().public_bytes_raw()
    signed = ""
    if job is not None:
        signed = sign_release(
            key.sign, authority=public, run_id=name, number=1, root=job[0], size=job[1]
        ).text
    try:
        write_new(run_file, replace(draft, authority=public, job=signed).text, mode=PRIVATE)
    except ConfigError:
        key_file.unlink()  # made a moment ago, and of no run
        raise


def rotate(run_file: Path, output: Path) -> list[str]:
    """Write a run file with a new secret. The authority and all certificates stay valid."""
    run = replace(read_run_file(run_file), secret=secrets.token_bytes(SECRET_BYTES))
    write_new(output, run.text, mode=PRIVATE)
    return [
        f"made {output}: the run {run.run_id!r} with a new secret. Certificates stay valid.",
        "Give it to the members that stay, and let them start again with it: peers with the new secret do not meet",
        "peers with the old one.",
    ]


def invite(
    authority: Authority,
    peer_id: str,
    *,
    roles: Sequence[str],
    max_weight: float,
    days: float,
    output: Path | None,
    delegate: bool = False,
) -> list[str]:
    """Sign a peer's certificate.

    Args:
        delegate: true if the peer may sign certificates with these roles itself.
    """
    now = time.time()
    try:
        certificate = issue(
            authority.key.sign,
            authority=authority.run.authority,
            peer_id=peer_id,
            roles=[*parse_roles(roles), *([Role.DELEGATE] if delegate else [])],
            max_weight=max_weight,
            not_before=now,
            expires=now + seconds_of(days),
            serial=secrets.token_bytes(SERIAL_BYTES),
        )
    except MemberCertificateError as error:
        raise ConfigError(str(error)) from None
    file = authority.key_file.with_name(f"{peer_id}.cert") if output is None else output
    # Before the ledger is changed: a certificate that could not be written would stand there for ever.
    refuse_to_overwrite(file)
    # The ledger before the file: a peer's certificates are revoked by its id, and only the ledger knows them all.
    _add_to_ledger(authority, [certificate])
    write_new(file, certificate_text(certificate), mode=PUBLIC)
    granted = ", ".join(sorted(certificate.roles))
    return [
        f"made {file}: {granted} until {date_of(certificate.expires)}, identifier {certificate.identifier.hex()}",
        "Next: send it to the peer with the run file. It joins with the identity file whose id you were given.",
    ]


def revoke(authority: Authority, named: Sequence[str], number: int | None) -> list[str]:
    """Add certificates to the list of revoked ones.

    Args:
        named: files of certificates, identifiers, and ids of peers.
        number: of the list; ``None`` for the next one.

    Raises:
        BusyError: another process is doing so.
        ConfigError: a name, number or file is wrong.
    """
    now = time.time()
    with _revoking(authority):
        ledger = _read_ledger(authority)
        before = no_revocations(authority.run.authority)
        if authority.revoked_file.exists():
            before = read_revocations_file(authority.revoked_file, authority.run.authority)
        if number is None:
            number = before.number + 1
        elif number <= before.number:
            # Members keep the list with the highest number, and would never take this one.
            raise ConfigError(f"--number must be above {before.number}, the number of the last list")
        added: set[bytes] = set()
        for text in named:
            identifiers, known = _identifiers_named(authority, text, ledger, now)
            added |= identifiers
            # The ledger may lack a certificate that is given as a file, and its expiries decide how long each stays
            # listed.
            _add_to_ledger(authority, [each for each in known if each not in ledger])
            ledger += known
        # Certificates that have expired admit no peer, so they give up their places in a list of limited size.
        identifiers = still_revoked(before.identifiers | added, ledger, now=now)
        try:
            revocations = sign_revocations(
                authority.key.sign, authority=authority.run.authority, number=number, identifiers=identifiers
            )
        except ValueError as error:
            raise ConfigError(f"{error}; make a new run file with a new authority") from None
        # As a whole or not at all: half a list would be refused by every member.
        keep_file(authority.revoked_file, revocations_text(revocations).encode(), mode=PUBLIC)
    return [
        f"made {authority.revoked_file}: list number {number}, certificates in it: {len(identifiers)}",
        *(f"  revoked {each.hex()}" for each in sorted(added)),
        "Members refuse these peers from the moment at which they have the list.",
    ]


@contextmanager
def _revoking(authority: Authority) -> Iterator[None]:
    """Keep other commands from making a list. Of two lists with one number, each would lack what is in the other."""
    with ExitStack() as stack:
        try:
            # The list itself is replaced each time; a lock of it would end with the first list.
            stack.enter_context(locked(authority.ledger_file.resolve()))
        except BusyError:
            raise BusyError(
                f"another process is writing {authority.revoked_file}",
                remedy="run the command again when that process has ended",
            ) from None
        except ControlError as error:
            raise ConfigError(f"{error}: the command locks it while it makes the list") from None
        except OSError as error:  # a file system without locks
            logger.debug("%s cannot be locked: %s", authority.ledger_file, error)
        yield


def _identifiers_named(
    authority: Authority, text: str, ledger: Sequence[Certificate], now: float
) -> tuple[frozenset[bytes], list[Certificate]]:
    """Return the identifiers that an argument of ``revoke`` names, and the certificate if the argument is its file."""
    # A file comes first: its name may look like an identifier or a peer id.
    if os.path.exists(text):
        certificate = read_certificate_file(text)
        if certificate.authority != authority.run.authority or not is_genuine(certificate):
            raise ConfigError(f"{text}: this run's authority has not signed it, so it cannot be revoked")
        if certificate.expires <= now:
            raise ConfigError(
                f"{text}: it expired on {date_of(certificate.expires)} and admits no peer any more"
            )
        return frozenset([certificate.identifier]), [certificate]
    if _IDENTIFIER.fullmatch(text):
        return frozenset([bytes.fromhex(text)]), []
    try:
        # Only to tell a peer id from a misspelt file name.
        public_key_of(text)
    except PeerIdError:
        raise ConfigError(
            f"{text!r} is no file of a certificate, no identifier of 32 hexadecimal digits, and no peer id"
        ) from None
    identifiers = identifiers_of(text, ledger, now=now)
    if not identifiers:
        raise ConfigError(
            f"{authority.ledger_file} has no valid certificate of {text}; give the certificate's file or identifier"
        )
    return identifiers, []


def show(file: Path, *, show_secret: bool) -> list[str]:
    """Return what a file of a run says."""
    text = read_text(file, "file of a run", max_bytes=MAX_LEDGER_BYTES)
    try:
        return describe(text, now=time.time(), show_secret=show_secret)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_roles(names: Sequence[str]) -> list[Role]:
    """Return the roles of these names. Raise ConfigError for others, and for ``delegate``."""
    granted = [role for role in Role if role is not Role.DELEGATE]
    for name in names:
        if name not in granted:
            hint = "; p2pavg run delegate makes delegates" if name == Role.DELEGATE else ""
            raise ConfigError(f"--role must be one of {', '.join(granted)}, got {name!r}{hint}")
    return [Role(name) for name in names]


def seconds_of(days: float, option: str = "--days") -> float:
    """Return days in seconds. Raise ConfigError if they are out of range."""
    if not 0 < days <= MAX_DAYS:
        raise ConfigError(f"{option} must be above 0 and at most {MAX_DAYS:g}, got {days:g}")
    return days * DAY_SECONDS


def refuse_to_overwrite(file: Path) -> None:
    """Raise ConfigError if there is a file of this name."""
    if file.exists():
        raise ConfigError(f"{file} exists and is never overwritten; move it away, or choose another name")


def write_new(file: Path, text: str, *, mode: int) -> None:
    """Write a file that does not exist yet. Raise ConfigError if it exists or cannot be written."""
    with naming_errors(f"cannot write {file}", file):
        try:
            create_file(file, text.encode("utf-8"), mode=mode)
        except FileExistsError:
            refuse_to_overwrite(file)
            raise ConfigError(f"{file} is a link to a missing file; remove it") from None


def _read_ledger(authority: Authority) -> list[Certificate]:
    file = authority.ledger_file
    if not file.exists():
        return []
    text = read_text(file, "ledger", max_bytes=MAX_LEDGER_BYTES)
    try:
        return parse_ledger(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _add_to_ledger(authority: Authority, certificates: Sequence[Certificate]) -> None:
    """Append certificates. Two commands at once both append whole lines."""
    if not certificates:
        return
    file = authority.ledger_file
    lines = "".join(map(ledger_line, certificates)).encode("ascii")
    with naming_errors(f"cannot write the ledger {file}", file):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(lines if os.fstat(descriptor).st_size else COMMENT.encode("ascii") + lines)
            opened.flush()
            # On disk before the certificate exists: it could not be found again otherwise.
            os.fsync(descriptor)
