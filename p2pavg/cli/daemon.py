"""The standalone peer behind ``p2pavg peer``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from p2pavg.cli.invitation import open_delegate
from p2pavg.config import AveragingConfig
from p2pavg.errors import ConfigError
from p2pavg.membership.access import RunAccess
from p2pavg.membership.certificate import Role
from p2pavg.membership.files import read_access, read_run_file
from p2pavg.membership.membership import Membership
from p2pavg.membership.run_file import RunFile
from p2pavg.net.relay.limits import DEFAULT_RELAY_MBPS
from p2pavg.peer import open_peer
from p2pavg.records.identity import load_seed
from p2pavg.records.invitations import PROTOCOL as INVITE_PROTOCOL
from p2pavg.records.invitations import Delegate, Invitations
from p2pavg.records.revocations import Revocations
from p2pavg.records.run_records import RunRecords
from p2pavg.round.auxiliary import assist
from p2pavg.threads.exceptions import bare_exceptions
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


def run_peer(
    *,
    listen: Sequence[str],
    bootstrap: Sequence[str],
    identity: str | os.PathLike[str] | None,
    run_id: str | None,
    announce: Sequence[str] = (),
    port_mapping: bool = True,
    relay_mbps: float = DEFAULT_RELAY_MBPS,
    member: RunMember | None = None,
    bandwidth: float | None = None,
    max_upload_mbps: float | None = None,
    max_download_mbps: float | None = None,
) -> None:
    """Run a peer until SIGINT or SIGTERM; print the address that other peers bootstrap from.

    Args:
        run_id: id of the run that this peer helps, if any.
        announce, port_mapping, relay_mbps: see :func:`p2pavg.open_peer`.
        member: this peer in a run that has an authority. It joins the network through the run file's addresses too.
        bandwidth: like the two limits, in Mbit/s; see :func:`p2pavg.round.auxiliary.assist`.

    Raises:
        ConfigError: no averager could have this ``run_id``, ``bandwidth`` or limit.
        P2PAvgError: what :func:`p2pavg.open_peer` raises.
    """

    # The arguments are checked even without a run id: a limit that is out of range is a mistake either way.
    AveragingConfig(
        run_id="none" if run_id is None else run_id,
        bandwidth=bandwidth,
        max_upload_mbps=max_upload_mbps,
        max_download_mbps=max_download_mbps,
    )

    async def main() -> None:
        with bare_exceptions(), trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(live)
                async for number in signals:
                    logger.info("leaving: %s", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    return

    async def live() -> None:
        named = [*bootstrap, *(() if member is None else member.other_addresses)]
        async with (
            open_peer(
                listen=listen,
                bootstrap=named,
                identity=identity,
                announce=announce,
                port_mapping=port_mapping,
                relay_mbps=relay_mbps,
            ) as peer,
            trio.open_nursery() as nursery,
        ):
            if member is not None and member.delegate is not None:
                context, membership = peer.context, member.delegate.membership
                # A delegate that was revoked hears of it here, and serves no more links.
                records = RunRecords(peer.records, membership, context.wall_clock)
                nursery.start_soon(Revocations(records, membership, member.run.run_id).run)
                invitations = Invitations(
                    member.delegate, wall_clock=context.wall_clock, run_in_thread=context.run_in_thread
                )
                context.transport.serve(INVITE_PROTOCOL, invitations.serve)
                logger.info("serving invitation links of the run %r", member.run.run_id)
            for address in peer.addresses[1:]:
                logger.info("also reachable at %s", address)
            print(peer.addresses[0] if peer.addresses else peer.id, flush=True)
            helps = run_id if member is None else member.helps
            if helps is not None:
                await assist(
                    peer,
                    helps,
                    bandwidth=bandwidth,
                    max_upload_mbps=max_upload_mbps,
                    max_download_mbps=max_download_mbps,
                    access=None if member is None else member.access,
                )
            elif member is not None:
                logger.info("keeping records only: the certificate does not grant the role auxiliary")
            await trio.sleep_forever()

    trio.run(main)
