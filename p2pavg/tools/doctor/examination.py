"""The examination of one peer: it runs the probes at once where it may, and hands their facts to the rules.

The doctor is a peer of its own, with an identity that it throws away. So it can run beside the peer that it examines.
It publishes nothing. It listens where that peer would, so that other peers can be asked to dial it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from p2pavg.base.errors import ListenError
from p2pavg.base.limits import EXCHANGE_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.transport import Transport
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.hello import HelloAnswer, clock_error
from p2pavg.runs.records.identity import SEED_BYTES
from p2pavg.tools.doctor.findings import OPTIONAL, ORDER, Finding, in_order, not_known
from p2pavg.tools.doctor.probes import addresses, files, network, ports
from p2pavg.tools.doctor.probes import run as run_probes
from p2pavg.tools.doctor.rules import files as file_rules
from p2pavg.tools.doctor.rules import network as network_rules
from p2pavg.tools.doctor.rules import run as run_rules
from p2pavg.tools.doctor.rules.network import Dialled, DialOutcome, Port, PortState, judge_announced
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)

TOTAL_SECONDS = 24.0
"""Timeout of everything; the program's start and end take some more."""
JOIN_SECONDS = 4.0
CLOCK_SECONDS = 3.25
RUN_SECONDS = 4.0
PEERS_SECONDS = 3.0
LEARN_REACH_SECONDS = 10.0
"""Time to learn the reachability, from joining the network on: a dial that a router drops takes half of it."""
ANNOUNCED_SECONDS = 12.0
BANDWIDTH_SECONDS = 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedPeer:
    """The peer that is examined, as its user would start it."""

    listen: Sequence[str] = ()
    bootstrap: Sequence[str] = ()
    identity: Path | None = None
    run_id: str | None = None
    run: Path | None = None
    certificate: Path | None = None
    announce: Sequence[str] = ()
    port_mapping: bool = True


@dataclass(slots=True)
class _Clock:
    """This machine's wall clock, corrected by what other peers say. Otherwise all records look expired."""

    wall_clock: Callable[[], float]
    error: float = 0.0

    def now(self) -> float:
        return self.wall_clock() + self.error


@dataclass(slots=True, kw_only=True)
class _Facts:
    """The facts on which several rules depend."""

    options: ExaminedPeer
    file: RunFile | None = None
    key: str | None = None
    """Id of the key file."""
    dialled: list[Dialled] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    heard: tuple[HelloAnswer, ...] | None = None
    run: run_rules.FoundRun | None = None
    revoked: frozenset[bytes] | None = None
    """Serials of the run's list; ``None`` if it could not be looked for."""

    @property
    def run_id(self) -> str | None:
        return self.options.run_id if self.file is None else self.file.run_id

    @property
    def addresses(self) -> list[str]:
        named = () if self.file is None else self.file.bootstrap
        return list(dict.fromkeys([*self.options.bootstrap, *named]))

    @property
    def asked_for_run(self) -> bool:
        return self.options.run is not None or self.options.run_id is not None

    @property
    def vector(self) -> tuple[int, str]:
        """Length of the longest vector of the run, 0 if it is not known, and the codec with which it moves."""
        entries = () if self.run is None else tuple(self.run.entries.values())
        longest = max(entries, key=lambda entry: entry.elements, default=None)
        return (0, "") if longest is None else (longest.elements, longest.codec)

    @property
    def exchange_timeout(self) -> float:
        # AveragingConfig's exchange_timeout
        return EXCHANGE_SECONDS if self.file is None else self.file.exchange_timeout


async def examine(options: ExaminedPeer, *, wall_clock: Callable[[], float] = time.time) -> list[Finding]:
    """Return the findings of all checks, sorted, within :data:`TOTAL_SECONDS` and the time of closing connections.

    Args:
        options: addresses are checked by the caller.
        wall_clock: this machine's clock, in seconds since 1970.
    """
    examination = _Examination(options, wall_clock)
    # Whatever was found by then is judged: a network that answers nothing is what the user asks about.
    with bare_exceptions(), trio.move_on_after(TOTAL_SECONDS):
        await examination.run()
    return examination.conclude()


class _Examination:
    def __init__(self, options: ExaminedPeer, wall_clock: Callable[[], float]) -> None:
        self._facts = _Facts(options=options)
        self._clock = _Clock(wall_clock)
        self._findings: list[Finding] = []

    async def run(self) -> None:
        """Make all checks."""
        self._judge_files()
        await self._judge_network()

    def conclude(self) -> list[Finding]:
        """Return the findings, and those that follow from the facts of several checks."""
        facts = self._facts
        from_facts = [
            *network_rules.judge_ports(facts.ports),
            *network_rules.judge_bootstrap(facts.dialled),
            *network_rules.judge_clock(facts.heard),
            *network_rules.judge_versions(network.PROTOCOLS, facts.heard),
            *run_rules.judge_run(facts.run, asked=facts.asked_for_run),
            *run_rules.judge_peers(facts.run, facts.key),
            *file_rules.judge_certificate(
                files.certificate(facts.options.certificate),
                facts.file,
                facts.key,
                self._clock.now(),
                facts.revoked,
            ),
        ]
        judged = {each.name for each in self._findings}  # a check that failed has left no facts
        found = self._findings + [each for each in from_facts if each.name not in judged]
        # Every check has a finding, so a check for which there was no time is not taken for one without a fault.
        missing = set(ORDER) - OPTIONAL - {each.name for each in found}
        found += [not_known(name, "the doctor's time was over before") for name in missing]
        return in_order(found)

    def _judge_files(self) -> None:
        options, facts = self._facts.options, self._facts
        key = None if options.identity is None else files.key_file(options.identity)
        facts.key = None if key is None else key.peer_id
        facts.file, error = files.run_file(options.run)
        needed = options.certificate is not None
        self._findings += file_rules.judge_key_file(key, needed=needed)
        self._findings += file_rules.judge_run_file(facts.file, error)

    # ------------------------------------------------------------------ the network

    async def _judge_network(self) -> None:
        facts = self._facts
        # Before the doctor listens itself, since it would hold the ports that it tries.
        facts.ports = await ports.try_ports(facts.options.listen)
        free = [port.address for port in facts.ports if port.state is PortState.FREE]
        # A new identity: two processes with one key would be one peer to others.
        seed = secrets.token_bytes(SEED_BYTES)
        async with AsyncExitStack() as stack:
            # An address that the user announces needs no mapping. It is tried, and not announced by the doctor.
            mapping = facts.options.port_mapping and not facts.options.announce
            reach = ReachOptions(port_mapping=mapping, relay_limits=None)
            transport = await _listening(stack, seed, free, reach)
            await self._dial(transport)
            # Its clock is corrected as soon as others have told theirs: otherwise all records look expired.
            opened = peer_over(transport, Ed25519Signer(seed), wall_clock=self._clock.now)
            peer = await stack.enter_async_context(opened)
            await self._ask_network(peer, listens=bool(transport.addresses) or not facts.ports)

    async def _dial(self, transport: Transport) -> None:
        """Dial the bootstrap addresses, and this peer itself if it runs already."""
        facts = self._facts

        async def dial(text: str) -> None:
            facts.dialled.append(await addresses.meet(transport, text, facts.key))

        async def ask_owner(index: int) -> None:
            facts.ports[index] = await ports.ask_owner(facts.ports[index], transport, facts.key)

        async with trio.open_nursery() as nursery:
            for text in facts.addresses:
                nursery.start_soon(dial, text)
            for index in range(len(facts.ports)):
                nursery.start_soon(ask_owner, index)
        # Dials end in any order. The findings follow the order in which the user named the addresses.
        facts.dialled.sort(key=lambda each: facts.addresses.index(each.address))

    async def _ask_network(self, peer: Peer, *, listens: bool) -> None:
        facts, reach = self._facts, partial(self._judge_reach, peer, listens=listens)
        reached = [each.address for each in facts.dialled if each.answer is DialOutcome.REACHED]
        if not reached:
            self._findings += network_rules.judge_reach(None, (), 0, listens=listens)
            self._findings += run_rules.judge_bandwidth([], 0, "", 0.0)
            self._findings += judge_announced(network.not_tried(facts.options.announce), listens=listens)
            return
        with trio.move_on_after(JOIN_SECONDS):
            await peer.join(reached)
        async with trio.open_nursery() as nursery:
            # This check takes long, so it runs beside the others.
            # It has a second more than its own wait, whose result counts when it ends.
            nursery.start_soon(self._check, "firewall", LEARN_REACH_SECONDS + 1.0, reach)
            if facts.options.announce:
                announced = partial(self._judge_announced, peer, listens=listens)
                nursery.start_soon(self._check, "announced", ANNOUNCED_SECONDS, announced)
            # Clocks come before the run: with a wrong clock here, its records would look expired.
            with trio.move_on_after(CLOCK_SECONDS):
                await network.ask_clocks(peer, self._clock.wall_clock, self._note_clocks)
            if facts.run_id is not None:
                await self._check("run", RUN_SECONDS, partial(self._read_run, peer, facts.run_id))
                await self._reach_members(peer)
            # After the run was read, because its members are measured first.
            await self._check("bandwidth", BANDWIDTH_SECONDS, partial(self._judge_bandwidth, peer))

    def _note_clocks(self, heard: tuple[HelloAnswer, ...]) -> None:
        self._facts.heard = heard
        self._clock.error = clock_error(heard)

    async def _read_run(self, peer: Peer, run_id: str) -> list[Finding]:
        reader = run_probes.RunReader(peer, run_id, self._facts.file, self._clock.now)
        try:
            self._facts.run = await reader.read()
        finally:  # the list of revoked certificates is read first
            if reader.revocations is not None:
                self._facts.revoked = reader.revocations.identifiers
        return []

    async def _reach_members(self, peer: Peer) -> None:
        facts = self._facts
        if facts.run is not None:
            # Without this result the run is judged all the same.
            with trio.move_on_after(PEERS_SECONDS):
                found = await run_probes.unreached(peer.context.transport, facts.run.ready, facts.key)
                facts.run = replace(facts.run, unreached=found)

    async def _judge_reach(self, peer: Peer, *, listens: bool) -> list[Finding]:
        facts, own_hosts = self._facts, addresses.own_hosts()
        # A peer on this machine cannot tell how others reach it,
        # so without one elsewhere there is nothing to wait for.
        outside = any(
            each.answer is DialOutcome.REACHED and network_rules.is_outside(each.host, own_hosts)
            for each in facts.dialled
        )
        found = await network.wait_for_reach(peer.context.transport, LEARN_REACH_SECONDS if outside else 0.0)
        port = facts.ports[0].port if facts.ports else 0
        return network_rules.judge_reach(found, own_hosts, port, listens=listens)

    async def _judge_announced(self, peer: Peer, *, listens: bool) -> list[Finding]:
        addresses = self._facts.options.announce
        if not listens:
            return judge_announced(network.not_tried(addresses), listens=False)
        # It ends before this check's own timeout, so that what was found by then counts.
        tried = await network.try_announced(peer, addresses, ANNOUNCED_SECONDS - 1.0)
        return judge_announced(tried, listens=True)

    async def _judge_bandwidth(self, peer: Peer) -> list[Finding]:
        members = () if self._facts.run is None else self._facts.run.entries.keys()
        measured = await network.measure_some(peer, members)
        return run_rules.judge_bandwidth(measured, *self._facts.vector, self._facts.exchange_timeout)

    async def _check(self, name: str, seconds: float, check: Callable[[], Awaitable[list[Finding]]]) -> None:
        """Make one check. If it takes too long or fails, the others go on."""
        with trio.move_on_after(seconds) as scope:
            try:
                self._findings += await check()
            except Exception as error:
                logger.exception("the check of %s failed", name)
                self._findings.append(not_known(name, f"the check itself failed: {error!r}"))
        if scope.cancelled_caught:
            self._findings.append(not_known(name, f"no answer within {seconds:.0f} s"))


async def _listening(
    stack: AsyncExitStack, seed: bytes, listen: Sequence[str], reach: ReachOptions
) -> Transport:
    """Open a transport that listens, or one that does not listen if a port was taken just now."""
    from p2pavg.net.libp2p.transport import open_libp2p_transport  # libp2p takes 0.2 s to import

    try:
        opened = open_libp2p_transport(seed=seed, listen=listen, options=reach)
        return await stack.enter_async_context(opened)
    except ListenError as error:
        logger.info("the doctor does not listen: %s", error)
        opened = open_libp2p_transport(seed=seed, listen=(), options=reach)
        return await stack.enter_async_context(opened)
