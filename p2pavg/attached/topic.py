"""A board of the run, as an attached process sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from p2pavg.attached.messages import WHILE_ATTACHED
from p2pavg.base.errors import ClosedError
from p2pavg.runs.records.board import MAX_ENTRY_BYTES, SAID_TTL_SECONDS, Entry


class AttachedTopic:
    """One topic; see :class:`p2pavg.runs.records.board.Topic`. Safe to use from any thread.

    Args:
        say: sends this process's entry to the peer: the value, and whether it is urgent.
    """

    def __init__(self, look_seconds: float, say: Callable[[bytes, bool], None]) -> None:
        self.look_seconds = look_seconds
        self._say = say
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._version = 0
        self._ended = False
        self.said = b""
        """This process's entry; empty if there is none."""

    def publish(self, value: bytes, *, now: bool = False) -> None:
        """See :meth:`p2pavg.runs.records.board.Board.publish`."""
        if not 0 < len(value) <= MAX_ENTRY_BYTES:
            raise ValueError(f"value must have 1 to {MAX_ENTRY_BYTES} bytes, got {len(value)}")
        self.said = value
        self._say(value, now)

    def withdraw(self) -> None:
        """See :meth:`p2pavg.runs.records.board.Board.withdraw`."""
        self.said = b""
        self._say(b"", True)

    def look(self) -> None:
        """Do nothing: the peer looks regularly, and shows this process all that it sees."""

    @property
    def version(self) -> int:
        """See :attr:`p2pavg.runs.records.board.Board.version`."""
        return self._version

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The live entries of other peers, and of the other processes of this peer."""
        now = time.time()
        with self._changed:
            return MappingProxyType(
                {
                    publisher: entry
                    for publisher, entry in self._entries.items()
                    if entry.value
                    and (entry.expiration_time == WHILE_ATTACHED or entry.expiration_time > now)
                }
            )

    def wait(self, version: int, timeout: float) -> None:
        """See :meth:`p2pavg.runs.records.board.Board.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._ended, timeout)
            if self._ended:
                raise ClosedError("the averager is closed")

    # ------------------------------------------------------------------ of the connection

    def take(self, publisher: str, entry: Entry) -> None:
        """Note an entry that the peer has shown."""
        with self._changed:
            if entry.value:
                self._entries[publisher] = entry
            else:
                self._entries.pop(publisher, None)
            self._note()

    def lost(self) -> None:
        """Note that the connection is gone: entries of the other processes expire like those of a peer that died."""
        until = time.time() + SAID_TTL_SECONDS
        with self._changed:
            for publisher, entry in self._entries.items():
                if entry.expiration_time == WHILE_ATTACHED:
                    self._entries[publisher] = replace(entry, expiration_time=until)
            self._note()

    def end(self) -> None:
        """End every wait: the averager is closed."""
        with self._changed:
            self._ended = True
            self._note()

    def _note(self) -> None:
        self._version += 1
        self._changed.notify_all()
