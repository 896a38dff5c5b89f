"""States of one run at a peer, for the processes that are attached to it; :mod:`p2pavg.attached.standing` decides."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import trio

from p2pavg.attached.blobs import FileInMemory, mapped_sealed, vector_file
from p2pavg.attached.guest import Guest
from p2pavg.attached.messages import MAX_TRANSFERS, WHILE_ATTACHED, process_id, short
from p2pavg.attached.results import encode_success
from p2pavg.attached.standing import LocalAverage, LocalLog, Shelved, Stand, giver, joint_stand, shown
from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.threads.workers import RunInThread
from p2pavg.state.average import ProvenAverage
from p2pavg.state.donor.shelf import HeldSnapshot
from p2pavg.state.joiner.transfers import AverageTransfer, SnapshotTransfer, replayed_success
from p2pavg.state.news import MAX_EPOCH, TOPIC, SnapshotOffer, encode_news
from p2pavg.state.sharing import StateSharing
from p2pavg.state.tree import chunk_digests, root_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at what has changed, and between two reports of a transfer."""
MAX_IDLE_SECONDS = 3600.0

OnMoved = Callable[[AverageTransfer | SnapshotTransfer], None]


@dataclass(slots=True)
class _Held:
    """The snapshot of this peer, in a sealed file."""

    snapshot: HeldSnapshot
    descriptor: int


@dataclass(slots=True)
class _Sharer:
    """A process that shares states."""

    guest: Guest
    channel: int
    stand: Stand = field(default_factory=Stand)
    running: dict[int, AverageTransfer | SnapshotTransfer] = field(default_factory=dict)
    fetched: OrderedDict[int, AverageTransfer] = field(default_factory=OrderedDict)
    """Averages that came from other peers, until the process has taken or dropped them."""
    told: Shelved | None = None
    seen: dict[str, bytes] = field(default_factory=dict)
    """Records of the other processes, as it was shown them."""
    offers: bool = False
    """True while a snapshot of it is hashed."""

    def send(self, kind: str, *fields: object, descriptors: tuple[int, ...] = ()) -> None:
        self.guest.send(kind, self.channel, *fields, descriptors=descriptors)


class SharedStates:
    """The states of one run, for the processes of one peer.

    Args:
        sharing: the peer's own, of which this object is the only user.
        peer_id: this peer.
        log_bytes: memory of the averages.
        run_in_thread: how snapshots are hashed, and averages decoded, off the event loop.
        nursery: lives as long as the run.
        moved: is told of each transfer from other peers, about once a second while it runs.
    """

    def __init__(
        self,
        sharing: StateSharing,
        peer_id: str,
        *,
        log_bytes: int,
        run_in_thread: RunInThread,
        nursery: trio.Nursery,
        moved: OnMoved,
    ) -> None:
        self._sharing = sharing
        self._peer_id = peer_id
        self._log_bytes = log_bytes
        self._run_in_thread = run_in_thread
        self._nursery = nursery
        self._moved = moved
        self._sharers: dict[str, _Sharer] = {}
        self._log = LocalLog()
        self._held: _Held | None = None
        self._read_at = -math.inf
        self._sequence = 0

    async def run(self) -> None:
        """Tell the processes what has changed, until cancelled."""
        try:
            while True:
                self._settle()
                for sharer in self._sharers.values():
                    for number, transfer in sharer.running.items():
                        self._tell_progress(sharer, number, transfer)
                await trio.sleep(LOOK_SECONDS)
        finally:
            self._drop_held()

    # ------------------------------------------------------------------ processes

    def join(self, guest: Guest, channel: int) -> None:
        """Let a process share states from now on."""
        sharer = self._sharers[guest.name] = _Sharer(guest, channel)
        sharing = self._sharing
        sharer.send("shared", sharing.average_bytes, sharing.members_only, tuple(sorted(sharing.bootstrap)))
        for name, other in self._sharers.items():
            if name != guest.name:
                self._show_to(sharer, name, self._news_of(other))
        self._settle()

    def leave(self, name: str) -> None:
        """Forget a process, and end its transfers."""
        sharer = self._sharers.pop(name, None)
        if sharer is None:
            return
        for transfer in sharer.running.values():
            transfer.cancel()
        for other in self._sharers.values():
            self._show_to(other, name, b"")
        self._settle()

    @property
    def keeps_averages(self) -> bool:
        """True if averages of rounds among the processes are of use: a process is behind."""
        return any(sharer.stand.wants for sharer in self._sharers.values())

    def stand(self, name: str, wants: bool, epoch: int) -> None:
        """Note how far a process is, and whether it asks for a state."""
        _check_epoch(epoch)
        sharer = self._sharer(name)
        before = sharer.stand
        since = before.since if before.wants else trio.current_time()
        sharer.stand = Stand(wants, epoch, since)
        if sharer.stand != before:
            self._settle()

    def committed(self, group_id: str, average: LocalAverage) -> None:
        """Keep the average of a round among the processes until one of them has taken it."""
        self._log.committed(bytes.fromhex(group_id), average)

    def took(self, name: str, group_id: bytes, epoch: int) -> None:
        """Note that a process has taken an update; the first one moves the log."""
        _check_epoch(epoch)
        sharer, shelf = self._sharer(name), self._sharing.shelf
        sharer.stand = replace(sharer.stand, epoch=epoch)
        if epoch > self._log.epoch:
            replayed = next((t for t in sharer.fetched.values() if t.group_id == group_id), None)
            if replayed is None:
                self._sharing.took(group_id, epoch)
            else:
                self._sharing.replayed(replayed, epoch)
            self._log.took(group_id, epoch, certified=shelf.average(group_id) is not None)
            self._log.shorten(self._log_bytes, shelf.log)
        self._settle()

    def begin(self, name: str, epoch: int, root: bytes) -> None:
        """Note that a process has replaced its parameters.

        Args:
            root: of the snapshot that it has loaded; empty if it was a checkpoint.
        """
        _check_epoch(epoch)
        sharer = self._sharer(name)
        sharer.stand = replace(sharer.stand, epoch=epoch)
        ours = self._held is not None and self._held.snapshot.offer.root == root
        if not ours and (root or epoch > self._log.epoch):
            # What is held belongs to other parameters, or to earlier ones.
            self._drop_held()
            self._sharing.shelf.begin(epoch)
            self._log.begin(epoch)
        self._settle()

    def set_log_bytes(self, log_bytes: int) -> None:
        """Change the memory of the averages."""
        if not 0 < log_bytes < 2**50:
            raise RemoteProtocolError("a log with a size out of range")
        self._log_bytes = log_bytes
        self._sharing.shelf.set_log_bytes(log_bytes)

    def look(self) -> None:
        """Look for the records of other peers now."""
        self._sharing.look()

    # ------------------------------------------------------------------ the snapshot

    def offer(self, name: str, epoch: int, state: bytes, size: int, descriptor: int) -> None:
        """Take a snapshot from a process; the descriptor belongs to this object from then on."""
        sharer = self._sharer(name)
        if sharer.offers:
            os.close(descriptor)
            raise RemoteProtocolError("two snapshots at once")
        sharer.offers = True
        self._nursery.start_soon(self._hash, sharer, epoch, state, size, descriptor)

    async def _hash(self, sharer: _Sharer, epoch: int, state: bytes, size: int, descriptor: int) -> None:
        kept = False
        try:
            snapshot = await self._run_in_thread(_hashed, epoch, state, size, descriptor)
            kept = self._is_newer(snapshot.offer) and self._is_here(sharer)
            if kept:
                self._drop_held()
                self._held = _Held(snapshot, descriptor)
                self._sharing.shelf.put(snapshot)
        except RemoteProtocolError as error:
            sharer.guest.drop(str(error))
        finally:
            sharer.offers = False
            if not kept:
                os.close(descriptor)
        self._settle()

    def _is_newer(self, offer: SnapshotOffer) -> bool:
        return self._held is None or offer.epoch >= self._held.snapshot.offer.epoch

    def unwanted(self) -> None:
        """Drop the snapshot: no peer has asked for it for long."""
        self._drop_held()
        self._settle()

    def _drop_held(self) -> None:
        if self._held is not None:
            os.close(self._held.descriptor)
            self._held = None
        self._sharing.shelf.put(None)

    # ------------------------------------------------------------------ transfers

    def fetch_snapshot(self, name: str, number: int, offer: SnapshotOffer) -> None:
        """Give a process a snapshot: the one that this peer holds, or one from other peers."""
        sharer = self._new_transfer(name, number)
        held = self._held
        if held is not None and held.snapshot.offer == offer:
            self._read_at = trio.current_time()
            sharer.send("fetched", number, offer.state, b"", offer.size, descriptors=(held.descriptor,))
            return
        transfer = self._sharing.snapshot_transfer(offer, lambda manifest: FileInMemory(manifest.sizes))
        sharer.running[number] = transfer
        self._nursery.start_soon(self._fetch_snapshot, sharer, number, transfer)

    async def _fetch_snapshot(self, sharer: _Sharer, number: int, transfer: SnapshotTransfer) -> None:
        await transfer.run()
        sharer.running.pop(number, None)
        if transfer.failure:
            self._tell_failure(sharer, number, transfer.failure)
            return
        sink = transfer.sink
        assert isinstance(sink, FileInMemory)
        try:
            if self._is_here(sharer):
                offer = transfer.offer
                sharer.send("fetched", number, offer.state, b"", sink.size, descriptors=(sink.descriptor,))
        finally:
            sink.close()

    def fetch_average(self, name: str, number: int, group_id: bytes) -> None:
        """Give a process an average of the log: one of this peer's, or one from other peers."""
        sharer = self._new_transfer(name, number)
        local, logged = self._log.get(group_id), self._sharing.shelf.average(group_id)
        if local is not None:
            found = partial(_as_file, local)
        elif logged is not None:
            found = partial(_decoded, partial(self._sharing.decoded, logged))
        else:
            transfer = sharer.running[number] = self._sharing.average_transfer(group_id)
            self._nursery.start_soon(self._fetch_average, sharer, number, transfer)
            return
        self._nursery.start_soon(self._give_average, sharer, number, found)

    async def _fetch_average(self, sharer: _Sharer, number: int, transfer: AverageTransfer) -> None:
        await transfer.run()
        sharer.running.pop(number, None)
        if transfer.failure:
            self._tell_failure(sharer, number, transfer.failure)
            return
        sharer.fetched[number] = transfer
        while len(sharer.fetched) > MAX_TRANSFERS:
            sharer.fetched.popitem(last=False)
        await self._give_average(sharer, number, partial(_decoded, transfer.decoded))

    async def _give_average(
        self, sharer: _Sharer, number: int, find: Callable[[], tuple[bytes, bytes, int, int]]
    ) -> None:
        """Give a process an average.

        Args:
            find: returns the state before it, its description, and the bytes and the descriptor of its vector.
        """
        try:
            state, description, size, descriptor = await self._run_in_thread(find)
        except (RemoteProtocolError, StateError) as error:
            self._tell_failure(sharer, number, str(error))
            return
        try:
            if self._is_here(sharer):
                sharer.send("fetched", number, state, description, size, descriptors=(descriptor,))
        finally:
            os.close(descriptor)

    def set_donors(self, name: str, number: int, donors: dict[str, tuple[str, ...]]) -> None:
        """Replace the donors of a transfer."""
        transfer = self._sharer(name).running.get(number)
        if transfer is not None:
            transfer.set_donors(donors)

    def drop(self, name: str, number: int) -> None:
        """End a transfer, or forget what it has brought."""
        sharer = self._sharer(name)
        transfer = sharer.running.get(number)
        if transfer is not None:
            transfer.cancel()
        sharer.fetched.pop(number, None)

    def _new_transfer(self, name: str, number: int) -> _Sharer:
        sharer = self._sharer(name)
        if number in sharer.running or len(sharer.running) >= MAX_TRANSFERS:
            raise RemoteProtocolError("too many transfers at once")
        return sharer

    def _tell_failure(self, sharer: _Sharer, number: int, reason: str) -> None:
        if self._is_here(sharer):
            sharer.send("not_fetched", number, short(reason))

    def _tell_progress(
        self, sharer: _Sharer, number: int, transfer: AverageTransfer | SnapshotTransfer
    ) -> None:
        progress = transfer.latest
        if progress is None:
            return
        left = progress.seconds_left if math.isfinite(progress.seconds_left) else -1.0
        counts = (progress.done, progress.total, float(progress.rate), left, len(progress.rates))
        sharer.send("moved", number, *counts)
        self._moved(transfer)

    # ------------------------------------------------------------------ what is told

    def _settle(self) -> None:
        """Publish what this peer says for its processes, and tell these what has changed."""
        stands = {name: sharer.stand for name, sharer in self._sharers.items()}
        if not stands:
            return
        now = trio.current_time()
        wants, epoch = joint_stand(stands, now)
        self._sharing.say(wants=wants, epoch=epoch)
        gives = giver(stands)
        remote = any(said.wants for said in self._sharing.news().values())
        self._sequence += 1
        for name, sharer in self._sharers.items():
            shelved = replace(self._shelved(now, remote=remote), gives=name == gives)
            if shelved != sharer.told:
                sharer.told = shelved
                sharer.send("shelf", *shelved.fields())
            news = self._news_of(sharer)
            for other in self._sharers.values():
                if other is not sharer:
                    self._show_to(other, name, news)

    def _shelved(self, now: float, *, remote: bool) -> Shelved:
        """Return what the process that takes the snapshots has to know.

        Args:
            remote: true if another peer wants a state: only averages with a certificate help it.
        """
        held, shelf = self._held, self._sharing.shelf
        if held is None or (remote and shelf.snapshot is None):
            return Shelved(log_first=self._log.first)
        epoch = held.snapshot.offer.epoch
        read_ago = min(now - self._read_at, time.monotonic() - shelf.read_at, MAX_IDLE_SECONDS)
        return Shelved(
            snapshot_epoch=epoch,
            log_first=max(self._log.first, shelf.log_first) if remote else self._log.first,
            log_full=max(shelf.log_full(epoch), self._log.full(epoch, self._log_bytes)),
            idle_seconds=float(round(max(read_ago, 0.0))),
        )

    def _news_of(self, sharer: _Sharer) -> bytes:
        offer = None if self._held is None else self._held.snapshot.offer
        return encode_news(shown(sharer.stand, offer, self._log))

    def _show_to(self, sharer: _Sharer, name: str, value: bytes) -> None:
        """Show a process the record of another one; an empty value takes it back."""
        publisher = process_id(self._peer_id, name)
        if sharer.seen.get(name) == value:
            return
        sharer.seen[name] = value
        sharer.send("entry", TOPIC, publisher, value, self._sequence, WHILE_ATTACHED)

    def _sharer(self, name: str) -> _Sharer:
        if name not in self._sharers:
            raise RemoteProtocolError("a state of a process that shares none")
        return self._sharers[name]

    def _is_here(self, sharer: _Sharer) -> bool:
        return self._sharers.get(sharer.guest.name) is sharer


def _check_epoch(epoch: int) -> None:
    if not 0 <= epoch <= MAX_EPOCH:
        raise RemoteProtocolError("an update out of range")


def _hashed(epoch: int, state: bytes, size: int, descriptor: int) -> HeldSnapshot:
    data = mapped_sealed(descriptor, size)
    digests = chunk_digests(data)
    offer = SnapshotOffer(epoch=epoch, state=state, root=root_of(digests, size), size=size)
    return HeldSnapshot(offer, data, digests)


def _as_file(average: LocalAverage) -> tuple[bytes, bytes, int, int]:
    return average.state, average.description, average.vector.nbytes, vector_file(average.vector)


def _decoded(
    decoded: Callable[[], tuple[ProvenAverage, torch.Tensor]],
) -> tuple[bytes, bytes, int, int]:
    proven, vector = decoded()
    return proven.state, encode_success(replayed_success(proven, [])), vector.nbytes, vector_file(vector)
