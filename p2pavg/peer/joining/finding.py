"""Find or make the folder, the identity and the certificate with which a peer takes part in a run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import PRIVATE, PUBLIC, keep_file, naming_errors, read_text
from p2pavg.base.threads.trio_thread import TrioThread
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.nat.reach.options import ONLY_ASKS
from p2pavg.peer.joining.home import Home, data_folder, default_home
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import Certificate
from p2pavg.runs.membership.run_file import (
    MAX_BOOTSTRAP,
    PeerFiles,
    RunFile,
    read_certificate_file,
    read_run_file,
)
from p2pavg.runs.membership.tokens import SCHEME, InvitationLink, parse_link
from p2pavg.runs.records.identity import load_or_make_seed
from p2pavg.runs.records.invitations import redeem
from p2pavg_dht import Ed25519Signer

_LINK_FILE = "link"


def join(
    what: str, *, link: str | None, certificate: Path | None, identity: Path | None, home: Path | None
) -> PeerFiles:
    """Return the files of a peer of a run. What is missing is made, or fetched with an invitation link.

    Args:
        what: the run file's path; or an invitation link, which brings the run file; or a folder that
            ``p2pavg run create`` or an earlier link has made.
        link: invitation link for a peer that has the run file and no certificate yet.
        certificate: the peer's certificate; ``None`` looks for it in the folder, and beside the run file.
        identity: the peer's key file; ``None`` for the one in the folder, which is made at the first start.
        home: the folder; ``None`` for the run's folder in :func:`~p2pavg.peer.joining.home.data_folder`.

    Raises:
        ConfigError, IdentityError: a file cannot be read or made, or belongs to another run or peer; or there is no
            certificate, and no link. The message says what to do.
        InvitationError: the link's delegate did not admit this peer.
    """
    if what.startswith(SCHEME):
        if link is not None:
            raise ConfigError("give the invitation link once: in place of the run file, or with --link")
        return _join_by_link(parse_link(what), certificate, identity, home)
    if Path(what).is_dir():
        if link is not None:
            raise ConfigError(f"the folder {what} has a certificate: leave out --link")
        return files_in(Path(what), certificate=certificate, identity=identity)
    run_file = Path(what)
    run = read_run_file(run_file)
    place = Home(default_home(run.run_id) if home is None else home)
    place.make()
    _refuse_another_run(place, run)
    key = place.identity if identity is None else identity
    peer_id = Ed25519Signer(load_or_make_seed(key)).peer_id
    if certificate is None:
        certificate = _certificate_of(place, run_file, run, peer_id)
    if certificate is None:
        if link is None:
            raise _no_certificate(run, run_file, peer_id, place)
        brought, signed = _redeem_now(parse_link(link), load_or_make_seed(key))
        # Only the delegate's answer tells which run a link is of.
        if brought.authority != run.authority:
            raise ConfigError(f"the invitation link is of another run than {run_file}")
        certificate = _keep(place, run, signed)
    return PeerFiles(place.folder, run_file, certificate, key)


def files_in(folder: Path, *, certificate: Path | None = None, identity: Path | None = None) -> PeerFiles:
    """Return the files of the peer whose folder it is.

    Raises:
        ConfigError: there is no run file, or more than one.
    """
    # With two run files, it would be a guess which run this peer is of.
    found = sorted(folder.glob("*.run"))
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        raise ConfigError(f"the folder {folder} must have one run file, NAME.run; it has {names}")
    place = Home(folder)
    return PeerFiles(
        folder,
        found[0],
        found[0].with_suffix(".cert") if certificate is None else certificate,
        place.identity if identity is None else identity,
    )


async def redeem_link(link: InvitationLink, seed: bytes) -> tuple[RunFile, Certificate]:
    """Ask the delegate of a link for the run file and a certificate.

    Raises:
        InvitationError: the delegate did not admit this peer, or did not answer.
    """
    # Imported here, because libp2p takes a while to import, and is needed for a link only.
    from p2pavg.net.libp2p.transport import open_libp2p_transport

    with bare_exceptions():
        # The newcomer only asks, so it neither listens nor announces an address.
        async with open_libp2p_transport(seed=seed, listen=[], options=ONLY_ASKS) as transport:
            return await redeem(transport, link, now=time.time())


def _redeem_now(link: InvitationLink, seed: bytes) -> tuple[RunFile, Certificate]:
    """Redeem a link in a thread of its own: the caller's may already run an event loop, as in a notebook."""

    async def live(give: Callable[[tuple[RunFile, Certificate]], None], stop: trio.Event) -> None:
        give(await redeem_link(link, seed))
        await stop.wait()

    thread = TrioThread(live, name="p2pavg-join")
    try:
        return thread.start()
    finally:
        thread.stop()


def _join_by_link(
    link: InvitationLink, certificate: Path | None, identity: Path | None, home: Path | None
) -> PeerFiles:
    """Redeem a link once; the next start with the same link finds the files of the first one."""
    if certificate is not None:
        raise ConfigError("--certificate needs a run file: an invitation link brings its own certificate")
    digest = hashlib.sha256(link.text.encode()).hexdigest()
    place = _home_of_link(digest, home)
    place.make()
    key = place.identity if identity is None else identity
    seed = load_or_make_seed(key)
    peer_id = Ed25519Signer(seed).peer_id
    # A program may be started with its link each time. The link is redeemed once.
    known = _files_of_link(place, digest)
    if known is not None and _is_valid_for(known[1], read_run_file(known[0]), peer_id):
        return PeerFiles(place.folder, *known, key)
    run, signed = _redeem_now(link, seed)
    _refuse_another_run(place, run)
    run_file = place.run_file(run.run_id)
    # The run file may name no address. The peer that made the link is one by which others join.
    addresses = tuple(dict.fromkeys((link.address, *run.bootstrap)))[:MAX_BOOTSTRAP]
    keep_file(run_file, replace(run, bootstrap=addresses).text.encode(), mode=PRIVATE)
    _keep(place, run, signed)
    # The note comes last, so that it never names files that are not there.
    keep_file(place.folder / _LINK_FILE, f"{digest} {run_file.name}\n".encode(), mode=PRIVATE)
    if home is None:
        # Only now is the run's name known. All files are there already: the link is used up, and a start that is cut
        # off here finds them at the next one.
        place, key = _move_to_run(place, run, key)
    return PeerFiles(place.folder, place.run_file(run.run_id), place.certificate(run.run_id), key)


def _home_of_link(digest: str, home: Path | None) -> Home:
    """Return the folder of a peer that joins by a link; without ``home``, a new one until the run's name is known."""
    if home is not None:
        return Home(home)
    try:
        folders = sorted(data_folder().iterdir())
    except OSError:
        folders = []
    for folder in folders:
        if _files_of_link(Home(folder), digest) is not None:
            return Home(folder)
    # The name follows from the link,
    # so that a start that was cut off before the delegate's answer finds its identity here again.
    return Home(data_folder() / f"joining-{digest[:16]}")


def _files_of_link(place: Home, digest: str) -> tuple[Path, Path] | None:
    """Return the run file and the certificate that a link has brought; ``None`` if it was not redeemed here."""
    file = place.folder / _LINK_FILE
    if not file.exists():
        return None
    noted, _, name = read_text(file, "note of a link", max_bytes=1024).strip().partition(" ")
    # Only files of this folder count, whatever the note says.
    run_file = place.folder / Path(name).name
    certificate = run_file.with_suffix(".cert")
    return (run_file, certificate) if noted == digest and run_file.exists() and certificate.exists() else None


def _move_to_run(place: Home, run: RunFile, key: Path) -> tuple[Home, Path]:
    """Give the folder of a newcomer the name of its run, if there is none of that name yet."""
    wanted = default_home(run.run_id)
    # Another peer of this user has its identity there. Two processes must not share one.
    if wanted.exists():
        raise ConfigError(
            f"this user has a peer of a run {run.run_id!r} on this machine already, in {wanted}; "
            f"start the new one with --home {place.folder}, where its certificate is"
        )
    with naming_errors(f"cannot make the folder {wanted}", wanted):
        place.folder.rename(wanted)
    moved = Home(wanted)
    return moved, moved.identity if key == place.identity else key


def _certificate_of(place: Home, run_file: Path, run: RunFile, peer_id: str) -> Path | None:
    """Return this peer's certificate that holds longest, from the folder or beside the run file."""
    candidates = (
        place.certificate(run.run_id),
        run_file.with_suffix(".cert"),
        run_file.with_name(f"{peer_id}.cert"),
        place.folder / f"{peer_id}.cert",
    )
    # Beside a run file there may be certificates of other peers, and earlier ones of this peer.
    valid = [file for file in dict.fromkeys(candidates) if _is_valid_for(file, run, peer_id)]
    return max(valid, key=lambda file: read_certificate_file(file).expires, default=None)


def _is_valid_for(file: Path, run: RunFile, peer_id: str) -> bool:
    """Return whether a file has a certificate of this run and peer that has not expired."""
    if not file.exists():
        return False
    found = read_certificate_file(file)
    return found.authority == run.authority and found.peer_id == peer_id and found.expires > time.time()


def _refuse_another_run(place: Home, run: RunFile) -> None:
    """Raise ConfigError if the folder has the certificate of another run of the same name."""
    file = place.certificate(run.run_id)
    if file.exists() and read_certificate_file(file).authority != run.authority:
        raise ConfigError(
            f"{file} is of another run with the name {run.run_id!r}; name another folder with --home"
        )


def _no_certificate(run: RunFile, run_file: Path, peer_id: str, place: Home) -> ConfigError:
    return ConfigError(
        f"this peer has no valid certificate of the run {run.run_id!r}. Its id is {peer_id}",
        remedy=f"send this id to the run's operator, who signs a certificate with `p2pavg run invite {run_file.name} "
        f"{peer_id} --role auxiliary ...`; put it at {place.certificate(run.run_id)} and start again. "
        "Or start with --link LINK",
    )


def _keep(place: Home, run: RunFile, signed: Certificate) -> Path:
    file = place.certificate(run.run_id)
    keep_file(file, certificate_text(signed).encode(), mode=PUBLIC)
    return file
