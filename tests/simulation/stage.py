"""Optimizers of several peers on virtual time, with a simulated board and simulated rounds.

Each peer is a thread, and only one of them runs at a time. A peer that waits hands over to the next peer with something
to do, and the clock jumps to that time. So a run is deterministic, and an hour takes a second.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

import p2pavg
from p2pavg.base.result import InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.coordination.view import TOPIC
from p2pavg.runs.records.board import Entry
from p2pavg.telemetry.hub import Events

END = 900.0  # of virtual time, after which a test has failed


class Ended(BaseException):
    """The stage is closed. Ends the threads of its remaining peers."""


@dataclass(eq=False)
class Actor:
    """One peer's thread."""

    name: str
    until: float = 0.0
    ready: Callable[[], bool] = lambda: False
    turn: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    came_to: Any = None
    error: BaseException | None = None
    there: bool = True


class Stage:
    """The clock, the peers, their published words, and the peers that look for a group."""

    def __init__(self, seed: int, *, match_timeout: float = 30.0, round_seconds: float = 0.3) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.match_timeout = match_timeout
        self.round_seconds = round_seconds
        self.actors: list[Actor] = []
        self.players: list[Player] = []
        self.delays: dict[tuple[str, str], float] = {}
        self.seekers: list[Player] = []
        self.groups: list[tuple[str, ...]] = []
        self._over = threading.Event()

    def enter(self, name: str, at: float, work: Callable[[Player], Any], **config: Any) -> Actor:
        """Let a peer begin at a time."""
        actor = Actor(name, until=at)
        player = Player(self, actor, **config)
        self.players.append(player)

        def run() -> None:
            actor.turn.wait()
            try:
                if self._over.is_set():
                    return
                actor.came_to = work(player)
            except Ended:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again by play()
                actor.error = error
            finally:
                actor.there = False
                if not self._over.is_set():
                    self._hand_over(actor)

        actor.thread = threading.Thread(target=run, daemon=True)
        self.actors.append(actor)
        return actor

    def play(self) -> list[Any]:
        """Run the peers until all have ended; return their results."""
        for actor in self.actors:
            assert actor.thread is not None
            actor.thread.start()
        first = min(self.actors, key=lambda actor: actor.until)
        self.now = first.until
        first.turn.set()
        assert self._over.wait(120.0), "the stage has hung"
        for actor in self.actors:
            actor.turn.set()
        for actor in self.actors:
            assert actor.thread is not None
            actor.thread.join(10.0)
        for actor in self.actors:
            if actor.error is not None:
                raise actor.error
        return [actor.came_to for actor in self.actors]

    def park(self, actor: Actor, until: float, ready: Callable[[], bool] = lambda: False) -> None:
        """Wait until a time, or until a condition holds."""
        actor.until, actor.ready = until, ready
        self._hand_over(actor)

    def _hand_over(self, actor: Actor) -> None:
        there = [other for other in self.actors if other.there]
        following = next((other for other in there if other.ready()), None)
        if following is None and there:
            following = min(there, key=lambda other: other.until)
            self.now = max(self.now, following.until)
        if following is None or self.now > END:
            self._over.set()
            if actor.there:
                raise Ended
            return
        following.ready = lambda: False
        if following is actor:
            return
        actor.turn.clear()
        following.turn.set()
        if actor.there:
            actor.turn.wait()
            if self._over.is_set():
                raise Ended

    def delay(self, source: str, target: str) -> float:
        """Return the delay of words from one peer to another."""
        return self.delays.setdefault((source, target), self.dice.uniform(0.01, 1.0))

    def form_groups(self) -> None:
        """Form groups: the first peer that looks leads, with its group size or, at its timeout, with those present."""
        for state in {seeker.state for seeker in self.seekers}:
            looking = [seeker for seeker in self.seekers if seeker.state == state]
            leader = looking[0]
            is_late = self.now >= leader.since + self.match_timeout
            if len(looking) >= leader.target or (is_late and len(looking) > 1):
                self._average(looking[: leader.target])
            elif is_late:
                self.seekers.remove(leader)
                leader.end(NoPeers())

    def _average(self, group: list[Player]) -> None:
        total = sum(member.given_weight for member in group)
        self.groups.append(tuple(member.peer_id for member in group))
        averaged = [
            sum((m.given[i] * (m.given_weight / total) for m in group), torch.zeros_like(group[0].given[i]))
            for i in range(len(group[0].given))
        ]
        for member in group:
            self.seekers.remove(member)
            member.end(self.success(averaged, {m.peer_id: m.given_weight for m in group}, self.round_seconds))

    def success(self, averaged: list[torch.Tensor], weights: Mapping[str, float], seconds: float) -> Success:
        """Return the result of the last group for one of its members."""
        return Success(
            averaged=[tensor.clone() for tensor in averaged],
            peers=tuple(weights),
            weights=weights,
            total_weight=sum(weights.values()),
            compression_ratio=1.0,
            bytes_sent=0,
            bytes_received=0,
            duration=seconds,
            exchange_duration=seconds,
            group_id=f"{len(self.groups):064x}",
            share=(0, 0),
        )


class Player:
    """An averager and its boards, as far as the optimizers use them."""

    weight: float

    def __init__(self, stage: Stage, actor: Actor, **config: Any) -> None:
        self.stage = stage
        self.actor = actor
        self.peer_id = actor.name
        self.config = p2pavg.AveragingConfig(**({"run_id": "run"} | config))
        self.round_state: bytes | None = None
        self.weight = 0.0
        self.sum: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.given_weight = 0.0
        self.state, self.target, self.since = b"", 2, 0.0
        self._result: RoundResult | None = None
        self._result_at = 0.0
        self.boards: dict[str, Board] = {}
        self.events = Events()

    @property
    def averager(self) -> Averager:
        """This player, typed as an averager."""
        return cast(Averager, self)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as a computation would."""
        self.stage.park(self.actor, self.stage.now + seconds)

    # ------------------------------------------------------------------ the averager

    def declare(self, tensors: Any) -> None:
        """Accept any declaration."""

    def clear(self) -> None:
        self.weight, self.sum = 0.0, []

    def accumulate(self, tensors: Any, *, weight: float = 1.0, metrics: Any = None) -> None:
        weighted = [tensor.detach() * weight for tensor in tensors]
        self.sum = [a + b for a, b in zip(self.sum, weighted, strict=True)] if self.sum else weighted
        self.weight += weight

    def expect(self, peers: object) -> None:
        """Need no hint."""

    def catch_up(self) -> None:
        """Need no turn: there is no event loop."""

    def step(
        self, *, wait: float, state: bytes, group_size: int, contributors: int = 0, observe: bool = False
    ) -> RoundResult:
        until = self.stage.now + wait
        if self.round_state is None:
            self.given, self.given_weight = [t / self.weight for t in self.sum], self.weight
            self.clear()
            self.round_state, self.state, self.target = state, state, group_size
            self.since, self._result = self.stage.now, None
            self.stage.seekers.append(self)
        while True:
            self.stage.form_groups()
            if self._result is not None and self.stage.now >= self._result_at:
                break
            if self.stage.now >= until:
                reason = "a group is being formed" if self._result is None else "the group exchanges"
                return InProgress(ready_peers=1, target_size=self.target, reason=reason)
            wake = self.since + self.stage.match_timeout if self._result is None else self._result_at
            soon = max(min(until, wake), self.stage.now + 1e-6)
            self.stage.park(self.actor, soon, self._has_result if self._result is None else lambda: False)
        result, self._result, self.round_state = self._result, None, None
        if not isinstance(result, Success):
            self.accumulate(self.given, weight=self.given_weight)
        return result

    def apply_locally(self, state: bytes) -> Success | None:
        if not self.weight:
            return None
        averaged, weight = [t / self.weight for t in self.sum], self.weight
        self.clear()
        self.stage.groups.append((self.peer_id,))
        return self.stage.success(averaged, {self.peer_id: weight}, 0.0)

    def _has_result(self) -> bool:
        return self._result is not None

    def end(self, result: RoundResult) -> None:
        self._result = result
        self._result_at = self.stage.now + (self.stage.round_seconds if isinstance(result, Success) else 0.0)

    def cancel_matchmaking(self, reason: str) -> bool:
        if self not in self.stage.seekers:
            return False
        self.stage.seekers.remove(self)
        self.end(NoPeers(reason=reason))
        return True

    def on_end(self, ending: object) -> None:
        """End without a handover: a player's loop is over when its work returns."""

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in {actor.name for actor in self.stage.actors if actor.there}

    # ------------------------------------------------------------------ the boards

    def board(self, topic: str, look_seconds: float = 1.0, *, lasts: float | None = None) -> Board:
        return self.boards.setdefault(topic, Board(self, topic))

    def hears(self, at: float, name: str, word: Entry, topic: str = TOPIC) -> None:
        """Deliver a word after its delay; words of one peer arrive in order."""
        heapq.heappush(self.board(topic).coming, (at, word.sequence, name, word))


class Board:
    """The others' entries of one topic, as one peer reads them."""

    def __init__(self, player: Player, topic: str) -> None:
        self._player = player
        self._stage = player.stage
        self._topic = topic
        self._sequence = 0
        self.coming: list[tuple[float, int, str, Entry]] = []
        self._words: dict[str, Entry] = {}
        self._version = 0

    def publish(self, value: bytes, *, now: bool = False) -> None:
        self._sequence += 1
        me = self._player.peer_id
        for player in self._stage.players:
            if player is not self._player:
                heard_at = self._stage.now + self._stage.delay(me, player.peer_id)
                player.hears(heard_at, me, Entry(value, self._sequence, 1e12), self._topic)

    def withdraw(self) -> None:
        self.publish(b"")

    def poll(self) -> None:
        """Do nothing: words come by themselves."""

    @property
    def version(self) -> int:
        self._observe()
        return self._version

    @property
    def entries(self) -> Mapping[str, Entry]:
        self._observe()
        gone = {actor.name for actor in self._stage.actors if not actor.there}
        return {name: word for name, word in self._words.items() if word.value and name not in gone}

    def _observe(self) -> None:
        while self.coming and self.coming[0][0] <= self._stage.now:
            _, _, name, word = heapq.heappop(self.coming)
            self._words[name] = word
            self._version += 1

    def wait(self, version: int, timeout: float) -> None:
        until = self._stage.now + timeout
        self._stage.park(self._player.actor, min([until, *(at for at, *_ in self.coming[:1])]))
