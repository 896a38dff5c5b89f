"""Key file, run file and certificate. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2pavg.base.limits import CLOCK_SKEW_SECONDS
from p2pavg.runs.membership.certificate import EXPIRES_SOON_SECONDS, Certificate, date_of, is_genuine
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.tools.doctor.findings import Finding, fault, not_known, note, ok, warning

SEED_BYTES = 32
_ASK = (
    "ask the run's operator for a new one: `p2pavg run invite` with the id that `p2pavg identity FILE` prints"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """A key file as it was found."""

    path: str
    error: str = ""
    """The reason for which it cannot be read; empty if it could."""
    missing: bool = False
    mode: int = 0o600
    """Permission bits; 0o600 where the system has none."""
    size: int = SEED_BYTES
    """Bytes; counted up to one more than a key has."""
    peer_id: str | None = None
    """Id of the key; ``None`` if the file holds none."""


def judge_key_file(found: KeyFile | None, *, needed: bool) -> list[Finding]:
    """Judge the key file.

    Args:
        found: ``None`` if the user named none.
        needed: true if a certificate was named, which is for one identity.
    """
    path = "" if found is None else found.path
    what = cause = remedy = ""
    if found is None:
        if not needed:
            return [note("key file", "none was named", "the identity is new at every start")]
        what = "no key file was named"
        cause = "a certificate is for one identity, and without a key file it is new at every start"
        remedy = "add --identity FILE"
    elif found.missing:
        what = f"{path} does not exist"
        if not needed:
            return [note("key file", what, "the first start of the peer makes it")]
        cause = "the certificate is for the identity of an existing key file"
        remedy = "name the file for whose id the certificate was made"
    elif found.error:
        what, cause = f"{path} cannot be read", found.error
        remedy = "name the key file with --identity, and give its owner the right to read it"
    elif found.mode & 0o077:
        what, remedy = f"others can read {path}", f"chmod 600 {path}"
        cause = f"its mode is {found.mode:04o}, and a peer refuses a key that others can read"
    elif found.size != SEED_BYTES:
        size = f"more than {SEED_BYTES}" if found.size > SEED_BYTES else f"{found.size}"
        what, cause = f"{path} is no key file", f"it has {size} bytes, and a key has {SEED_BYTES}"
        remedy = "name the right file, or remove this one and let `p2pavg identity FILE` make a key"
    else:
        return [ok("key file", f"{path}: {found.peer_id}")]
    return [fault("key file", what, cause, remedy)]


def judge_run_file(run: RunFile | None, error: str) -> list[Finding]:
    """Judge the run file.

    Args:
        run: ``None`` if it cannot be read, or if the user named none.
        error: the reason for which it cannot be read; empty if it could.
    """
    if run is None:
        remedy = "ask the run's operator for the file again"
        return [fault("run file", "the run file cannot be used", error, remedy)] if error else []
    what = f"run {run.run_id!r}, authority {run.authority.hex()[:16]}…"
    if not run.bootstrap:
        return [note("run file", what, "it names no bootstrap address; add --bootstrap ADDR")]
    return [ok("run file", what)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCertificate:
    """The certificate that the user named."""

    path: str
    error: str = ""
    """The reason for which it cannot be read; empty if it could."""
    certificate: Certificate | None = None


def judge_certificate(
    shown: NamedCertificate | None,
    run: RunFile | None,
    peer_id: str | None,
    now: float,
    revoked: Collection[bytes] | None,
) -> list[Finding]:
    """Judge this peer's certificate, in the order in which other members check it.

    Args:
        shown: ``None`` if the user named none.
        run: the run; ``None`` if its file cannot be read, or if the user named none.
        peer_id: id of the key file; ``None`` if there is no key.
        now: wall clock, seconds, corrected by what other peers say.
        revoked: identifiers in the newest list of the run; ``None`` if no list could be looked for.
    """
    if run is None:
        return []
    if shown is None:
        cause = "this run admits peers with a certificate of its authority only"
        return [fault("certificate", "no certificate was named", cause, f"add --certificate FILE; {_ASK}")]
    if shown.certificate is None:
        return [fault("certificate", f"{shown.path} is no certificate", shown.error, _ASK)]
    certificate = shown.certificate
    if wrong := _wrong(certificate, run, peer_id, now, revoked or ()):
        return [fault("certificate", *wrong)]
    granted = ", ".join(sorted(certificate.roles))
    found = [ok("certificate", f"{granted}, valid until {date_of(certificate.expires)}")]
    if peer_id is None:
        found.append(not_known("certificate", "without a readable key file, its peer is not compared"))
    if revoked is None:
        found.append(not_known("certificate", "no member was reached, so revoked certificates are not known"))
    if certificate.expires - now < EXPIRES_SOON_SECONDS:
        hours = (certificate.expires - now) / 3600
        what = f"it expires in {hours:.0f} hours"
        found[0] = warning("certificate", what, f"it is valid until {date_of(certificate.expires)}", _ASK)
    return found


def _wrong(
    certificate: Certificate, run: RunFile, peer_id: str | None, now: float, revoked: Collection[bytes]
) -> tuple[str, str, str] | None:
    """Return why other members refuse a certificate: the fault, its cause and its remedy."""
    # Is it of this run?
    if certificate.authority != run.authority:
        cause = (
            f"its authority is {certificate.authority.hex()[:16]}…, "
            f"and that of the run file is {run.authority.hex()[:16]}…"
        )
        return "it is of another run", cause, f"name the right pair of files, or {_ASK}"
    if not is_genuine(certificate):
        return "it is forged", "its signature is not that of the run's authority", _ASK
    # Is it this peer's?
    if peer_id is not None and certificate.peer_id != peer_id:
        cause = f"it is for {certificate.peer_id}, and the key file is that of {peer_id}"
        remedy = "name the key file for which it was made, or ask for a certificate for this id"
        return "it is for another peer", cause, remedy
    # Is it on the list, or the one of its delegate?
    for identifier in certificate.identifiers:
        if identifier in revoked:
            whose = "it" if identifier == certificate.identifier else "the certificate of its delegate"
            cause = f"the authority has revoked the certificate {identifier.hex()}"
            return f"{whose} was revoked", cause, _ASK
    # Is it valid now?
    if now >= certificate.expires:
        return "it has expired", f"it was valid until {date_of(certificate.expires)}", _ASK
    if now < certificate.not_before - CLOCK_SKEW_SECONDS:
        remedy = "wait until then; if this machine's clock is behind, set it"
        return "it is not valid yet", f"it begins on {date_of(certificate.not_before)}", remedy
    return None
