"""The work of ``p2pavg run create``: a run in one folder, and a link for each further machine.

The folder has the authority's key, the run file, and this machine's identity with a certificate that lets it admit
others. A program that opens ``p2pavg.join_run(FOLDER)`` needs nothing else, and answers the links while it runs.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.base.files import PUBLIC, keep_file, make_folder, read_text
from p2pavg.base.hosts import is_loopback
from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.group.topology import BUTTERFLY, resolve_topology
from p2pavg.net.addresses import parse_peer_address
from p2pavg.peer.joining.finding import files_in
from p2pavg.peer.joining.home import Home
from p2pavg.peer.joining.member import open_delegate
from p2pavg.runs.membership.certificate import SERIAL_BYTES, MemberCertificateError, Role, read_certificate
from p2pavg.runs.membership.tokens import InvitationLink, Token, certify, make_token, token_key
from p2pavg.runs.records.identity import make_seed
from p2pavg.runs.records.invitations import Delegate
from p2pavg.tools.cli.authority import (
    create,
    invite,
    open_authority,
    parse_roles,
    refuse_to_overwrite,
    seconds_of,
)
from p2pavg.tools.jobs.folder import read_job
from p2pavg_dht import Ed25519Signer

# Invitation links, behind `p2pavg run link`.

MAX_LINKS = 1000


def delegate_of(run: Path, certificate: Path | None, identity: Path | None) -> Delegate:
    """Read the files of a delegate, given its folder, or a run file with a certificate and an identity."""
    if run.is_dir():
        files = files_in(run, certificate=certificate, identity=identity)
        return open_delegate(files.run_file, files.certificate, files.identity)
    if certificate is None or identity is None:
        raise ConfigError(f"--certificate FILE and --identity FILE are needed: {run} is no folder of a peer")
    return open_delegate(run, certificate, identity)


def make_links(
    delegate: Delegate,
    *,
    address: str | None,
    count: int,
    days: float,
    certificate_days: float | None,
    roles: Sequence[str],
    max_weight: float | None,
) -> list[str]:
    """Return links of a delegate, each for one peer.

    Args:
        address: of the delegate; ``None``: the one that its folder has.
        days: for which the links can be used.
        certificate_days: for which the certificates are valid from now; ``None``: as long as the delegate's own one.
        roles: that a link grants; empty: all that the delegate may grant.
        max_weight: ``None``: as much as the delegate may grant.
    """
    now = time.time()
    own = read_certificate(delegate.membership.access.certificate)
    if (wrong := delegate.membership.own_refusal(now)) is not None:
        raise ConfigError(f"this delegate admits no peer: {wrong}")
    if address is None:
        addresses = Home(delegate.used_file.parent).addresses
        if not addresses:
            raise ConfigError(
                "--address ADDR is needed: the delegate's folder does not have the file of its addresses"
            )
        address = addresses[0]
    _, named = parse_peer_address(address)
    if named != own.peer_id:
        raise ConfigError(f"--address must be an address of the delegate, and end in /p2p/{own.peer_id}")
    if not 0 < count <= MAX_LINKS:
        raise ConfigError(f"--count must be from 1 to {MAX_LINKS}, got {count}")
    granted = frozenset(parse_roles(roles)) or own.roles - {Role.DELEGATE}
    ends = own.expires
    if certificate_days is not None:
        ends = min(ends, now + seconds_of(certificate_days, "--certificate-days"))
    expires = min(now + seconds_of(days), ends)
    key = token_key(delegate.seed, delegate.run.authority)
    links = []
    for _ in range(count):
        token = Token(
            serial=secrets.token_bytes(SERIAL_BYTES),
            roles=granted,
            max_weight=own.max_weight if max_weight is None else max_weight,
            begins=now,
            expires=expires,
            certificate_expires=ends,
        )
        try:  # what the delegate may not grant is a mistake now, not when the link is used
            certify(token, own.peer_id, own, Ed25519Signer(delegate.seed).sign)
        except MemberCertificateError as error:
            raise ConfigError(f"the link cannot be made: {error}") from None
        links.append(InvitationLink(address, make_token(key, token)).text)
    return links


CERTIFICATE_DAYS = 365.0
"""Days for which the certificates of a run are valid that `p2pavg run create` makes. A run that trains is shorter."""
_GIVEN = (Role.CONTRIBUTOR, Role.AUXILIARY)
_FAR = ("192.0.2.1", 9)  # of no machine (RFC 5737); no packet is sent


def create_run(
    name: str,
    directory: Path | None,
    bootstrap: Sequence[str],
    settings: dict[str, Any],
    *,
    address: str | None,
    count: int,
    days: float,
    job: Path | None = None,
) -> list[str]:
    """Make a run and its folder. Return the lines to print. If anything fails, no file of it stays.

    Args:
        directory: the folder; ``None``: one of the run's name in the current folder.
        bootstrap: addresses of peers that are usually online, besides this one.
        address: where others reach this machine, as ``HOST``, ``HOST:PORT`` or ``/ip4/HOST/tcp/PORT``.
        count: number of links, each for one peer.
        days: for which the links can be used.
        job: the job's file that the run trains; ``None``: each member has its own program.
    """
    folder = Path(name) if directory is None else directory
    home = Home(folder)
    key_file, run_file, certificate = (folder / f"{name}{end}" for end in (".key", ".run", ".cert"))
    files = [key_file, run_file, certificate, home.identity]
    files += [folder / each for each in (f"{name}.issued", "port", "addresses")]
    released = None
    if job is not None:
        job_data, root = read_job(job)
        released = (root, len(job_data))
        files.append(home.job(root))
    for file in files:
        refuse_to_overwrite(file)
    is_new = not folder.exists()
    made: list[Path] = []
    try:
        home.make()
        # Of two calls at once, one fails here: the files are the other one's, and stay.
        peer_id = Ed25519Signer(make_seed(home.identity, what="identity")).peer_id
        made = files
        host, port = _host_and_port(address)
        port = port or _free_port()
        own = f"{host}/tcp/{port}/p2p/{peer_id}"
        try:
            parse_peer_address(own)
        except AddressError:
            raise _no_address(str(address)) from None
        home.keep_port(port)
        home.keep_address(own)
        create(name, folder, bootstrap, settings, released)
        if released is not None:
            # The members that join by a link get it from this one.
            make_folder(home.job(released[0]).parent)
            keep_file(home.job(released[0]), job_data, mode=PUBLIC)
        invite(
            open_authority(run_file, None),
            peer_id,
            roles=[*_GIVEN, Role.SOURCE],
            max_weight=settings.get("max_weight") or MAX_WEIGHT,
            days=CERTIFICATE_DAYS,
            output=certificate,
            delegate=True,
        )
        links = make_links(
            open_delegate(run_file, certificate, home.identity),
            address=own,
            count=count,
            days=days,
            certificate_days=None,
            roles=_GIVEN,
            max_weight=None,
        )
    except BaseException:
        for file in made:
            file.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # it was not made, or another call has files in it
                if job is not None:
                    (folder / "jobs").rmdir()
                folder.rmdir()
        raise
    return _lines(name, folder, links, own, days, has_job=job is not None)


def settings_with(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings of a run file with a strategy, and with its rule of combining contributions and its topology.

    Raises:
        ConfigError: the file cannot be read or is no strategy, or the settings have others.
    """
    # Here, since the optimizers that it imports take half a second, and few runs have a strategy.
    from p2pavg.strategies import DataParallel, Federated, read_json, read_toml
    from p2pavg.strategies.reading import MAX_TOML_CHARS

    text = read_text(file, "strategy", max_bytes=MAX_TOML_CHARS)
    try:
        strategy = read_json(text) if file.suffix == ".json" else read_toml(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    found = {**settings, "strategy": strategy.json}
    if isinstance(strategy, DataParallel | Federated):
        rule = strategy.robust
        if settings["robust"] not in (None, rule):
            raise ConfigError(
                f"robust is {settings['robust']!r}, and the strategy's is {rule!r}: leave --robust out"
            )
        found["robust"] = rule
        if resolve_topology(settings["topology"]).text not in (BUTTERFLY.text, strategy.topology):
            raise ConfigError(
                f"topology is {settings['topology']!r}, and the strategy's is {strategy.topology!r}: leave --topology"
                " out"
            )
        found["topology"] = strategy.topology
    return found


def _lines(
    name: str, folder: Path, links: Sequence[str], own: str, days: float, *, has_job: bool
) -> list[str]:
    program = "p2pavg join" if has_job else "python train.py"
    where = own.partition("/p2p/")[0]
    only_here = where.split("/")[1] in ("ip4", "ip6") and is_loopback(where.split("/")[2])
    several = len(links) > 1
    return [
        f"made the run {name!r} in the folder {folder}: it holds the keys of the run, so show it to no one",
        "",
        "On this machine:",
        f"  {program} {folder}",
        f"On {'other machines, one line each' if several else 'the second machine'}, while that program runs:",
        *(f"  {program} {link}" for link in links),
        "",
        "Each asks its user before it runs the job; --only-help averages and relays, and runs nothing."
        if has_job
        else "train.py is your program: it opens p2pavg.join_run(sys.argv[1]).",
        f"Each link admits one peer, within {days:g} days. Until then it is a secret: send it over a private channel.",
        f"It leads to {where}"
        + (
            ", so it works on this machine only."
            if only_here
            else ", which the other machine must be able to dial."
        )
        + " --address names another address.",
        f"More links: p2pavg run link {folder} --count N",
    ]


def _host_and_port(address: str | None) -> tuple[str, int]:
    """Return the first part of a multiaddress, and the port; 0 if none is named.

    Raises:
        ConfigError: the text is no address.
    """
    if address is None:
        return f"/ip4/{_usual_host()}", 0
    if address.startswith("/"):
        start, _, port = address.rpartition("/tcp/")
        if not start or not port.isdecimal():
            raise _no_address(address)
        return start, int(port)
    host, colon, text = address.rpartition(":")
    if (
        not colon or "]" in text or (":" in host and not host.startswith("["))
    ):  # an IPv6 address without a port
        host, text = address, "0"
    host = host.strip("[]")
    if not text.isdecimal() or int(text) > 65535:
        raise _no_address(address)
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}", int(text)
    except ValueError:
        return f"/dns/{host}", int(text)


def _no_address(text: str) -> ConfigError:
    return ConfigError(
        f"--address must be HOST, HOST:PORT or an address such as /ip4/203.0.113.7/tcp/4001, got {text!r}"
    )


def _usual_host() -> str:
    """Return the address of the interface through which this machine reaches others; 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        try:
            opened.connect(_FAR)
        except OSError:  # no route to other machines
            return "127.0.0.1"
        return str(opened.getsockname()[0])


def _free_port() -> int:
    with closing(socket.create_server(("", 0))) as opened:
        return int(opened.getsockname()[1])
