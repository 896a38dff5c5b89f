"""The socket at which processes attach to a peer."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from p2pavg.attached.address import PREFIX, socket_path, user_of
from p2pavg.attached.guest import Guest, receive_with_files
from p2pavg.attached.messages import (
    MAX_CHANNELS,
    MAX_DESCRIPTORS,
    MAX_PROCESSES,
    MAX_REASON_CHARS,
    TO_PEER,
    VERSION,
    Frames,
    is_process_name,
    read,
    read_step,
    short,
)
from p2pavg.attached.segments import check_platform
from p2pavg.attached.settings import at_site, check_shareable, read_config, read_schema
from p2pavg.attached.shared_run import SharedRun
from p2pavg.attached.state_requests import STATE_REQUESTS, take_state_request
from p2pavg.base.errors import (
    BusyError,
    ConfigError,
    ControlError,
    ListenError,
    P2PAvgError,
    RemoteProtocolError,
)
from p2pavg.base.threads.exceptions import bare_exceptions
from p2pavg.net.unix import accept_unix, locked
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.records.board import MAX_ENTRY_BYTES

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 10.0  # for a connection's first message
FINISH_SECONDS = 60.0
"""Timeout of the rounds that run when a peer is to leave."""
_READ_BYTES = 2**16
_BACKLOG = 16


class SharedPeer:
    """A peer that processes share. Made by :func:`share_peer`."""

    def __init__(self, visits: _Visits) -> None:
        self._visits = visits

    @property
    def is_exchanging(self) -> bool:
        """True while a round of attached processes runs that has its group."""
        return self._visits.is_exchanging

    async def finish(self, timeout: float = FINISH_SECONDS) -> bool:
        """Begin no further round, and wait until those that run have ended. Call it before the block ends.

        Rounds that have no group yet end at once. The processes keep what they have asked for, and hand it to the next
        peer at this address.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether all of them have ended.
        """
        with trio.move_on_after(timeout) as scope:
            await self._visits.finish()
        return not scope.cancelled_caught


@asynccontextmanager
async def share_peer(
    peer: Peer,
    address: str | os.PathLike[str],
    *,
    accesses: Mapping[str, RunAccess] | None = None,
    site: str = "",
) -> AsyncIterator[SharedPeer]:
    """Let processes of this machine and user attach to a peer, for as long as the block runs.

    They call :func:`p2pavg.attach` with the same address. All of them are one peer to the others: one identity, one
    port, one member of a group.

    Args:
        peer: the peer.
        address: ``unix:PATH`` or a path, of at most 107 bytes. Only this user can connect to the socket.
        accesses: keys and certificates of this peer, by the id of the run, for runs that have an authority.
        site: name of this peer's site, for runs whose topology has sites; see :class:`p2pavg.Hierarchical`.

    Raises:
        ConfigError: the path is too long, or the system is not Linux.
        ListenError: the socket cannot be made there, or another peer serves it.
    """
    check_platform()
    path = socket_path(address)
    with _owning(path):
        listener = _listen(path)
        made = os.stat(path)
        visits = _Visits(peer, dict(accesses or {}), site)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(visits.run, listener)
                logger.info("processes can attach to this peer at %s%s", PREFIX, path)
                yield SharedPeer(visits)
                nursery.cancel_scope.cancel()
        finally:
            listener.socket.close()
            with suppress(OSError):
                # Another program may have put a file there meanwhile.
                if os.path.samestat(os.stat(path), made):
                    os.unlink(path)


@contextmanager
def _owning(path: str) -> Iterator[None]:
    """Hold the lock of a socket's path: two peers that start at once must not replace each other's socket."""
    try:
        with locked(Path(f"{path}.lock")):
            yield
    except BusyError:
        raise ListenError(
            errno.EADDRINUSE, f"cannot listen at {PREFIX}{path}: another peer serves it"
        ) from None
    except ControlError as error:
        raise ListenError(errno.EACCES, f"cannot listen at {PREFIX}{path}: {error}") from None


def _listen(path: str) -> trio.SocketListener:
    """Return a socket that listens at a path, for this user only. A socket that no process serves is replaced."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # before any process can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(error.errno, f"cannot listen at {PREFIX}{path}: {error.strerror}") from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ListenError(
                errno.EEXIST, f"cannot listen at {PREFIX}{path}: a file that is no socket is there"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ListenError(error.errno, f"cannot listen at {PREFIX}{path}: {error.strerror}") from None
        else:
            raise ListenError(errno.EADDRINUSE, f"cannot listen at {PREFIX}{path}: another peer serves it")


class _Visits:
    """The attached processes, and the runs that they take part in."""

    def __init__(self, peer: Peer, accesses: Mapping[str, RunAccess], site: str = "") -> None:
        self.peer = peer
        self.site = site
        self.accesses = accesses
        self.guests: dict[str, Guest] = {}
        self._runs: dict[str, SharedRun] = {}
        self._opening = trio.Lock()
        self._connections = 0
        self._nursery: trio.Nursery | None = None
        self._finishes = False

    @property
    def is_exchanging(self) -> bool:
        """True while a round of a run has its group."""
        return any(run.is_exchanging for run in self._runs.values())

    async def finish(self) -> None:
        """Begin no further round, and wait until those that run have ended."""
        self._finishes = True
        async with trio.open_nursery() as nursery:
            for run in self._runs.values():
                nursery.start_soon(run.finish)

    async def run(self, listener: trio.SocketListener) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as self._nursery:
            while True:
                connection = (await accept_unix(listener)).socket
                if user_of(connection) != os.geteuid() or self._connections >= MAX_PROCESSES:
                    connection.close()
                    continue
                self._nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        self._connections += 1
        visit = _Visit(self, connection)
        try:
            await visit.run()
        except (RemoteProtocolError, OSError, trio.BrokenResourceError) as error:
            logger.warning(
                "the connection of the attached process %s ends: %s", visit.name or "(no name)", error
            )
        except Exception:
            logger.exception(
                "an exception while the attached process %s was served", visit.name or "(no name)"
            )
        finally:
            self._connections -= 1
            await self._leave(visit)
            visit.close()
            connection.close()

    async def _leave(self, visit: _Visit) -> None:
        if visit.guest is not None:
            del self.guests[visit.guest.name]
            for run in visit.runs.values():
                self._leave_run(run, visit.guest.name)
            visit.guest.close()
            logger.info("the process %s has left", visit.guest.name)

    def _leave_run(self, run: SharedRun, name: str) -> None:
        run.leave(name)
        if run.is_empty:
            run.close()

    def close(self, run: SharedRun, guest: Guest) -> None:
        """Close a process's averager."""
        self._leave_run(run, guest.name)

    async def open(self, guest: Guest, channel: int, settings: bytes) -> SharedRun:
        """Open an averager for a process; see :meth:`SharedRun.join` for the errors."""
        config = read_config(settings, self.accesses)
        check_shareable(config)
        async with self._opening:
            run = self._runs.get(config.run_id)
            if run is not None and run.is_empty:
                await run.ended.wait()
                run = None
            if run is None:
                run = SharedRun(self.peer, at_site(config, self.site))
                assert self._nursery is not None
                await self._nursery.start(self._run, run)
                if self._finishes:
                    await run.finish()
            run.join(guest, channel, config)
            return run

    async def _run(self, run: SharedRun, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        run_id = run.config.run_id
        self._runs[run_id] = run
        try:
            await run.run(task_status=task_status)
        except Exception:
            if not run.has_begun:
                raise  # to the process that opens it
            logger.exception("the attached processes' run %r ends by an exception", run_id)
            for name in run.names:
                self.guests[name].drop(f"the run {run_id!r} has ended by an exception")
        finally:
            if self._runs.get(run_id) is run:
                del self._runs[run_id]


class _Visit:
    """One connection, from its first message to its end."""

    def __init__(self, visits: _Visits, connection: trio.socket.SocketType) -> None:
        self._visits = visits
        self._connection = connection
        self._frames = Frames()
        self._descriptors: deque[int] = deque()
        self.guest: Guest | None = None
        self.name = ""
        self.runs: dict[int, SharedRun] = {}

    async def run(self) -> None:
        """Attach the process and serve it until it leaves."""
        with trio.move_on_after(ATTACH_SECONDS):
            waiting = await self._attach()
        if self.guest is None:
            return
        with bare_exceptions(), self.guest.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.guest.write)
                await self._read(waiting)
                nursery.cancel_scope.cancel()

    async def _attach(self) -> list[bytes]:
        """Take the first message; return further ones that came with it."""
        messages = await self._receive()
        if not messages:
            return []
        kind, fields = read(messages[0], TO_PEER)
        if kind != "attach":
            raise RemoteProtocolError(f"a connection that begins with {kind}")
        version, name = fields
        guest = Guest(self._connection, name if is_process_name(name) else "")
        error: P2PAvgError | None = None
        if version != VERSION:
            error = ConfigError(
                f"the peer speaks version {VERSION} of the attachment's protocol, this process {version}; install one"
                " version of p2pavg for both, and restart the older one"
            )
        elif not is_process_name(name):
            error = ConfigError("name has 1 to 32 letters, digits, dots, dashes and underscores")
        elif name in self._visits.guests:
            error = BusyError(f"another process is attached as {name!r}; give each process a name of its own")
        if error is not None:
            await self._refuse_attachment(guest, error)
            return []
        self.guest, self.name = guest, name
        self._visits.guests[name] = guest
        peer = self._visits.peer
        guest.send("attached", VERSION, peer.id, tuple(peer.addresses)[:64])
        logger.info("the process %s has attached", name)
        return messages[1:]

    async def _refuse_attachment(self, guest: Guest, error: P2PAvgError) -> None:
        guest.send("refused", -1, type(error).__name__, short(str(error)))
        with trio.move_on_after(1.0):
            await guest.write()

    def close(self) -> None:
        """Close the descriptors that no message has asked for."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _descriptor(self) -> int:
        """Return a descriptor that the process has passed with a message."""
        if not self._descriptors:
            raise RemoteProtocolError("a file without a descriptor")
        return self._descriptors.popleft()

    async def _receive(self) -> list[bytes]:
        """Return the next complete messages; none when the process has left."""
        while True:
            data, descriptors = await receive_with_files(self._connection, _READ_BYTES)
            self._descriptors.extend(descriptors)
            if len(self._descriptors) > MAX_DESCRIPTORS:
                raise RemoteProtocolError("files without messages")
            if not data:
                return []
            found = self._frames.feed(data)
            if found:
                return found

    async def _read(self, messages: list[bytes]) -> None:
        while True:
            for message in messages:
                kind, fields = read(message, TO_PEER)
                if kind == "attach":
                    raise RemoteProtocolError("a process that attaches twice")
                await self._handle(kind, fields[0], fields[1:])
            messages = await self._receive()
            if not messages:
                return

    async def _handle(self, kind: str, channel: int, fields: tuple[object, ...]) -> None:
        assert self.guest is not None
        try:
            if kind in STATE_REQUESTS:
                run = self._run(channel)
                await take_state_request(run, self.guest, kind, fields, self._descriptor)
            else:
                await getattr(self, f"_take_{kind}")(channel, *fields)
        except RemoteProtocolError:
            raise
        except P2PAvgError as error:
            self.guest.send("refused", channel, type(error).__name__, short(str(error)))

    # ------------------------------------------------------------------ one message each

    async def _take_open(self, channel: int, settings: bytes) -> None:
        assert self.guest is not None
        if channel in self.runs or not 0 <= channel < 2**31 or len(self.runs) >= MAX_CHANNELS:
            raise RemoteProtocolError("too many averagers, or one that is open")
        self.runs[channel] = await self._visits.open(self.guest, channel, settings)
        self.guest.send("opened", channel)

    async def _take_declare(self, channel: int, description: bytes) -> None:
        assert self.guest is not None
        self._run(channel).declare(self.guest, read_schema(description))
        await trio.lowlevel.checkpoint()

    async def _take_board(self, channel: int, topic: str, look_seconds: float) -> None:
        assert self.guest is not None
        await self._run(channel).open_board(self.guest, topic, look_seconds)

    async def _take_say(self, channel: int, topic: str, value: bytes, urgent: bool) -> None:
        if len(value) > MAX_ENTRY_BYTES:
            raise RemoteProtocolError("a word that is too long")
        self._run(channel).board(topic).say(self.name, value, urgent=urgent)
        await trio.lowlevel.checkpoint()

    async def _take_step(self, channel: int, *fields: object) -> None:
        assert self.guest is not None
        self._run(channel).rounds_of(self.guest).ask(self.name, read_step(fields))
        await trio.lowlevel.checkpoint()

    async def _take_cancel(self, channel: int, number: int, reason: str) -> None:
        assert self.guest is not None
        rounds = self._run(channel).rounds_of(self.guest)
        done = await rounds.cancel(self.name, number, reason[:MAX_REASON_CHARS])
        self.guest.send("cancelled", channel, number, done)

    async def _take_taken(self, channel: int, serial: int) -> None:
        assert self.guest is not None
        self._run(channel).rounds_of(self.guest).taken(self.name, serial)
        await trio.lowlevel.checkpoint()

    async def _take_updated(self, channel: int, *fields: object) -> None:
        self._run(channel).updated(fields)
        await trio.lowlevel.checkpoint()

    async def _take_drifted(self, channel: int, sentence: str) -> None:
        self._run(channel).drifted(sentence[:MAX_REASON_CHARS])
        await trio.lowlevel.checkpoint()

    async def _take_close(self, channel: int) -> None:
        assert self.guest is not None
        self._visits.close(self._run(channel), self.guest)
        del self.runs[channel]
        await trio.lowlevel.checkpoint()

    def _run(self, channel: int) -> SharedRun:
        if channel not in self.runs:
            raise RemoteProtocolError("a message about no open averager")
        return self.runs[channel]
