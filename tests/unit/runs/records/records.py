"""Helper: a record node that the test controls, and that records its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.runs.records.board import Board
from p2pavg_dht import Ed25519Signer, Published, Record, sign_record

EPOCH = 1_800_000_000.0
KEY = b"k" * 32
ME, ALICE, BOB = (Ed25519Signer(bytes([number]) * 32) for number in (1, 2, 3))


def wall_clock() -> float:
    """Return the virtual clock's time, which begins at 0."""
    return EPOCH + trio.current_time()


def record(
    signer: Ed25519Signer = ALICE, value: bytes = b"a", *, sequence: int = 1, until: float = 15.0
) -> Record:
    """Return a record that expires at a time of the virtual clock."""
    return sign_record(signer, key=KEY, sequence=sequence, expiration_time=EPOCH + until, value=value)


class Records:
    """The part of a record node that a board uses. Times are those of the virtual clock."""

    def __init__(self) -> None:
        self.there: tuple[Record, ...] = ()
        """Records that look-ups and publishing return."""
        self.stored: tuple[Record, ...] = ()
        """Records that others have stored here."""
        self.published: list[tuple[float, bytes, float]] = []
        self.found: list[float] = []
        self.withdrawn: list[float] = []
        self.keys: set[bytes] = set()
        self.calling = 0
        self.gate: trio.Event | None = None
        """If set, calls hang until the event."""
        self._watching: dict[bytes, Callable[[], None]] = {}

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        self.keys.add(key)
        self.published.append((trio.current_time(), value, ttl))
        await self._wait()
        return Published(1, (), self.there)

    async def find(self, key: bytes) -> tuple[Record, ...]:
        self.keys.add(key)
        self.found.append(trio.current_time())
        await self._wait()
        return self.there

    async def withdraw(self, key: bytes) -> None:
        self.keys.add(key)
        self.withdrawn.append(trio.current_time())
        await trio.lowlevel.checkpoint()

    def held(self, key: bytes) -> tuple[Record, ...]:
        self.keys.add(key)
        return self.stored

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        self._watching[key] = changed

    def unwatch(self, key: bytes) -> None:
        del self._watching[key]

    @property
    def watched(self) -> set[bytes]:
        return set(self._watching)

    def store(self, *records: Record) -> None:
        """Store records, as another peer would."""
        self.stored = records
        self._watching[KEY]()

    @property
    def words(self) -> list[bytes]:
        """Return the published values."""
        return [value for _, value, _ in self.published]

    @property
    def moments(self) -> list[float]:
        """Return the times of publishing."""
        return [when for when, _, _ in self.published]

    async def _wait(self) -> None:
        self.calling += 1
        try:
            await trio.lowlevel.checkpoint()
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.calling -= 1


@asynccontextmanager
async def open_board(records: Records) -> AsyncIterator[Board]:
    """Open a running board of ``ME``, after its first look."""
    board = Board(records, key=KEY, peer_id=ME.peer_id, wall_clock=wall_clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(board.run)
        await wait_all_tasks_blocked()
        yield board
        nursery.cancel_scope.cancel()


def heard(board: Board) -> dict[str, bytes]:
    """Return the others' values."""
    return {peer_id: said.value for peer_id, said in board.entries.items()}
