"""The files of a run in words. No I/O, no clock, no random source."""

from __future__ import annotations

import math

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.formats import in_bytes
from p2pavg.base.limits import CLOCK_SKEW_SECONDS, DAY_SECONDS
from p2pavg.group.aggregation import resolve_rule
from p2pavg.group.strategy import read_table
from p2pavg.runs.membership.armour import parse_ledger, read_armour
from p2pavg.runs.membership.certificate import (
    Certificate,
    MemberCertificateError,
    date_of,
    is_genuine,
    read_certificate,
)
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.runs.membership.revocation import RevocationList, authority_of, read_revocations
from p2pavg.runs.membership.run_file import RunFile, parse_run_file


def describe(text: str, *, now: float, show_secret: bool = False) -> list[str]:
    """Return lines that say what a run file, a certificate, a ledger or a list of revoked certificates says.

    Args:
        now: wall clock, seconds.
        show_secret: true to show the secret of a run file.

    Raises:
        ConfigError: the text is no such file, or its signature is forged.
    """
    if any("=" in line.strip().rstrip("=") for line in text.splitlines() if not line.startswith("#")):
        return of_run_file(parse_run_file(text), show_secret=show_secret)
    certificates = _certificates(text)
    if not certificates:
        return of_revocations(_revocations(text))
    for certificate in certificates:
        if not is_genuine(certificate):
            raise ConfigError(f"the certificate of {certificate.peer_id} is forged")
    return [line for certificate in certificates for line in of_certificate(certificate, now=now)]


def of_run_file(run: RunFile, *, show_secret: bool = False) -> list[str]:
    """Return what a run file says."""
    weight = "no limit" if run.max_weight is None else f"{run.max_weight:g} samples a contribution"
    rule = resolve_rule(run.robust)
    norm = "no limit" if run.max_norm is None else f"{run.max_norm:g} times the median norm of the group"
    return [
        f"run file of the run {run.run_id!r}",
        f"  authority    {run.authority.hex()}",
        f"  secret       {run.secret.hex() if show_secret else 'hidden; --secret shows it'}",
        f"  groups       {run.group_size} members; {run.min_group_size} are enough after {run.match_timeout:g} s",
        f"  exchange     fails after {run.exchange_timeout:g} s",
        f"  compression  {run.compression}",
        f"  max weight   {weight}",
        f"  robust       {'no rule: the weighted mean' if rule is None else rule.text}",
        f"  max norm     {norm}",
        f"  audits       {run.audit}",
        f"  topology     {run.topology}",
        *([f"  strategy     {read_table(run.strategy)['kind']}"] if run.strategy else []),
        *(["  job          " + _of_job(run.release)] if run.release else []),
        *(f"  bootstrap    {address}" for address in run.bootstrap or ("no address",)),
    ]


def _of_job(release: JobRelease) -> str:
    since = f", since update {release.since}" if release.since else ""
    return f"version {release.number}{since}, {in_bytes(release.size)}, root {release.root.hex()}"


def of_certificate(certificate: Certificate, *, now: float) -> list[str]:
    """Return what a certificate says. Its signatures were checked before."""
    issuer = certificate.issuer
    return [
        f"certificate of {certificate.peer_id}",
        f"  authority    {certificate.authority.hex()}",
        f"  signed by    {'the authority' if issuer is None else f'the delegate {issuer.peer_id}'}",
        f"  roles        {', '.join(sorted(certificate.roles))}",
        f"  max weight   {certificate.max_weight:g} samples a contribution",
        f"  valid from   {date_of(certificate.not_before)}",
        f"  valid until  {date_of(certificate.expires)}: {_validity(certificate, now)}",
        f"  identifier   {certificate.identifier.hex()}",
    ]


def of_revocations(revocations: RevocationList) -> list[str]:
    """Return what a list of revoked certificates says."""
    return [
        f"list of revoked certificates, number {revocations.number}",
        f"  authority    {revocations.authority.hex()}",
        *(f"  revoked      {each.hex()}" for each in sorted(revocations.identifiers)),
        *(["  revoked      no certificate"] if not revocations.identifiers else []),
    ]


def _validity(certificate: Certificate, now: float) -> str:
    if now >= certificate.expires:
        return "expired"
    if now < certificate.not_before - CLOCK_SKEW_SECONDS:
        return "it has not begun"
    days = math.floor((certificate.expires - now) / DAY_SECONDS)
    return f"{days} days left" if days > 1 else f"{(certificate.expires - now) / 3600:.1f} hours left"


def _certificates(text: str) -> list[Certificate]:
    """Return one certificate, or those of a ledger, which has one a line; none if the text is something else."""
    try:
        return [read_certificate(read_armour(text))]
    except (MemberCertificateError, ConfigError):  # or it is a ledger
        pass
    try:
        return parse_ledger(text)
    except ConfigError:
        return []


def _revocations(text: str) -> RevocationList:
    try:
        data = read_armour(text)
        return read_revocations(data, authority_of(data))
    except (ConfigError, RemoteProtocolError) as error:
        raise ConfigError(
            f"it is no run file, certificate or list of revoked certificates that p2pavg reads: {error}"
        ) from None
