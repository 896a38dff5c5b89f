"""One peer: an identity, a transport, a record node, and everything that uses them, in one nursery."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.base import no_garbage_collection
from p2pavg.base.errors import ClosedError, ConfigError, RemoteProtocolError
from p2pavg.base.limits import FAREWELL_SECONDS, QUICK_REPLY_SECONDS, REPLY_SECONDS, TAIL_SECONDS
from p2pavg.base.threads.processor import ProcessorWait, wait_of_this_thread
from p2pavg.base.threads.waits import bare_exceptions, told_while_waiting
from p2pavg.base.threads.workers import RunInThread, Workers
from p2pavg.group.milestones import OnMilestone, ignore
from p2pavg.matchmaking.messages import MAX_FIRST_BYTES, Declined, JoinRequest, encode, read_first
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.nat.reach.options import LOOPBACK, MAKE_A_RUN, checked_options, way_out
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.host import Registry
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.runs.records.bandwidth import BandwidthService
from p2pavg.runs.records.bootstrap import BootstrapDials
from p2pavg.runs.records.calls import RecordCalls, RecordService
from p2pavg.runs.records.greeting import Greeter
from p2pavg.runs.records.hello import PROTOCOL as HELLO_PROTOCOL
from p2pavg.runs.records.identity import identity_of_this_process
from p2pavg.runs.records.twins import Twins
from p2pavg.state.donor.service import StateService
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.verification.evidence.accusation import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg.verification.evidence.service import EvidenceService
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Contact, Ed25519Signer, RecordNode, Signer

logger = logging.getLogger(__name__)

BOOTSTRAP_SECONDS = 3 * QUICK_REPLY_SECONDS

PEER_PROTOCOLS = frozenset(
    (
        RECORDS_PROTOCOL,
        MATCH_PROTOCOL,
        HELLO_PROTOCOL,
        BANDWIDTH_PROTOCOL,
        EXCHANGE_PROTOCOL,
        EVIDENCE_PROTOCOL,
        STATE_PROTOCOL,
    )
)
"""All that a peer serves, and asks of others."""


class Peer:
    """This process in the network. Made by :func:`open_peer`."""

    def __init__(self, context: PeerContext, way_out: str) -> None:
        transport, signer, wall_clock = context.transport, context.signer, context.wall_clock
        self.context = context
        self._transport = transport
        self._way_out = way_out
        """The address by which other machines reach this peer, or it them; empty if it stays on this machine."""
        self.records = RecordNode(signer=signer, rpc=RecordCalls(transport), wall_clock=wall_clock)
        """The record node, which publishes and finds records on the network."""
        self._twins = Twins(self.records, peer_id=signer.peer_id, began=wall_clock())
        self.lobby = StreamRouter()
        self.registry = Registry()
        self._closed = False
        self.bootstrap: frozenset[str] = frozenset()
        """Ids of the peers through which this one joined the network."""
        self.events = Events()
        """The events of all averagers of this peer."""
        self.greeter = Greeter(
            transport,
            self.records,
            wall_clock=wall_clock,
            protocols=(
                RECORDS_PROTOCOL,
                MATCH_PROTOCOL,
                EXCHANGE_PROTOCOL,
                EVIDENCE_PROTOCOL,
                STATE_PROTOCOL,
            ),
            runs=lambda: self.registry.runs,
        )
        """Compares clocks and versions with other peers."""
        self.evidence = EvidenceService(context)
        """Evidence that members of this peer's runs lied."""
        self.state = StateService(context, self.evidence.refusal)
        """States of this peer's runs, for peers that join late or come back."""

    @property
    def id(self) -> str:
        """This peer's id."""
        return self._transport.peer_id

    @property
    def addresses(self) -> list[str]:
        """Addresses at which others can dial this peer; each ends in ``/p2p/<peer id>``."""
        return list(self._transport.addresses)

    def subscribe(self, callback: OnEvent) -> Subscription:
        """Call ``callback`` with every event of this peer's averagers; see :meth:`DecentralizedAverager.subscribe`."""
        return self.events.subscribe(callback)

    @asynccontextmanager
    async def averager(self, config: AveragingConfig) -> AsyncIterator[DecentralizedAverager]:
        """Open an averager that lives as long as the block.

        Raises:
            ClosedError: the peer was closed.
            ConfigError: ``config.access`` has a certificate for another peer; or this peer does not stay on this
                machine, and ``config`` has neither ``access`` nor ``open_run``.
        """
        if self._closed:
            raise ClosedError("the peer is closed")
        # Before anything is published of the run.
        check_openness(config, self._way_out)
        with bare_exceptions():
            # What a member still owes others after its own result runs in `tails`.
            async with trio.open_nursery() as tails, trio.open_nursery() as nursery:
                averager = DecentralizedAverager(self, config, nursery, tails, self.averager)
                try:
                    yield averager
                finally:
                    # It withdraws records through the network, so the tasks go on until it has ended.
                    await averager.aclose()
                    nursery.cancel_scope.cancel()
                    # Other members may not have heard yet how the last round ended.
                    tails.cancel_scope.deadline = trio.current_time() + TAIL_SECONDS

    async def start(self, bootstrap: Sequence[str], *, only_asks: bool = False) -> None:
        """Serve, and join the network through the bootstrap addresses.

        Args:
            only_asks: serve nothing but lanes: another process serves for this peer, or will.
        """
        # Before this peer calls any other one: a peer that is called may call back at once.
        if not only_asks:
            self._serve()
        self._transport.serve_lanes(self.lobby)
        self.lobby.on_members = self._remember_members
        await self.context.nursery.start(self.records.run)
        # Without an address, this peer is the first of a network, and other peers come to it.
        if bootstrap:
            await self.join(bootstrap)
            # What is announced first should work: others would dial a useless address, or none, until the next renewal.
            await self._transport.settle()
        if not only_asks:
            # It compares clocks with peers that are known, so it begins after the network was joined.
            self.context.nursery.start_soon(self.greeter.run)
            self.context.nursery.start_soon(self._twins.run)

    def _serve(self) -> None:
        self._transport.serve(RECORDS_PROTOCOL, RecordService(self.records).serve)
        self._transport.serve(MATCH_PROTOCOL, self._serve_match)
        self._transport.serve(HELLO_PROTOCOL, self.greeter.serve)
        self._transport.serve(BANDWIDTH_PROTOCOL, BandwidthService().serve)
        self._transport.serve(EXCHANGE_PROTOCOL, self.lobby.serve)
        self._transport.serve(EVIDENCE_PROTOCOL, self.evidence.serve)
        self._transport.serve(STATE_PROTOCOL, self.state.serve)

    async def join(self, bootstrap: Sequence[str]) -> None:
        """Join the network through addresses of peers in it.

        Raises:
            AddressError: a text is not an address that ends in a peer id.
            BootstrapError: none of them could be reached within 15 s.
        """
        contacts: dict[str, list[str]] = {}
        for text in bootstrap:
            _, peer_id = parse_peer_address(text)
            # All peers of a run may be started with one list of addresses, in which this peer itself is one.
            if peer_id != self.id:
                contacts.setdefault(peer_id, []).append(text)
            elif text not in self.addresses:
                logger.warning(
                    "bootstrap address %s has this peer's own id; if another process is there, "
                    "the two share one identity file, and neither will meet the other",
                    text,
                )
        if not contacts:
            return
        # Its user named them, so their words about states count more than those of strangers.
        self.bootstrap |= contacts.keys()
        texts = [text for texts in contacts.values() for text in texts]
        # One is enough: it names the others, and an address in a long list may be out of date.
        await BootstrapDials(
            self._transport, texts, each=QUICK_REPLY_SECONDS, seconds=BOOTSTRAP_SECONDS
        ).until_one_answers()
        async with told_while_waiting(logger, lambda seconds: _looks_up(contacts, seconds)):
            known = await self.records.join(
                [Contact(peer_id, tuple(texts)) for peer_id, texts in contacts.items()]
            )
        if not known:
            logger.warning(
                "the bootstrap peers are connected, and none of them answers for records; this peer goes on asking"
            )

    async def aclose(self) -> None:
        """Withdraw this peer's records. It ends within a second, also when cancelled."""
        # First: an averager that is opened during the withdrawal would publish anew.
        self._closed = True
        # Shielded, since it runs when the program is cancelled, too. Records that stay make others wait for this peer.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
            await self.records.withdraw_all()

    def _remember_members(self, members: frozenset[str]) -> None:
        for peer_id in members - {self.id}:
            # A companion keeps its place when strangers fill the limits of connections.
            self._transport.remember_peer(peer_id, companion=True)

    async def _serve_match(self, stream: Stream) -> None:
        # A stranger that opens a stream and says nothing holds it for so long only.
        with trio.move_on_after(REPLY_SECONDS) as scope:
            data = await receive_message(stream, max_bytes=MAX_FIRST_BYTES)
        if scope.cancelled_caught or data is None:
            return
        # Reading and verifying takes processor time, so each sender and its network have a budget.
        await self.context.messages.admit(stream)
        with self.context.messages.charged(stream):
            first = read_first(data)
            # A stranger may send this. What costs nothing is asked first: is the record its own, and of a run of ours?
            if first.record.publisher != stream.remote:
                raise RemoteProtocolError(f"{stream.remote} sent a record that is not its own")
            matchmaker = self.registry.find(first.record.key)
            message = None if matchmaker is None else first.verified()
        if matchmaker is not None and message is not None:
            await matchmaker.serve(stream, message)
        elif first.kind is JoinRequest:
            # Only a request to join waits for an answer. "Over" keeps its sender from asking this attempt again.
            await send_message(stream, encode(Declined("has no averager of this run and schema", over=True)))
            await stream.aclose()


def check_openness(config: AveragingConfig, way_out: str) -> None:
    """Raise ConfigError if strangers could take part in a run that its user has not called open.

    Args:
        way_out: the address by which other machines reach the run's peer, or it them; empty if it stays on this one.
    """
    if way_out and config.access is None and not config.open_run:
        raise ConfigError(
            f"the run {config.run_id!r} has neither access nor open_run=True, so its peer stays on this machine, and"
            f" {way_out} leads out of it",
            remedy=MAKE_A_RUN,
        )


def _looks_up(bootstrap: Collection[str], seconds: float) -> str:
    return (
        f"looking for the nearest peers of the network for {seconds:.0f} s, through {len(bootstrap)} bootstrap"
        f" peer{'s' if len(bootstrap) > 1 else ''}"
    )


@asynccontextmanager
async def peer_over(
    transport: Transport,
    signer: Signer,
    *,
    bootstrap: Sequence[str] = (),
    wall_clock: Callable[[], float] = time.time,
    run_in_thread: RunInThread | None = None,
    processor_wait: ProcessorWait | None = None,
    on_milestone: OnMilestone = ignore,
    way_out: str = "",
    only_asks: bool = False,
) -> AsyncIterator[Peer]:
    """Open a peer over any transport. :func:`open_peer` does this over libp2p.

    Args:
        wall_clock: seconds since 1970. A simulation gives its own.
        run_in_thread: how codecs work off the event loop. A simulation, whose clock stands still only while
            something runs on the loop, gives one that runs them there.
        processor_wait: returns the seconds for which this thread has waited for a processor; a simulation gives 0.
        on_milestone: is told how far the peer is in each of its rounds.
        way_out: the address by which other machines reach the peer, or it them, as the subject of a sentence. Averagers
            then need a certificate, or ``open_run=True``. Empty: it stays on this machine, as in a simulation.
    """
    workers, aside = Workers(), Workers()
    # Around the nursery: its tasks use the threads until their end.
    with bare_exceptions(), closing(workers), closing(aside):
        async with trio.open_nursery() as nursery:
            context = PeerContext(
                transport=transport,
                signer=signer,
                wall_clock=wall_clock,
                nursery=nursery,
                run_in_thread=run_in_thread or workers.run,
                run_aside=run_in_thread or aside.run,
                processor_wait=processor_wait or wait_of_this_thread(),
                on_milestone=on_milestone,
            )
            peer = Peer(context, way_out)
            try:
                await peer.start(bootstrap, only_asks=only_asks)
                yield peer
            finally:
                # While the tasks still run: withdrawing needs the record node and the transport.
                await peer.aclose()
                nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The arguments of :func:`open_peer` beside the addresses on which the peer listens."""

    bootstrap: Sequence[str] = ()
    identity: str | os.PathLike[str] | None = None
    announce: Sequence[str] = ()
    port_mapping: bool = True
    relay_mbps: float = DEFAULT_RELAY_MBPS


@asynccontextmanager
async def open_peer(
    *,
    listen: Sequence[str] = LOOPBACK,
    bootstrap: Sequence[str] = (),
    identity: str | os.PathLike[str] | None = None,
    announce: Sequence[str] = (),
    port_mapping: bool = True,
    relay_mbps: float = DEFAULT_RELAY_MBPS,
) -> AsyncIterator[Peer]:
    """Open a peer that lives as long as the block.

    A peer stays on this machine if all addresses of ``listen``, ``bootstrap`` and ``announce`` are loopback addresses.
    It then dials no other machine and asks no router. Its averagers need neither a certificate nor ``open_run=True``.

    Args:
        listen: addresses such as ``/ip4/0.0.0.0/tcp/4001``; port 0 takes any free one. An empty list makes a peer that
            others reach through relays.
        bootstrap: addresses of peers that are in the network, each ending in ``/p2p/<peer id>``; without any, this
            peer begins a new network.
        identity: the key file, made when missing; ``None`` takes a new identity that is not kept.
        announce: addresses at which others can dial this peer, such as ``/ip4/203.0.113.7/tcp/4001`` for a forwarded
            port or a cloud's outer address. They are announced without a check.
        port_mapping: ask the router to forward the port, by UPnP or NAT-PMP.
        relay_mbps: Mbit/s that this peer carries for peers which cannot be dialled, if it can be dialled itself; 0
            relays nothing.

    Raises:
        AddressError, ListenError, IdentityError: the caller's addresses or key file; the message says what is wrong.
        ConfigError: ``relay_mbps`` or ``port_mapping`` is out of range.
        BootstrapError: no bootstrap peer answered within 15 s.
    """
    options = PeerOptions(
        bootstrap=bootstrap,
        identity=identity,
        announce=announce,
        port_mapping=port_mapping,
        relay_mbps=relay_mbps,
    )
    async with open_peer_or_asker(listen, options) as peer:
        yield peer


@asynccontextmanager
async def open_peer_or_asker(
    listen: Sequence[str], how: PeerOptions, *, only_asks: bool = False
) -> AsyncIterator[Peer]:
    """Open a peer as :func:`open_peer` does, or one that serves nothing.

    Args:
        only_asks: serve nothing, because another process serves for this peer through a gate.
    """
    was_loaded = "p2pavg.net.libp2p" in sys.modules
    # Here and not above: libp2p takes 0.2 s to import, and the simulation does without it.
    with no_garbage_collection():
        from p2pavg.net.libp2p.transport import open_libp2p_transport
    if not was_loaded and gc.isenabled():
        # All that was imported is looked through now. Else that falls into one of the first rounds, of all peers that
        # began together, and beside busy programs it holds each of them up for seconds.
        gc.collect()

    out = way_out(listen, how.bootstrap, how.announce)
    options = checked_options(how.announce, port_mapping=how.port_mapping, relay_mbps=how.relay_mbps)
    # Nothing leads out of this machine, so no router is asked, and no other peer is used to learn how it is reached.
    if not out:
        options = replace(options, port_mapping=False, reachable=False, only_here=True)
    with identity_of_this_process(how.identity) as seed, bare_exceptions():
        async with (
            open_libp2p_transport(seed=seed, listen=listen, options=options) as transport,
            peer_over(
                transport, Ed25519Signer(seed), bootstrap=how.bootstrap, way_out=out, only_asks=only_asks
            ) as peer,
        ):
            yield peer
