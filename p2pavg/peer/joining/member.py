"""A program's peer in a run: its configuration, by what its user was given, and the peer itself."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from p2pavg.base.errors import BootstrapError, BusyError, ConfigError
from p2pavg.base.files import locked
from p2pavg.base.formats import count
from p2pavg.base.limits import HOLD_OFF_SECONDS, MAX_BACKOFF_SECONDS
from p2pavg.net.addresses import is_circuit, parse_peer_address
from p2pavg.net.gate.client import GateSigner, GateTransport, open_gate_transport
from p2pavg.net.gate.messages import MAX_GATE_BYTES, TellNotice, TellUpdate
from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.nat.reach.options import EVERYWHERE, LOOPBACK, way_out
from p2pavg.net.nat.reach.watcher import machine_hosts
from p2pavg.peer.joining.carrying import carrying_job
from p2pavg.peer.joining.finding import join
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer, PeerOptions, check_openness, open_peer_or_asker, peer_over
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import NewestNotice
from p2pavg.runs.membership.run_file import PeerFiles, RunFile, read_access, read_run_file
from p2pavg.runs.membership.tokens import SCHEME
from p2pavg.runs.records.identity import load_seed
from p2pavg.runs.records.invitations import PROTOCOL, Delegate, Invitations
from p2pavg.runs.records.notices import NoticeSpreading, releases_of
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.telemetry.events import AnyEvent, UpdateTaken
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)

REMEMBER_SECONDS = 300.0


# The peers that a peer knew when it last ran, and through which it joins the network again.


@asynccontextmanager
async def remembering(peer: Peer, home: Home | None) -> AsyncIterator[None]:
    """Note the peers that answer, now and then and at the end of the block; do nothing without a folder."""
    if home is None:
        yield
        return
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_remember_now_and_then, peer, home)
            yield
            nursery.cancel_scope.cancel()
    finally:
        _remember(peer, home)


async def _remember_now_and_then(peer: Peer, home: Home) -> None:
    while True:
        await trio.sleep(REMEMBER_SECONDS)
        _remember(peer, home)


def _remember(peer: Peer, home: Home) -> None:
    """Note the peers that answer now: the next start can join through them if all bootstrap addresses are dead."""
    addresses = [address for contact in peer.records.contacts for address in contact.addresses[:2]]
    if not addresses:
        return
    try:
        home.remember(addresses)
    except OSError as error:
        logger.warning("cannot note the peers of the network in %s: %s", home.folder, error.strerror)


async def join_again(peer: Peer, addresses: Sequence[str]) -> None:
    """Join the network through peers that were known at the last start, as soon as one of them or another is there.

    For a daemon from which others bootstrap: it may be the first one that starts after all were stopped, so it waits
    for no other peer.
    """
    pause = HOLD_OFF_SECONDS
    while not peer.records.contacts:
        try:
            await peer.join(addresses)
        except BootstrapError as error:
            logger.debug("none of the peers of the last start is there: %s", error)
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)
        else:
            logger.info("joined the network again: %s answered", count(len(peer.records.contacts), "peer"))


# A delegate that is online: it serves the links by which other peers join its run.


def open_delegate(run_file: Path, certificate: Path, identity: Path) -> Delegate:
    """Read a delegate's files.

    Raises:
        ConfigError, IdentityError: a file cannot be read, the certificate is for another peer, or it does not have the
            role ``delegate``.
    """
    run = read_run_file(run_file)
    seed = load_seed(identity)
    membership = Membership(read_access(run, certificate), Ed25519Signer(seed).peer_id)
    return Delegate(run, membership, seed, identity.with_name(f"{identity.name}.used"))


@asynccontextmanager
async def serving_links(peer: Peer, delegate: Delegate | None) -> AsyncIterator[None]:
    """Admit peers by links until the end of the block; do nothing without a delegate.

    Raises:
        ConfigError: the file of used links cannot be read or is damaged; the message names it.
    """
    if delegate is None:
        yield
        return
    context = peer.context
    access = delegate.membership.access
    # A delegate that was revoked hears of it here, and serves no more links.
    revocations = peer.registry.revocations(access)
    delegate = replace(delegate, membership=Membership(access, peer.id, revocations.known))
    with closing(RunRecords(peer.records, delegate.membership, context.wall_clock)) as records:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revocations.run, records)
            invitations = Invitations(
                delegate, wall_clock=context.wall_clock, run_in_thread=context.run_in_thread
            )
            context.transport.serve(PROTOCOL, invitations.serve)
            logger.info("serving invitation links of the run %r", delegate.run.run_id)
            yield
            nursery.cancel_scope.cancel()


def join_run(
    what: str | os.PathLike[str], *, home: str | os.PathLike[str] | None = None, **settings: Any
) -> AveragingConfig:
    """Return the configuration of this machine's peer in a run that has an authority.

    :func:`p2pavg.blocking.open_averager` then needs nothing else: identity, port and bootstrap addresses come from the
    peer's folder. The peer of the folder that ``p2pavg run create`` has made also admits others by links, as long as
    its averager is open.

    Args:
        what: the folder or the invitation link that ``p2pavg run create`` has printed; or the path of a run file, if
            this peer's certificate is beside it or in its folder. A link is used at the first start, for which the peer
            that made it must be online: it brings the run file and a certificate, which later starts find.
        home: this peer's folder, if it is not ``~/.local/share/p2pavg/NAME``. Peers of one machine need one each.
        settings: of this peer, which replace those of the run file, such as ``bandwidth`` or ``name``.

    Raises:
        ConfigError, IdentityError: a file cannot be read or made, or a setting is out of range; the message names it.
        InvitationError: the peer that made the link did not admit this one.
        UnreachableError: the peer that made the link could not be reached within 20 s.
    """
    text = os.fspath(what)
    if not text.startswith(SCHEME) and not os.path.exists(text):
        raise ConfigError(
            f"there is no folder or run file {text!r}, and it is no invitation link, which begins with {SCHEME}",
            remedy="make a run with `p2pavg run create NAME`; it prints what to give to each machine",
        )
    files = join(text, link=None, certificate=None, identity=None, home=None if home is None else Path(home))
    return AveragingConfig.from_run(
        files.run_file, certificate=files.certificate, **(settings | {"files": files})
    )


@asynccontextmanager
async def open_peer_of(
    config: AveragingConfig, listen: Sequence[str] | None, options: PeerOptions
) -> AsyncIterator[Peer]:
    """Open a peer for an averager with this configuration; the other arguments are those of ``open_averager``.

    Raises:
        ConfigError: an address leads out of this machine, and ``config`` has neither ``access`` nor ``open_run``.
        BusyError: another process is the peer of the folder.
    """
    if config.files is not None and config.files.gate is not None:
        async with _open_peer_behind(config.files.gate, config.files, config) as peer:
            yield peer
        return
    if config.files is not None:
        async with _open_peer_in(config.files, config, listen, options) as peer:
            yield peer
        return
    if listen is None:
        listen = LOOPBACK if config.access is None and not config.open_run else EVERYWHERE
    # Before the peer opens: not even for a moment does it listen to others, or dial them.
    check_openness(config, way_out(listen, options.bootstrap, options.announce))
    async with open_peer_or_asker(listen, options) as peer:
        yield peer


@asynccontextmanager
async def _open_peer_behind(gate: Path, files: PeerFiles, config: AveragingConfig) -> AsyncIterator[Peer]:
    """Open a peer whose network and key another process has, behind a gate."""
    assert config.access is not None
    run, home = read_run_file(files.run_file), Home(files.folder)
    async with open_gate_transport(gate) as transport:
        with closing(await trio.to_thread.run_sync(GateSigner, gate, transport.peer_id)) as signer:
            others = [each for each in run.bootstrap if not each.endswith(f"/p2p/{transport.peer_id}")]
            async with (
                peer_over(transport, signer, bootstrap=others) as peer,
                carrying_job(peer, home, run, config.access),
                _telling_of_releases(peer, transport, run, config.access),
            ):
                token = trio.lowlevel.current_trio_token()

                def tell(event: AnyEvent) -> None:
                    # In the thread of the training loop; the peer may have ended since.
                    if isinstance(event, UpdateTaken) and len(event.certificate) <= MAX_GATE_BYTES // 2:
                        # The metric for which a person cares most.
                        metric, value = min(
                            event.metrics.items(),
                            key=lambda each: ("loss" not in each[0], each[0]),
                            default=("", 0.0),
                        )
                        told = TellUpdate(event.epoch, event.certificate, metric[:64], value)
                        with suppress(trio.RunFinishedError):
                            token.run_sync_soon(transport.tell, told)

                with peer.events.subscribe(tell):
                    yield peer


@asynccontextmanager
async def _telling_of_releases(
    peer: Peer, transport: GateTransport, run: RunFile, access: RunAccess
) -> AsyncIterator[None]:
    """Spread the newest release of a run's job, and tell the process behind the gate of it, which fetches the job."""
    if run.release is None:
        yield
        return
    known = NewestNotice(run.release)
    known.changed.append(lambda: transport.tell(TellNotice(known.newest.encode())))
    membership = Membership(access, peer.id, peer.registry.revocations(access).known)
    with closing(RunRecords(peer.records, membership, peer.context.wall_clock)) as records:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(NoticeSpreading(releases_of(run), known, first=1).run, records)
            yield
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _open_peer_in(
    files: PeerFiles, config: AveragingConfig, listen: Sequence[str] | None, options: PeerOptions
) -> AsyncIterator[Peer]:
    """Open the peer of a folder, which remembers other peers and admits new ones if its certificate lets it."""
    assert config.access is not None
    home, run = Home(files.folder), read_run_file(files.run_file)
    own = home.addresses
    others = [each for each in run.bootstrap if not each.endswith(f"/p2p/{config.access.peer_id}")]
    delegate = None
    if Role.DELEGATE in config.access.roles:
        delegate = open_delegate(files.run_file, files.certificate, files.identity)
    named = [*options.bootstrap, *others]
    remembered = home.remembered
    options = replace(
        options,
        bootstrap=list(dict.fromkeys([*named, *remembered])) if named else (),
        identity=files.identity if options.identity is None else options.identity,
        announce=options.announce or forwarded(own, machine_hosts()),
    )
    with _one_process(home):
        if listen is None:
            # Links and others' run files have this peer's address: another port would be of no use to them.
            listen = listens_for(own, home.port) if own and home.port else home.listen_again(EVERYWHERE)
        async with (
            open_peer_or_asker(listen, options) as peer,
            remembering(peer, home),
            serving_links(peer, delegate),
            carrying_job(peer, home, run, config.access),
            trio.open_nursery() as nursery,
        ):
            if remembered and not named:
                nursery.start_soon(join_again, peer, remembered)
            yield peer
            nursery.cancel_scope.cancel()


def listens_for(own: Sequence[str], port: int) -> list[str]:
    """Return where a peer listens so that others reach it at its own addresses, through a forwarded port or without."""
    if not way_out(LOOPBACK, own, ()):
        return [f"/ip4/127.0.0.1/tcp/{port}"]
    six = any(address.startswith("/ip6/") for address in own)
    return [f"/ip4/0.0.0.0/tcp/{port}", *([f"/ip6/::/tcp/{port}"] if six else [])]


def forwarded(own: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return the addresses that a router forwards: public ones that no interface of this machine has.

    Private ones are not announced without a check: the machine may have been moved to another network since.

    Args:
        hosts: the IP addresses of this machine.
    """
    found = []
    for text in own:
        address, _ = parse_peer_address(text)
        first = next(iter(address.protocols()))
        host = str(address.value_for_protocol(first.code))
        if (
            not is_circuit(text)
            and first.name in ("ip4", "ip6")
            and not is_private(host)
            and host not in hosts
        ):
            found.append(text.rpartition("/p2p/")[0])
    return found


@contextmanager
def _one_process(home: Home) -> Iterator[None]:
    """Hold the folder. Two processes with one identity would never meet, and other peers would confuse them."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(home.lock))
        except BusyError:
            raise BusyError(
                f"another process is the peer of the folder {home.folder}",
                remedy="give each process a link and a folder of its own: p2pavg.join_run(LINK, home=FOLDER)",
            ) from None
        yield
