"""The examination of one peer: it runs the probes at once where it may, and hands their facts to the rules.

The doctor is a peer of its own, with an identity that it throws away. So it can run beside the peer that it examines.
It publishes nothing. It listens where that peer would, so that other peers can be asked to dial it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from p2pavg.base.errors import ListenError
from p2pavg.base.limits import EXCHANGE_SECONDS, GLANCE_SECONDS, QUICK_REPLY_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.transport import Transport
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.greeting import ASKED_AT_ONCE, GREETING_SECONDS, MIN_SECONDS_BETWEEN, Greeter
from p2pavg.runs.records.hello import HelloAnswer, clock_error
from p2pavg.runs.records.identity import SEED_BYTES
from p2pavg.tools.doctor.findings import OPTIONAL, ORDER, Finding, in_order, not_known
from p2pavg.tools.doctor.probes import addresses, files, network, ports
from p2pavg.tools.doctor.probes import run as run_probes
from p2pavg.tools.doctor.probes.addresses import LONG_PROBE_SECONDS, QUICK_PROBE_SECONDS
from p2pavg.tools.doctor.rules import files as file_rules
from p2pavg.tools.doctor.rules import network as network_rules
from p2pavg.tools.doctor.rules import run as run_rules
from p2pavg.tools.doctor.rules.network import Dialled, DialOutcome, Port, PortState, judge_announced
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)

TOTAL_SECONDS = 24.0
"""Timeout of everything; the program's start and end take some more."""
CLOCK_SECONDS = GREETING_SECONDS + GLANCE_SECONDS
"""The answers count when the slowest contact has had its time."""
LEARN_REACH_SECONDS = 10.0
"""Time to learn the reachability, from joining the network on."""
SPARE_SECONDS = 0.5
"""A check has so much more than its own wait, whose result counts when it ends."""


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
    wall_clock: Callable[[], float] = time.time
    """Its machine's clock, in seconds since 1970."""


async def examine(options: ExaminedPeer) -> list[Finding]:
    """Return the findings of all checks, sorted, within :data:`TOTAL_SECONDS` and the time of closing connections.

    Args:
        options: addresses are checked by the caller.
    """
    examination = _Examination(options)
    # Whatever was found by then is judged: a network that answers nothing is what the user asks about.
    with bare_exceptions(), trio.move_on_after(TOTAL_SECONDS):
        examination._judge_files()
        await examination._judge_network()
    return examination.conclude()


class _Examination:
    """The facts on which several rules depend, and the findings so far."""

    def __init__(self, options: ExaminedPeer) -> None:
        self._options = options
        self._findings: list[Finding] = []
        self._file: RunFile | None = None
        self._key: str | None = None
        """Id of the key file."""
        self._ports: list[Port] = []
        self._dialled: list[Dialled] = []
        self._heard: tuple[HelloAnswer, ...] = ()
        self._run: run_rules.FoundRun | None = None
        self._revoked: frozenset[bytes] | None = None
        """Serials of the run's list; ``None`` if it could not be looked for."""

    def _now(self) -> float:
        """Return this machine's wall clock, corrected by what other peers say. Otherwise all records look expired."""
        return self._options.wall_clock() + clock_error(self._heard)

    def conclude(self) -> list[Finding]:
        """Return the findings, and those that follow from the facts of several checks."""
        options = self._options
        from_facts = [
            *network_rules.judge_ports(self._ports),
            *network_rules.judge_bootstrap(self._dialled),
            *network_rules.judge_clock(self._heard),
            *network_rules.judge_versions(network.PROTOCOLS, self._heard),
            *run_rules.judge_run(self._run, asked=options.run is not None or options.run_id is not None),
            *run_rules.judge_peers(self._run, self._key),
            *file_rules.judge_certificate(
                files.certificate(options.certificate), self._file, self._key, self._now(), self._revoked
            ),
        ]
        judged = {each.name for each in self._findings}  # a check that failed has left no facts
        found = self._findings + [each for each in from_facts if each.name not in judged]
        # Every check has a finding, so a check for which there was no time is not taken for one without a fault.
        missing = set(ORDER) - OPTIONAL - {each.name for each in found}
        found += [not_known(name, "the doctor's time was over before") for name in missing]
        return in_order(found)

    def _judge_files(self) -> None:
        options = self._options
        key = None if options.identity is None else files.key_file(options.identity)
        self._key = None if key is None else key.peer_id
        self._file, error = files.run_file(options.run)
        self._findings += file_rules.judge_key_file(key, needed=options.certificate is not None)
        self._findings += file_rules.judge_run_file(self._file, error)

    # ------------------------------------------------------------------ the network

    async def _judge_network(self) -> None:
        # Before the doctor listens itself, since it would hold the ports that it tries.
        self._ports = await trio.to_thread.run_sync(ports.try_ports, self._options.listen)
        free = [port.address for port in self._ports if port.state is PortState.FREE]
        # A new identity: two processes with one key would be one peer to others.
        seed = secrets.token_bytes(SEED_BYTES)
        async with AsyncExitStack() as stack:
            # An address that the user announces needs no mapping. It is tried, and not announced by the doctor.
            mapping = self._options.port_mapping and not self._options.announce
            reach = ReachOptions(port_mapping=mapping, relay_limits=None)
            transport = await _listening(stack, seed, free, reach)
            await self._dial(transport)
            # Its clock is corrected as soon as others have told theirs.
            opened = peer_over(transport, Ed25519Signer(seed), wall_clock=self._now)
            peer = await stack.enter_async_context(opened)
            await self._ask_network(peer, listens=bool(transport.addresses) or not self._ports)

    async def _dial(self, transport: Transport) -> None:
        """Dial the bootstrap addresses, and this peer itself if it runs already."""
        in_file = () if self._file is None else self._file.bootstrap
        named = list(dict.fromkeys([*self._options.bootstrap, *in_file]))

        async def dial(text: str) -> None:
            self._dialled.append(await addresses.meet(transport, text, self._key))

        async def ask_owner(index: int) -> None:
            self._ports[index] = await ports.ask_owner(self._ports[index], transport, self._key)

        async with trio.open_nursery() as nursery:
            for text in named:
                nursery.start_soon(dial, text)
            for index in range(len(self._ports)):
                nursery.start_soon(ask_owner, index)
        # Dials end in any order. The findings follow the order in which the user named the addresses.
        self._dialled.sort(key=lambda each: named.index(each.address))

    async def _ask_network(self, peer: Peer, *, listens: bool) -> None:
        options = self._options
        reached = [each.address for each in self._dialled if each.answer is DialOutcome.REACHED]
        if not reached:
            self._findings += network_rules.judge_reach(None, (), 0, listens=listens)
            self._findings += run_rules.judge_bandwidth([], 0, "", 0.0)
            self._findings += judge_announced(network.not_tried(options.announce), listens=listens)
            return
        with trio.move_on_after(LONG_PROBE_SECONDS):
            await peer.join(reached)
        async with trio.open_nursery() as nursery:
            # These checks take long, so they run beside the others.
            nursery.start_soon(self._judge_reach, peer, listens)
            if options.announce:
                nursery.start_soon(self._judge_announced, peer, listens)
            # Clocks come before the run: with a wrong clock here, its records would look expired.
            with trio.move_on_after(CLOCK_SECONDS):
                await self._ask_clocks(peer)
            run_id = options.run_id if self._file is None else self._file.run_id
            if run_id is not None:
                await self._read_run(peer, run_id)
            if self._run is not None:
                # Without this result the run is judged all the same.
                with trio.move_on_after(QUICK_PROBE_SECONDS + SPARE_SECONDS):
                    found = await run_probes.unreached(peer.context.transport, self._run.ready, self._key)
                    self._run = replace(self._run, unreached=found)
            # After the run was read, because its members are measured first.
            await self._judge_bandwidth(peer)

    async def _ask_clocks(self, peer: Peer) -> None:
        """Ask a few peers for their clocks and versions; what is heard counts at once.

        A peer answers one question in half a second, and the peer's own greeter asks too. So some are asked again.
        """
        for _ in range(network.CLOCK_TRIES):
            greeter = Greeter(
                peer.context.transport,
                peer.records,
                wall_clock=self._options.wall_clock,  # uncorrected
                protocols=network.PROTOCOLS,
                runs=lambda: 0,
            )
            self._heard = max(self._heard, await greeter.poll(), key=len)
            if len(self._heard) >= min(len(peer.records.contacts), ASKED_AT_ONCE):
                return
            await trio.sleep(MIN_SECONDS_BETWEEN)

    async def _read_run(self, peer: Peer, run_id: str) -> None:
        reader = run_probes.RunReader(peer, run_id, self._file)
        with self._checking("run", LONG_PROBE_SECONDS):
            try:
                self._run = await reader.read()
            finally:  # the list of revoked certificates is read first
                if reader.revocations is not None:
                    self._revoked = reader.revocations.identifiers

    async def _judge_reach(self, peer: Peer, listens: bool) -> None:
        with self._checking("firewall", LEARN_REACH_SECONDS + SPARE_SECONDS):
            own_hosts = addresses.own_hosts()
            # A peer on this machine cannot tell how others reach it,
            # so without one elsewhere there is nothing to wait for.
            outside = any(
                each.answer is DialOutcome.REACHED and network_rules.is_outside(each.host, own_hosts)
                for each in self._dialled
            )
            wait = LEARN_REACH_SECONDS if outside else 0.0
            found = await network.wait_for_reach(peer.context.transport, wait)
            port = self._ports[0].port if self._ports else 0
            self._findings += network_rules.judge_reach(found, own_hosts, port, listens=listens)

    async def _judge_announced(self, peer: Peer, listens: bool) -> None:
        # One peer may dial two addresses, one after the other, whose packets a router drops.
        most = 2 * QUICK_REPLY_SECONDS + ROUND_TRIPS_SECONDS
        with self._checking("announced", most + SPARE_SECONDS):
            tried = network.not_tried(self._options.announce)
            if listens:
                with trio.move_on_after(most):
                    await network.try_announced(peer, tried)
            self._findings += judge_announced(tried, listens=listens)

    async def _judge_bandwidth(self, peer: Peer) -> None:
        with self._checking("bandwidth", LONG_PROBE_SECONDS + SPARE_SECONDS):
            entries = {} if self._run is None else self._run.entries
            measured = await network.measure_some(peer, entries.keys())
            # The longest vector of the run, and the codec with which it moves.
            longest = max(entries.values(), key=lambda entry: entry.elements, default=None)
            elements, codec = (0, "") if longest is None else (longest.elements, longest.codec)
            timeout = EXCHANGE_SECONDS if self._file is None else self._file.exchange_timeout
            self._findings += run_rules.judge_bandwidth(measured, elements, codec, timeout)

    @contextmanager
    def _checking(self, name: str, seconds: float) -> Iterator[None]:
        """Bound the time of one check. If it takes longer or fails, the others go on."""
        with trio.move_on_after(seconds) as scope:
            try:
                yield
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
