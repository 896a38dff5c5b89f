"""The standalone peer behind ``p2pavg peer``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import trio

from p2pavg.attached import SharedPeer, share_peer
from p2pavg.attached.serving import FINISH_SECONDS
from p2pavg.base.errors import ConfigError
from p2pavg.base.threads.exceptions import bare_exceptions
from p2pavg.base.threads.workers import be_nice
from p2pavg.cli.invitation import open_delegate
from p2pavg.group.topology import Hierarchical
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.joining.home import Home
from p2pavg.peer.peer import Peer, open_peer
from p2pavg.records.identity import load_seed
from p2pavg.records.revocations import Revocations
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.files import read_access, read_run_file
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.invitations import PROTOCOL as INVITE_PROTOCOL
from p2pavg.runs.records.invitations import Delegate, Invitations
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.tools.cli.metrics import serving_metrics
from p2pavg.tools.cli.monitor import check_monitor, serving_monitor
from p2pavg.tools.daemon.life import DaemonProcess, Part, join_again
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunMember:
    """This peer in a run that has an authority."""

    run: RunFile
    access: RunAccess
    delegate: Delegate | None
    """Set if the peer serves invitation links."""

    @property
    def helps(self) -> str | None:
        """Id of the run whose rounds this peer helps; ``None`` if its certificate does not say so."""
        return self.run.run_id if Role.AUXILIARY in self.access.roles else None

    @property
    def other_addresses(self) -> list[str]:
        """The run file's addresses of other peers. This peer may itself be one that others bootstrap from."""
        own = f"/p2p/{self.access.peer_id}"
        return [address for address in self.run.bootstrap if not address.endswith(own)]


def open_home(folder: Path | None) -> Home | None:
    """Make the folder of a daemon if its user names one."""
    if folder is None:
        return None
    home = Home(folder)
    home.make()
    return home


def open_run(
    run_file: Path | None,
    *,
    certificate: Path | None,
    identity: Path | None,
    run_id: str | None,
    delegate: bool,
) -> RunMember | None:
    """Read the files of a run that has an authority; return ``None`` without ``run_file``.

    Raises:
        ConfigError, IdentityError: the options do not fit together, or a file cannot be read or is for another peer.
    """
    if run_file is None:
        for option, given in (("--certificate", certificate is not None), ("--delegate", delegate)):
            if given:
                raise ConfigError(f"{option} needs --run FILE.run")
        return None
    if run_id is not None:
        raise ConfigError("--run and --run-id exclude each other: the run file has the run's id")
    if certificate is None or identity is None:
        raise ConfigError(
            "--run needs --certificate FILE and --identity FILE, for which the certificate was made"
        )
    run = read_run_file(run_file)
    access = read_access(run, certificate)
    if delegate:
        return RunMember(run, access, open_delegate(run_file, certificate, identity))
    Membership(
        access, Ed25519Signer(load_seed(identity)).peer_id
    )  # raises if the certificate is for another peer
    return RunMember(run, access, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """The options of a daemon, as the commands ``p2pavg peer`` and ``p2pavg join`` have read them."""

    listen: Sequence[str]
    bootstrap: Sequence[str]
    identity: str | os.PathLike[str] | None
    run_id: str | None
    """Id of the run without an authority that this peer helps, if any."""
    announce: Sequence[str] = ()
    """Like ``port_mapping`` and ``relay_mbps``, see :func:`p2pavg.open_peer`."""
    port_mapping: bool = True
    relay_mbps: float = DEFAULT_RELAY_MBPS
    member: RunMember | None = None
    """This peer in a run that has an authority. It joins the network through the run file's addresses too."""
    bandwidth: float | None = None
    """Like the two limits, in Mbit/s; see :func:`p2pavg.peer.auxiliary.assist`."""
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    site: str = ""
    """Name of this peer's site, for attached processes; see :class:`p2pavg.Hierarchical`."""
    home: Home | None = None
    """Folder with its control socket, its port, and the peers that it knew."""
    attach: str | os.PathLike[str] | None = None
    """Path of a Unix socket at which training processes can attach to the peer. It helps no run then."""
    metrics: int | None = None
    """Port of 127.0.0.1 at which the metrics are served; ``None``: they are not."""
    monitor: int | None = None
    """Port of 127.0.0.1 at which a page shows the run; ``None``: it is not shown."""
    live_view: bool = False
    """Show what this machine gives on the terminal, in place of the log."""

    def check(self) -> None:
        """Check what can be checked before anything is opened.

        Raises:
            ConfigError: no averager could have this run id, bandwidth or limit, or there is no run to show.
        """
        check_monitor(self.monitor, self.part.run_id or None)
        # The arguments are checked even without a run id: a limit that is out of range is a mistake either way.
        AveragingConfig(
            run_id="none" if self.run_id is None else self.run_id,
            bandwidth=self.bandwidth,
            max_upload_mbps=self.max_upload_mbps,
            max_download_mbps=self.max_download_mbps,
        )
        Hierarchical(self.site)
        if self.site and self.attach is None:
            raise ConfigError(
                "site needs attach: a peer that helps a run, or only keeps its records, has no contribution of its own"
            )

    @property
    def access(self) -> RunAccess | None:
        """This peer's certificate in a run that has an authority."""
        return None if self.member is None else self.member.access

    @property
    def part(self) -> Part:
        """This peer's part in a run."""
        return Part(
            run_id=(self.run_id or "") if self.member is None else self.member.run.run_id,
            access=self.access,
        )

    @property
    def named(self) -> list[str]:
        """The addresses that its user and the run file name."""
        return [*self.bootstrap, *(() if self.member is None else self.member.other_addresses)]

    @property
    def helps(self) -> str | None:
        """Id of the run whose rounds this peer helps, if any."""
        return self.run_id if self.member is None else self.member.helps


def run_peer(options: DaemonOptions) -> None:
    """Run a peer until SIGINT or SIGTERM; print the address that other peers bootstrap from.

    A round that this peer helps is finished first, and so are those of attached processes. SIGHUP does the same, and
    then starts the process again, which reads all files anew.

    Raises:
        ConfigError: see :meth:`DaemonOptions.check`.
        P2PAvgError: what :func:`p2pavg.open_peer` raises.
    """
    options.check()

    if options.attach is not None:
        be_nice()  # the processes that train on this machine have priority; later threads inherit it

    async def main() -> bool:
        life = DaemonProcess(options.part, options.home)
        with bare_exceptions():
            async with life.alive():
                await _live(options, life)
        return life.restarts

    if trio.run(main):
        start_again()


async def _live(options: DaemonOptions, life: DaemonProcess) -> None:
    """Open the peer and all that it serves, and close them when it is told to leave."""
    home, part, named = options.home, options.part, options.named
    remembered = [] if home is None else home.remembered
    accesses = {} if options.access is None else {part.run_id: options.access}
    async with (
        open_peer(
            listen=options.listen if home is None else home.listen_again(options.listen),
            bootstrap=_once([*named, *remembered]) if named else (),
            identity=options.identity,
            announce=options.announce,
            port_mapping=options.port_mapping,
            relay_mbps=options.relay_mbps,
        ) as peer,
        nullcontext()
        if options.attach is None
        else share_peer(peer, options.attach, accesses=accesses, site=options.site) as shared,
        life.began(peer),
        serving_metrics(peer, options.metrics, [part.run_id] if part.run_id else []),
        serving_monitor(peer, options.monitor, part.run_id or None, options.access),
        _showing(life, options.live_view),
        trio.open_nursery() as nursery,
    ):
        if remembered and not named:
            nursery.start_soon(join_again, peer, remembered)
        if options.member is not None and options.member.delegate is not None:
            _serve_invitations(peer, options.member.run.run_id, options.member.delegate, nursery)
        for address in peer.addresses[1:]:
            logger.info("also reachable at %s", address)
        print(peer.addresses[0] if peer.addresses else peer.id, flush=True)
        await _help(options, peer, life)
        await life.told_to_leave()
        if shared is not None:
            await _finish(shared)
        nursery.cancel_scope.cancel()


def _serve_invitations(peer: Peer, run_id: str, delegate: Delegate, nursery: trio.Nursery) -> None:
    context = peer.context
    # A delegate that was revoked hears of it here, and serves no more links.
    records = RunRecords(peer.records, delegate.membership, context.wall_clock)
    nursery.start_soon(Revocations(records, delegate.membership, run_id).run)
    invitations = Invitations(delegate, wall_clock=context.wall_clock, run_in_thread=context.run_in_thread)
    context.transport.serve(INVITE_PROTOCOL, invitations.serve)
    logger.info("serving invitation links of the run %r", run_id)


async def _help(options: DaemonOptions, peer: Peer, life: DaemonProcess) -> None:
    """Help a run's rounds until told to leave, if this peer is to help any."""
    if options.helps is None:
        if options.member is not None and options.attach is None:
            logger.info("keeping records only: the certificate does not grant the role auxiliary")
        return
    if options.attach is not None:
        # In one run, a peer is one member of a group: its processes contribute, so it is no auxiliary.
        logger.info("not helping the run %r: the attached processes take part in it", options.helps)
        return
    await assist(
        peer,
        options.helps,
        bandwidth=options.bandwidth,
        max_upload_mbps=options.max_upload_mbps,
        max_download_mbps=options.max_download_mbps,
        access=options.access,
        helping=life.helping,
    )


async def _finish(shared: SharedPeer) -> None:
    """End the rounds of attached processes, as far as they end in time."""
    if shared.is_exchanging:
        logger.info("finishing the rounds of attached processes, for %.0f s at most", FINISH_SECONDS)
    if not await shared.finish():
        logger.warning("left a round of attached processes that had not ended after %.0f s", FINISH_SECONDS)


def _showing(life: DaemonProcess, live_view: bool) -> AbstractAsyncContextManager[None]:
    if not live_view:
        return nullcontext()
    from rich.console import Console

    from p2pavg.tools.daemon.view import showing

    return showing(Console(), life.status, life.run_statuses)


def start_again() -> None:
    """Replace this process by a new one with the same arguments, which reads all files again."""
    logger.info("starting again, with the files as they are now")
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own arguments are among them, such as -m.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _once(addresses: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(addresses))
