"""The standalone peer behind ``p2pavg peer``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.nat.reach.options import EVERYWHERE, LOOPBACK, MAKE_A_RUN, way_out
from p2pavg.net.nat.reach.watcher import machine_hosts
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.joining.carrying import carrying_job
from p2pavg.peer.joining.home import Home
from p2pavg.peer.joining.member import forwarded, join_again, listens_for, open_delegate, serving_links
from p2pavg.peer.peer import Peer, PeerOptions, open_peer_or_asker
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.run_file import RunFile, read_access, read_run_file
from p2pavg.runs.records.identity import load_seed
from p2pavg.runs.records.invitations import Delegate
from p2pavg.tools.cli.options import DisplayOptions, NetworkOptions, ServiceOptions
from p2pavg.tools.cli.training import train
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.jobs.versions import TrainingOptions, tell
from p2pavg.tools.monitor.serving import MonitorOptions, check_installed, serve_run
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)


@asynccontextmanager
async def serving_metrics(peer: Peer, port: int, runs: Collection[str]) -> AsyncIterator[None]:
    """Serve the metrics of a peer on this machine as long as the block runs.

    Raises:
        ConfigError: ``prometheus-client`` is not installed.
        ListenError: the port is taken.
    """
    from p2pavg.metrics import PeerMetrics

    try:
        metrics = PeerMetrics(peer, runs)
    except ImportError as error:
        raise ConfigError(f"--metrics: {error}", remedy="pip install 'p2pavg[prometheus]'") from None
    try:
        logger.info("metrics are at http://127.0.0.1:%d/metrics", metrics.serve(port))
        yield
    finally:
        with trio.CancelScope(shield=True):  # half a second at most: the server looks so often for its end
            await trio.to_thread.run_sync(metrics.close)


@dataclass(frozen=True, slots=True)
class RunMember:
    """This peer in a run that has an authority."""

    run: RunFile
    access: RunAccess
    delegate: Delegate | None
    """Set if the peer serves invitation links."""


def read_member(
    run_file: Path | None,
    *,
    certificate: Path | None,
    identity: Path | None,
    run_id: str | None,
    delegate: bool,
    admits: bool = False,
) -> RunMember | None:
    """Read the files of a run that has an authority; return ``None`` without ``run_file``.

    Args:
        delegate: serve invitation links; it is an error if the certificate does not allow it.
        admits: serve them if the certificate allows it.

    Raises:
        ConfigError, IdentityError: the options do not fit together, or a file cannot be read or is for another peer.
    """
    # Options that need a run file are a mistake without one. To ignore them would start another peer than was
    # meant.
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
    if delegate or (Role.DELEGATE in access.roles and admits):
        return RunMember(run, access, open_delegate(run_file, certificate, identity))
    # Raises if the certificate is for another peer.
    Membership(access, Ed25519Signer(load_seed(identity)).peer_id)
    return RunMember(run, access, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """The options of a daemon, as the commands ``p2pavg peer`` and ``p2pavg join`` have read them."""

    network: NetworkOptions
    """Without an address to listen on: see :attr:`listens`."""
    service: ServiceOptions
    display: DisplayOptions
    identity: str | os.PathLike[str] | None
    run_id: str | None
    """Id of the run without an authority that this peer helps, if any."""
    open_run: bool = False
    """Let a peer without a certificate leave this machine: strangers take part in all that it does."""
    member: RunMember | None = None
    """This peer in a run that has an authority. It joins the network through the run file's addresses too."""
    home: Home | None = None
    """Folder with its control socket, its port, and the peers that it knew."""
    live_view: bool = False
    """Show what this machine gives on the terminal, in place of the log."""
    only_help: bool = True
    """Do not run the job of the run, if it has one."""
    agreed_jobs: tuple[str, ...] = ()
    """Roots of the jobs that run without a question, and no others run; empty: the user is asked."""
    without_fence: bool = False
    """Run it also where this machine has no fence."""
    files: Path | None = None
    """A folder that may have larger files of the job."""

    def check(self) -> None:
        """Check what can be checked before anything is opened.

        Raises:
            ConfigError: no averager could have this run id, bandwidth or limit, or there is no run to show, or none for
                ``name``; or the peer has neither a certificate nor ``open_run``, and an address leads out of this
                machine.
        """
        if self.display.monitor is not None:
            if not self.shown_run:
                raise ConfigError("--monitor needs --run-id ID or --run FILE.run: the run to show")
            check_installed()
        if self.training is None and self.agreed_jobs:
            raise ConfigError(
                "--job names a job, and this run has none, or --only-help is given: leave out --yes --job"
            )
        if self.files is not None and not self.files.is_dir():
            raise ConfigError(f"--files {self.files} is no folder")
        out = way_out(self.listens, self.named, self.service.announce)
        if self.open_run and self.member is not None:
            raise ConfigError("--open and --run exclude each other: a run with an authority has members")
        if out and self.member is None and not self.open_run:
            raise ConfigError(
                f"this peer has neither a run with an authority nor --open, so it stays on this machine, and {out}"
                " leads out of it",
                remedy=MAKE_A_RUN,
            )
        if self.service.name and not self.shown_run:
            raise ConfigError(
                "--name needs --run FILE.run or --run-id NAME: a peer publishes its name in a run"
            )
        # The arguments are checked even without a run id: a limit that is out of range is a mistake either way.
        AveragingConfig(
            run_id="none" if self.run_id is None else self.run_id,
            bandwidth=self.service.bandwidth,
            max_upload_mbps=self.service.max_upload_mbps,
            max_download_mbps=self.service.max_download_mbps,
            name=self.service.name,
        )

    @property
    def listens(self) -> Sequence[str]:
        """The addresses to listen on: unless the user names some, all for a member or an open peer, else loopback."""
        return self.network.listen or (EVERYWHERE if self.open_run or self.member is not None else LOOPBACK)

    @property
    def access(self) -> RunAccess | None:
        """This peer's certificate in a run that has an authority."""
        return None if self.member is None else self.member.access

    @property
    def shown_run(self) -> str:
        """Id of the run that this peer takes part in; empty if it only keeps records."""
        return (self.run_id or "") if self.member is None else self.member.run.run_id

    @property
    def named(self) -> list[str]:
        """The addresses of other peers that its user and the run file name."""
        if self.member is None:
            return list(self.network.bootstrap)
        # This peer may itself be one that others bootstrap from.
        own = f"/p2p/{self.member.access.peer_id}"
        others = [address for address in self.member.run.bootstrap if not address.endswith(own)]
        return [*self.network.bootstrap, *others]

    @property
    def helps(self) -> str | None:
        """Id of the run whose rounds this peer helps; ``None`` without one, or if its certificate does not say so."""
        if self.member is None:
            return self.run_id
        return self.member.run.run_id if Role.AUXILIARY in self.member.access.roles else None

    @property
    def training(self) -> TrainingOptions | None:
        """This peer's part in the training with the run's job; ``None``: it does not train."""
        release = None if self.member is None else self.member.run.release
        if release is None or self.only_help:
            return None
        return TrainingOptions(
            hashes=self.agreed_jobs,
            without_fence=self.without_fence,
            files=self.files,
            bandwidth=self.service.bandwidth,
            max_upload_mbps=self.service.max_upload_mbps,
            max_download_mbps=self.service.max_download_mbps,
        )


def run_peer(options: DaemonOptions) -> None:
    """Run a peer until SIGINT or SIGTERM; print the address that other peers bootstrap from.

    A round that this peer helps is finished first. SIGHUP does the same, and then starts the process again, which reads
    all files anew.

    Raises:
        ConfigError: see :meth:`DaemonOptions.check`.
        P2PAvgError: what :func:`p2pavg.open_peer` raises.
    """
    options.check()
    if options.open_run:
        logger.warning(
            "this peer is open: any peer that knows %s can take part, read averages and change them",
            "its address" if options.run_id is None else f"the run's name {options.run_id!r}",
        )

    async def main() -> bool:
        life = DaemonProcess(options.shown_run, options.access, options.home)
        with bare_exceptions():
            # The first of all: a signal that comes while the peer still joins ends it in order.
            async with life.alive():
                await _live(options, life)
        return life.restarts

    if not trio.run(main):
        return
    # After the end of the loop, every socket and file is closed, so that the new process can take the same port.
    logger.info("starting again, with the files as they are now")
    # `execv` ends this program without its usual end: what is still buffered would be lost.
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own arguments are among them, such as -m.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


async def _live(options: DaemonOptions, life: DaemonProcess) -> None:
    """Open the peer and all that it serves, and close them when it is told to leave."""
    home, run_id, member, training = options.home, options.shown_run, options.member, options.training
    named, remembered = options.named, [] if home is None else home.remembered
    how = PeerOptions(
        # Peers of the last start help if those that the user has named are gone. If the user names none, others
        # bootstrap from this peer, and it must not fail because none is there: it joins below.
        bootstrap=list(dict.fromkeys([*named, *remembered])) if named else (),
        identity=options.identity,
        announce=options.service.announce
        or ([] if home is None else forwarded(home.addresses, machine_hosts())),
        port_mapping=options.service.port_mapping,
        relay_mbps=options.service.relay_mbps,
    )
    async with AsyncExitStack() as stack:
        # In this order: everything that follows is closed before the peer that it uses.
        # The peer is in the job's process if there is one, and this one hands it the network.
        opened = open_peer_or_asker(_listens(options, home), how, only_asks=training is not None)
        peer = await stack.enter_async_context(opened)
        await stack.enter_async_context(life.began(peer))
        if options.display.metrics is not None:
            runs = [run_id] if run_id else []
            await stack.enter_async_context(serving_metrics(peer, options.display.metrics, runs))
        if options.display.monitor is not None:
            page = MonitorOptions(port=options.display.monitor)
            shown = serve_run(peer, run_id, page, access=options.access, daemon=life)
            await stack.enter_async_context(shown)
        if options.live_view and training is None:
            from rich.console import Console

            from p2pavg.tools.daemon.view import showing

            await stack.enter_async_context(showing(Console(), life))
        await stack.enter_async_context(serving_links(peer, None if member is None else member.delegate))
        if training is None and member is not None and home is not None:
            await stack.enter_async_context(carrying_job(peer, home, member.run, member.access))
        nursery = await stack.enter_async_context(trio.open_nursery())
        if remembered and not named:
            nursery.start_soon(join_again, peer, remembered)
        for address in peer.addresses[1:]:
            logger.info("also reachable at %s", address)
        # On standard output and alone, so that a script can read it. All else goes into the log.
        print(peer.addresses[0] if peer.addresses else peer.id, flush=True)
        if training is None:
            await _help(options, peer, life)
            # A peer that helps no run still keeps records for others, and relays.
            await life.leaving.wait()
        else:
            assert member is not None
            assert home is not None  # `p2pavg join` always has one
            end = await train(peer, home, member.run, member.access, training, life)
            if end.is_error:
                remedy = "tell the run's operator; `job.log` has the program's words"
                raise ConfigError(end.why, remedy=remedy)
            with trio.move_on_after(LOOK_SECONDS):  # a stopped terminal holds up the last flush only
                await tell(end.why)
        nursery.cancel_scope.cancel()


def _listens(options: DaemonOptions, home: Home | None) -> Sequence[str]:
    if home is None:
        return options.listens
    # Links and others' run files have the addresses of a folder of `p2pavg run create`.
    if not options.network.listen and home.addresses and home.port:
        return listens_for(home.addresses, home.port)
    return home.listen_again(options.listens)


async def _help(options: DaemonOptions, peer: Peer, life: DaemonProcess) -> None:
    """Help a run's rounds until told to leave, if this peer is to help any."""
    if options.helps is None:
        # Not an error: a member may be there for records alone, and its user should know why it reduces
        # nothing.
        if options.member is not None:
            logger.info("keeping records only: the certificate does not grant the role auxiliary")
        return
    await assist(
        peer,
        options.helps,
        bandwidth=options.service.bandwidth,
        max_upload_mbps=options.service.max_upload_mbps,
        max_download_mbps=options.service.max_download_mbps,
        access=options.access,
        name=options.service.name,
        helping=life.helping,
    )
