"""Lanes that send in turns: a lane without room waits outside its turn, and send buffers are limited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from p2pavg.allreduce.messages import FRAME_BYTES, Lane, LaneHeader, outgoing
from p2pavg.allreduce.movers.lane_driver import (
    TURN_BYTES,
    UNSENT_BYTES,
    UNSENT_IN_TURNS_BYTES,
    DirectUse,
    Turns,
)
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.milestones import Milestone
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Buffer
from p2pavg_compression import Fp32
from tests.unit.allreduce.laid import Takes
from tests.unit.group.samples import SIGNERS, candidate, roster

WATCHDOG_SECONDS = 120.0
ME, B, C = (signer.peer_id for signer in SIGNERS[:3])
PIECES = 4
SHARE = PIECES * TURN_BYTES // 4
HEADER = LaneHeader(b"\x09" * 32, Lane.PARTS, 1)


class Link(Takes):
    """A lane whose other end takes data when the test makes room."""

    def __init__(self, remote: str, note: Callable[[str, int], None] = lambda _what, _count: None) -> None:
        super().__init__(remote)
        self.room = threading.Event()
        self.waits = threading.Event()
        """Set when a thread waits for room."""
        self._note = note

    def keep_unsent_below(self, count: int) -> None:
        self._note("keep", count)

    def wait_for_room(self) -> None:
        self._note("room", 0)
        self.waits.set()
        assert self.room.wait(WATCHDOG_SECONDS)

    def send(self, data: Buffer) -> None:
        self._note("send", len(data))
        super().send(data)


class Hears:
    """Signals of an attempt that take only reports of sent contributions."""

    def reached(self, milestone: Milestone) -> None:
        assert milestone is Milestone.CONTRIBUTION_SENT


class Sender:
    """One of three members; it sends its contributions over lanes."""

    def __init__(self, turns: Turns | None) -> None:
        group = roster([candidate(index, weight=1.0) for index in range(3)], [SHARE] * 3)
        self._turns = turns
        self._ledger = PartTracker(group, ME, Fp32().granularity)
        self._values = AttemptData(
            ledger=self._ledger, codec=Fp32(), vector=torch.zeros(3 * SHARE), buffers=Buffers(0)
        )

    def use(self, lane: Link) -> DirectUse:
        return DirectUse(
            lane,
            self._values,
            RateLimit(None),
            cast(Any, Hears()),
            self._turns,
            [ME, B, C].index(lane.remote),
        )

    def send(self, use: DirectUse) -> None:
        use.send_parts(HEADER, outgoing(self._ledger.parts[use.lane.remote], []))

    def start(self, use: DirectUse) -> threading.Thread:
        thread = threading.Thread(target=self.send, args=(use,), daemon=True)
        thread.start()
        return thread


def join(thread: threading.Thread) -> None:
    thread.join(WATCHDOG_SECONDS)
    assert not thread.is_alive()


def test_a_lane_without_room_does_not_keep_another_from_its_turns() -> None:
    """The clock stands still, so no turn ends by timeout."""
    sender = Sender(Turns(clock=lambda: 0.0))
    full, free = Link(B), Link(C)
    free.room.set()
    stuck, goes = sender.use(full), sender.use(free)
    stuck_thread = sender.start(stuck)
    assert full.waits.wait(WATCHDOG_SECONDS)
    join(sender.start(goes))
    assert goes.finished
    assert goes.moved == FRAME_BYTES + 4 * SHARE
    assert not stuck.finished
    assert full.bytes_sent < TURN_BYTES, "its header and its frame"
    full.room.set()
    join(stuck_thread)
    assert stuck.finished
    assert full.bytes_sent == free.bytes_sent > 4 * SHARE


def test_a_lane_waits_for_room_before_its_turn_and_sends_within_it() -> None:
    turns = Turns(clock=lambda: 0.0)
    noted: list[tuple[str, bool]] = []

    def note(what: str, count: int) -> None:
        if what == "room" or count == TURN_BYTES:
            noted.append((what, turns._holder is not None))

    lane = Link(B, note)
    lane.room.set()
    sender = Sender(turns)
    sender.send(sender.use(lane))
    assert noted == [("room", False), ("send", True)] * PIECES
    assert turns._holder is None


def test_without_turns_a_part_is_sent_at_once() -> None:
    noted: list[tuple[str, int]] = []
    sender = Sender(None)
    sender.send(sender.use(Link(B, lambda what, count: noted.append((what, count)))))
    assert noted[-1] == ("send", 4 * SHARE)
    assert "room" not in dict(noted)


@pytest.mark.parametrize(
    ("turns", "count"), [(Turns(), UNSENT_IN_TURNS_BYTES), (None, UNSENT_BYTES)], ids=["in turns", "freely"]
)
def test_the_send_buffer_is_limited_before_anything_is_sent(turns: Turns | None, count: int) -> None:
    noted: list[tuple[str, int]] = []
    lane = Link(B, lambda what, count: noted.append((what, count)))
    lane.room.set()
    sender = Sender(turns)
    sender.send(sender.use(lane))
    assert noted[0] == ("keep", count)
    assert [what for what, _ in noted].count("keep") == 1
    assert UNSENT_IN_TURNS_BYTES < UNSENT_BYTES
