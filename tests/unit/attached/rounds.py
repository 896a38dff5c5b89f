"""Helpers: the rounds of attached processes, with a peer and processes that only note what they are told."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import torch
import trio
import trio.testing

from p2pavg.allreduce.vector.accumulation import schema_of
from p2pavg.attached.messages import Step
from p2pavg.attached.rounds import Seat, SharedRounds
from p2pavg.attached.segments import ContributionSegment, ResultWriter
from p2pavg.base.codes import NoPeersCode
from p2pavg.base.result import EXCHANGES, Failed, InProgress, NoPeers, RoundResult
from p2pavg.runs.config import AveragingConfig
from p2pavg.telemetry.hub import Events

STATE, OTHER = bytes(32), bytes([1]) * 32
ELEMENTS = 3


class Process:
    """A guest that notes its messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[tuple[Any, ...]] = []
        self.dropped = ""

    def send(self, *fields: Any) -> None:
        self.messages.append(fields)

    def drop(self, reason: str) -> None:
        self.dropped = reason

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """Return the fields of its messages of a kind, after the channel."""
        return [fields[2:] for fields in self.messages if fields[0] == kind]


class LonelyAverager:
    """An averager that finds no other peer until its matchmaking is cancelled."""

    peer_id = "P"

    def __init__(self) -> None:
        self.excluded: dict[str, str] = {}
        self.events = Events()
        self.looks = trio.Event()
        self.error: Exception | None = None
        self.exchanges = False
        """True if it has a group: its matchmaking can be cancelled no more."""
        self._result: NoPeers | Failed | None = None

    def clear(self) -> None:
        pass

    def accumulate_vector(self, *_: object, **__: object) -> None:
        pass

    def expect(self, peers: Collection[str]) -> None:
        pass

    async def step(self, *, wait: float, **_: object) -> RoundResult:
        self.looks.set()
        await trio.sleep(wait)
        if self.error is not None:
            error, self.error, self._result = self.error, None, None
            raise error
        result, self._result = self._result, None
        reason = EXCHANGES if self.exchanges else "looking"
        return result or InProgress(ready_peers=1, target_size=2, reason=reason)

    def fail(self, reason: str) -> None:
        """End the round that runs."""
        self._result = Failed(reason=reason)

    async def cancel_matchmaking(self, reason: str) -> bool:
        await trio.lowlevel.checkpoint()
        if self.exchanges:
            return False
        self._result = NoPeers(reason=reason, code=NoPeersCode.CANCELLED)
        return True


async def run_here(function: Callable[..., Any], *args: object) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


class World:
    """The rounds of one run, and its processes."""

    def __init__(self, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "run_id": "run",
            "group_size": 2,
            "match_timeout": 20.0,
            "compression": None,
        }
        self.averager = LonelyAverager()
        self.rounds = SharedRounds(self.averager, AveragingConfig(**(fields | settings)), run_here, time.time)  # type: ignore[arg-type]
        self.rounds.schema = schema_of([torch.ones(ELEMENTS)])[0]
        self.rounds.result = ResultWriter(ELEMENTS)
        self.processes: dict[str, Process] = {}

    def sit(self, name: str) -> Process:
        """Attach a process."""
        process = self.processes[name] = Process(name)
        self.rounds.sit(Seat(process, 0, ContributionSegment(ELEMENTS)))  # type: ignore[arg-type]
        return process

    def ask(self, name: str, number: int = 1, *expected: str, state: bytes = STATE, **more: Any) -> None:
        """Ask for a round with the named processes, or with other peers if ids of such are named."""
        fields: dict[str, Any] = {"weight": 1.0, "state": state, "hinted": True, "expected": expected}
        self.rounds.ask(name, Step(number=number, **(fields | more)))


@asynccontextmanager
async def world(**settings: Any) -> AsyncIterator[World]:
    """Run the rounds of a run until the end of the block."""
    found = World(**settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.rounds.run)
        yield found
        nursery.cancel_scope.cancel()
    for name in tuple(found.rounds.seats):
        found.rounds.leave(name)
    assert found.rounds.result is not None
    found.rounds.result.close()


async def settle() -> None:
    """Let every task go on until it waits for time or for another event."""
    await trio.testing.wait_all_tasks_blocked()
