"""The life of a daemon's process: signals, the control socket, a graceful end, and what goes into the log."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from p2pavg import __version__
from p2pavg.base.formats import PeerText, count, in_bytes
from p2pavg.base.limits import DAY_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.unix import open_unix_listener, serve_unix
from p2pavg.peer.auxiliary import HelpedRounds
from p2pavg.peer.joining.home import Home
from p2pavg.peer.joining.member import remembering
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.certificate import EXPIRES_SOON_SECONDS, date_of, read_certificate
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.telemetry.status import PeerStatus
from p2pavg.tools.control.messages import MAX_TEXTS, Answer, DaemonStatus, Done, Question
from p2pavg.tools.control.service import control_handler
from p2pavg.tools.daemon.words import helped, in_words, progress_of
from p2pavg.tools.jobs.given import GivenWork

# The service manager's socket (`sd_notify`): it tells systemd that a daemon is ready, ends, or starts again.

VARIABLE = "NOTIFY_SOCKET"

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """Return the state of a daemon that starts again in the same process."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def notify(state: str, status: str = "") -> None:
    """Tell the service manager, if there is one. A manager that does not listen costs a line in the log.

    Args:
        state: one of the states of this module; empty for the status only.
        status: one line for people, which ``systemctl status`` shows.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    text = "\n".join(filter(None, [state, status and f"STATUS={status}"]))
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)
            told.sendto(text.encode(), address)
    except OSError as error:
        logger.warning("cannot tell the service manager %r: %s", text, error.strerror)


logger = logging.getLogger(__name__)

FINISH_SECONDS = 65.0
"""Timeout of a round that runs when the daemon is told to leave: a round's exchange, and some more."""
TOTALS_SECONDS = 60.0

ENDS = (signal.SIGINT, signal.SIGTERM)
RESTARTS = (signal.SIGHUP,) if sys.platform != "win32" else ()


@asynccontextmanager
async def until_signal() -> AsyncIterator[None]:
    """End the block when the user says so: for a program that has no round to finish."""

    async def wait() -> None:
        async for number in signals:
            logger.info("leaving: %s", signal.Signals(number).name)
            nursery.cancel_scope.cancel()
            return

    with bare_exceptions(), trio.open_signal_receiver(*ENDS) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            yield
            nursery.cancel_scope.cancel()


class DaemonProcess:
    """One start of a daemon, from its first signal handler to its end.

    Args:
        run_id: the run; empty if the daemon only keeps records.
        access: keys and certificate of a run that has an authority.
        home: its folder; ``None``: it has no control socket, and remembers nothing.
    """

    def __init__(self, run_id: str, access: RunAccess | None, home: Home | None) -> None:
        self.run_id = run_id
        self.access = access
        self.home = home
        self.restarts = False
        """True if the daemon was told to start again when it has ended."""
        self.helping: HelpedRounds | None = None
        self.given: GivenWork | None = None
        """Set where this machine trains with the run's job."""
        self._peer: Peer | None = None
        self._began = trio.current_time()
        self._scope = trio.CancelScope()
        self.leaving = trio.Event()
        """Set once the daemon was told to leave."""

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Take signals, and questions on the control socket, until the end of the block.

        The block is cancelled when the daemon is told to leave before :meth:`began`, is told so twice, or its last
        round takes too long.

        Raises:
            BusyError: another daemon uses the folder.
            ControlError: the control socket cannot be made.
        """
        # Signals are taken first: a daemon can be stopped while it still waits for its socket or for the network.
        with trio.open_signal_receiver(*ENDS, *RESTARTS) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen_to, signals)
                async with self._control_socket():
                    with self._scope:
                        yield
                    # Only the patience with the last round sets a deadline. A second signal ends before it.
                    if self._scope.cancelled_caught and trio.current_time() >= self._scope.deadline:
                        logger.warning("left a round that had not ended after %.0f s", FINISH_SECONDS)
                # The task that takes signals never ends by itself.
                nursery.cancel_scope.cancel()

    def leave(self, why: str, *, restart: bool = False) -> None:
        """End gracefully: finish the round that runs, and begin no other. A second call ends at once."""
        logger.info("leaving: %s", why)
        # The last word counts: a restart also while the peer still joins, and an end also after a restart was begun.
        self.restarts = restart
        # A second signal means that the user does not want to wait. Before
        # there is a peer, there is nothing to finish.
        is_first = not self.leaving.is_set()
        self.leaving.set()
        if not is_first or self._peer is None:
            self._scope.cancel()
            return
        notify(reloading() if restart else STOPPING)
        if self.helping is not None:
            if self.helping.is_exchanging:
                logger.info("finishing the round that runs, for %.0f s at most", FINISH_SECONDS)
            # The others count on this peer in the round that runs, so it takes part until that one has ended.
            self.helping.leave()
        # A round that never ends must not keep the service manager waiting.
        self._scope.deadline = trio.current_time() + FINISH_SECONDS

    @asynccontextmanager
    async def began(self, peer: Peer) -> AsyncIterator[None]:
        """Tell the user and the service manager about the peer, until the end of the block."""
        self._peer = peer
        self.helping = HelpedRounds(peer.id)
        # Services that depend on this one may start now: the peer listens.
        notify(READY)
        # What was remembered is written when the block ends, after the tasks have ended.
        async with remembering(peer, self.home), trio.open_nursery() as nursery:
            nursery.start_soon(self._say_how_it_begins, peer, self.helping)
            nursery.start_soon(self._say_totals, self.helping)
            nursery.start_soon(self._warn_of_expiry, peer)
            yield
            nursery.cancel_scope.cancel()

    def run_statuses(self) -> dict[str, PeerStatus]:
        """Return what the other peers of the run say of themselves, by their ids."""
        if self.helping is None or self.helping.heards is None:
            return {}
        return {peer_id: heard.status for peer_id, heard in self.helping.heards.read().items()}

    async def answer(self, question: Question) -> Answer:
        """Answer a question on the control socket."""
        await trio.lowlevel.checkpoint()
        if question is Question.STOP:
            self.leave("told to stop by a local command")
            return Done()
        return self.status()

    def status(self) -> DaemonStatus:
        """Return the state of the daemon now."""
        peer, access = self._peer, self.access
        helping = self.helping or HelpedRounds("")  # without a peer, nothing was helped yet
        expires = 0.0 if access is None else read_certificate(access.certificate).expires
        reach = None if peer is None else peer.context.transport.reachability
        refusal = None
        if peer is not None and access is not None:
            # Other members refuse this peer by its certificate and the newest list of revoked ones.
            membership = Membership(access, peer.id, peer.registry.revocations(access).known)
            refusal = membership.own_refusal(peer.context.wall_clock())
        return DaemonStatus(
            version=__version__,
            pid=os.getpid(),
            peer_id="" if peer is None else peer.id,
            # The answer is one message of bounded size, so its lists are cut.
            addresses=() if peer is None else tuple(peer.addresses[:MAX_TEXTS]),
            reachability="joining the network" if reach is None else reach.sentence,
            reach_kind="" if reach is None else str(reach.kind),
            run_id=_printable(self.run_id),
            roles=() if access is None else tuple(sorted(map(str, access.roles))),
            leaving=self.leaving.is_set(),
            uptime=trio.current_time() - self._began,
            peers=0 if peer is None else len(peer.records.contacts),
            run_peers=len(helping.run_peers),
            rounds=helping.rounds,
            failed_rounds=helping.failed_rounds,
            round_peers=helping.round_peers[:MAX_TEXTS],
            elements=helping.elements,
            bytes_sent=helping.bytes_sent,
            bytes_received=helping.bytes_received,
            certificate_expires=expires,
            training=self.training(),
            refusal=_printable(refusal or ""),
        )

    def training(self) -> str:
        """Return what this machine has given with the run's job, as a sentence; empty if it does not train."""
        return "" if self.given is None else _printable(self.given.sentence)

    async def _listen_to(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self.leave(signal.Signals(number).name, restart=number in RESTARTS)

    @asynccontextmanager
    async def _control_socket(self) -> AsyncIterator[None]:
        if self.home is None:
            yield
            return
        async with open_unix_listener(self.home.socket) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(serve_unix, listener, control_handler(self.answer))
            yield
            nursery.cancel_scope.cancel()

    async def _say_how_it_begins(self, peer: Peer, helping: HelpedRounds) -> None:
        known = len(peer.records.contacts)
        network = (
            f"joined the network: {count(known, 'other peer')} answered" if known else "began a new network"
        )
        if not self.run_id:
            self._print(network)
            return
        # How many peers of the run are here is known after the first look.
        await helping.looked.wait()
        others, run = len(helping.run_peers), f"run {self.run_id!r}"
        here = f"{count(others, 'other peer')} of {run} {'is' if others == 1 else 'are'} here"
        self._print(
            f"{network}; {here if others else f'no other peer of {run} takes part in its rounds now'}"
        )

    def _print(self, line: str) -> None:
        """Tell the log and the service manager."""
        logger.info("%s", line)
        notify("", _printable(line))

    async def _say_totals(self, helping: HelpedRounds) -> None:
        """Say each minute in which rounds ended what this peer has given."""
        before = 0
        while True:
            await trio.sleep(TOTALS_SECONDS)
            total = helping.rounds + helping.failed_rounds
            line = (
                f"{helped(helping.rounds, helping.failed_rounds)}; "
                f"{count(total - before, 'round')} in the last minute; "
                f"{in_bytes(helping.bytes_sent)} sent, {in_bytes(helping.bytes_received)} received; "
                f"{count(len(helping.run_peers), 'other peer')} of the run; "
                f"{in_words(progress_of(self.run_statuses().values()))}"
            )
            # A daemon without rounds would fill the log with the same line.
            logger.log(logging.INFO if total > before else logging.DEBUG, "%s", line)
            notify("", line)
            before = total

    async def _warn_of_expiry(self, peer: Peer) -> None:
        if self.access is None:
            return
        expires = read_certificate(self.access.certificate).expires
        while True:
            if expires - peer.context.wall_clock() < EXPIRES_SOON_SECONDS:
                logger.warning(
                    "this peer's certificate is valid until %s; ask the run's operator for a new one",
                    date_of(expires),
                )
            # Looked at again each day: a daemon runs for longer than a certificate may have left.
            await trio.sleep(DAY_SECONDS)


def _printable(text: str) -> str:
    # Parts of it come from run files and from other peers, and it is shown on terminals and by the service manager.
    return PeerText(text[:1024])
