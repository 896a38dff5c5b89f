"""One averager of an attached process, as its connection sees it: what the peer knows of it, and its round."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from p2pavg.allreduce.vector.accumulation import Accumulation, Contribution, Schema
from p2pavg.attached.link import DESCRIPTORS_WITH, Link, error_of
from p2pavg.attached.messages import Step, process_id
from p2pavg.attached.results import read_success
from p2pavg.attached.segments import ContributionSegment, ResultReader
from p2pavg.attached.settings import encode_config, encode_schema, on_cpu
from p2pavg.attached.sharing import STATE_KINDS, AttachedSharing
from p2pavg.attached.topic import AttachedTopic
from p2pavg.base.codes import FailedCode, NoPeersCode
from p2pavg.base.encoding import checked
from p2pavg.base.errors import P2PAvgError, RemoteProtocolError
from p2pavg.base.result import Failed, InProgress, NoPeers, Success
from p2pavg.peer.step_plan import StepPlan
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.board import Entry

CodeT = TypeVar("CodeT", NoPeersCode, FailedCode)
_USED = {0: False, 1: True, -1: None}


@dataclass(slots=True)
class AttachedRound:
    """A round that this process has asked for."""

    number: int
    plan: StepPlan
    contribution: Contribution | None
    expected: tuple[str, ...] | None
    """Ids of the peers and processes that it is to be with; ``None`` if that was not said."""
    progress: InProgress
    began: float
    """Moment of :func:`time.monotonic` of the ``step`` that began it."""
    sent: bool = False
    serial: int = 0
    """Of the round at the peer; 0 until the peer has begun it."""
    exchanges: bool = False
    """True once other peers may use the contribution."""
    result: Success | NoPeers | Failed | None = None
    """``averaged`` of a success is missing."""
    vector: torch.Tensor | None = None
    """The average: float32, of the vector's length."""


class Channel:
    """Keeps the peer informed of one averager, also a peer that was started again.

    Args:
        link: the connection.
        number: of this averager in this process.
        config: its configuration.
        accumulation: what it has accumulated.
    """

    def __init__(self, link: Link, number: int, config: AveragingConfig, accumulation: Accumulation) -> None:
        self._link = link
        self._number = number
        self._settings = encode_config(config)
        self._most_weight = config.own_most_weight
        self._accumulation = accumulation
        self._description: bytes | None = None
        self._elements = 0
        self._segment: ContributionSegment | None = None
        self._reader: ResultReader | None = None
        self.is_open = False
        """True while the peer has this averager open."""
        self.error: P2PAvgError | None = None
        """The peer's refusal."""
        self.topics: dict[str, AttachedTopic] = {}
        self.round: AttachedRound | None = None
        self.sharing: AttachedSharing | None = None
        """The states that this process shares; ``None`` if it shares none."""
        self.excluded: dict[str, str] = {}
        self.cancelled: dict[int, bool] = {}
        """The peer's answers to cancellations, by the number of the round."""

    @property
    def is_described(self) -> bool:
        """True while the peer knows the tensors, and shares memory for them."""
        return self._segment is not None

    # ------------------------------------------------------------------ calls of this process, with `changed` held

    def describe(self, schema: Schema) -> None:
        """Describe the tensors to the peer, once."""
        if self._description is None:
            self._description, self._elements = encode_schema(on_cpu(schema)), schema.elements
            if self.is_open:
                self._send("declare", self._description)

    def topic(self, topic: str, look_seconds: float) -> AttachedTopic:
        """Return a board; the first call for a topic begins to look for its entries."""
        if topic not in self.topics:
            self.topics[topic] = AttachedTopic(look_seconds, lambda value, now: self._say(topic, value, now))
            if self.is_open:
                self._send("board", topic, look_seconds)
        return self.topics[topic]

    def begin(self, round_: AttachedRound) -> None:
        """Ask for a round, now or as soon as the peer is there."""
        self.round = round_
        if self.is_described:
            self._ask(round_)
        elif not self._link.is_up:
            self._wait_for_peer(round_)

    def share(self, sharing: AttachedSharing) -> None:
        """Share states from now on, in place of what was shared before."""
        earlier, self.sharing = self.sharing, sharing
        if earlier is not None:
            earlier.lost("another optimizer shares the states of this averager")
        if self.is_described:
            sharing.attached()

    def tell(self, kind: str, *fields: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message about this averager, from any thread; do nothing if the peer is not there."""
        with self._link.changed:
            if self.is_open:
                self._link.send(kind, self._number, *fields, descriptors=descriptors)

    def cancel(self, number: int, reason: str) -> None:
        """Ask the peer to end a round that has no group yet."""
        self.cancelled.clear()
        self._send("cancel", number, reason)

    def close(self) -> None:
        """End the averager at the peer, and all waits."""
        if self.is_open:
            self._send("close")
        self.is_open = False
        for topic in self.topics.values():
            topic.end()

    def _say(self, topic: str, value: bytes, urgent: bool) -> None:
        with self._link.changed:
            if self.is_open:
                self._send("say", topic, value, urgent)

    def _send(self, kind: str, *fields: Any) -> None:
        self._link.send(kind, self._number, *fields)

    def _ask(self, round_: AttachedRound) -> None:
        contribution = round_.contribution
        if contribution is not None:
            assert self._segment is not None
            self._segment.values.copy_(contribution.mean)
        plan, expected = round_.plan, round_.expected
        step = Step(
            number=round_.number,
            weight=0.0 if contribution is None else min(contribution.weight, self._most_weight),
            metrics=() if contribution is None else tuple(contribution.metrics.means.items()),
            state=plan.state,
            target=plan.target or 0,
            contributors=plan.contributors,
            observes=plan.observes,
            hinted=expected is not None,
            expected=expected or (),
        )
        round_.sent = True
        self._send("step", *step.fields())

    def _wait_for_peer(self, round_: AttachedRound) -> None:
        round_.progress = InProgress(
            ready_peers=1, target_size=round_.progress.target_size, reason=self._link.why_down
        )

    # ------------------------------------------------------------------ events of the connection

    def attached(self) -> None:
        """See :class:`~p2pavg.attached.link.Listener`."""
        self.error = None
        self._send("open", self._settings)

    def lost(self, reason: str) -> None:
        """See :class:`~p2pavg.attached.link.Listener`."""
        round_, reader = self.round, self._reader
        self.is_open, self._segment, self._reader = False, None, None
        for topic in self.topics.values():
            topic.lost()
        if self.sharing is not None:
            self.sharing.lost(reason)
        if round_ is None or round_.result is not None:
            return
        found = reader.read(round_.serial) if reader is not None and round_.serial else None
        if found is not None:  # the peer had committed it
            self._succeed(round_, *found)
        elif round_.exchanges:
            reason = f"in the middle of the round, {reason}"
            failed = Failed(reason=reason, code=FailedCode.PEER_ENDED, contribution_used=None)
            self._fail(round_, failed)
        else:
            round_.sent, round_.serial = False, 0
            self._wait_for_peer(round_)

    def take(self, kind: str, fields: tuple[Any, ...], descriptor: Callable[[], int]) -> None:
        """See :class:`~p2pavg.attached.link.Listener`."""
        if kind == "declared":
            segment = ContributionSegment(self._elements, descriptor())
            segment.close()
            self._segment, self._reader = segment, ResultReader(self._elements, descriptor())
            if self.round is not None and not self.round.sent and self.round.result is None:
                self._ask(self.round)
            if self.sharing is not None:
                self.sharing.attached()
            return
        if kind in STATE_KINDS:
            self._take_state(kind, fields, descriptor)
            return
        getattr(self, f"_take_{kind}", self._take_nothing)(*fields)

    def _take_state(self, kind: str, fields: tuple[Any, ...], descriptor: Callable[[], int]) -> None:
        if self.sharing is not None:
            self.sharing.take(kind, fields, descriptor)
        else:
            for _ in range(DESCRIPTORS_WITH.get(kind, 0)):
                os.close(descriptor())

    def _take_nothing(self, *_fields: object) -> None:
        raise RemoteProtocolError("a message that belongs to no averager")

    def _take_opened(self) -> None:
        self.is_open = True
        for name, topic in self.topics.items():
            self._send("board", name, topic.look_seconds)
            if topic.said:
                self._send("say", name, topic.said, True)
        if self._description is not None:
            self._send("declare", self._description)

    def _take_refused(self, kind: str, reason: str) -> None:
        self.error = error_of(kind, reason)

    def _take_entry(
        self, topic: str, publisher: str, value: bytes, sequence: int, expiration_time: float
    ) -> None:
        if topic in self.topics:
            self.topics[topic].take(publisher, Entry(value, sequence, expiration_time))

    def _take_excluded(self, excluded: tuple[Any, ...]) -> None:
        pairs = [checked(pair if isinstance(pair, tuple) else (), (str, str)) for pair in excluded]
        self.excluded = dict(pairs)

    def _take_cancelled(self, number: int, done: bool) -> None:
        self.cancelled[number] = done

    def _current(self, number: int) -> AttachedRound | None:
        round_ = self.round
        return round_ if round_ is not None and round_.number == number and round_.result is None else None

    def _take_begun(self, number: int, serial: int) -> None:
        if (round_ := self._current(number)) is not None:
            round_.serial = serial

    def _take_progress(self, number: int, ready: int, target: int, reason: str, exchanges: bool) -> None:
        if (round_ := self._current(number)) is not None:
            round_.progress = InProgress(ready_peers=ready, target_size=target, reason=reason)
            round_.exchanges = round_.exchanges or exchanges

    def _take_committed(self, number: int, serial: int) -> None:
        round_, reader = self._current(number), self._reader
        if round_ is None or reader is None:
            return
        found = reader.read(serial)
        if found is None:
            raise RemoteProtocolError("a result that is not there")
        self._succeed(round_, *found)
        self._send("taken", serial)

    def _take_ended(self, number: int, kind: str, reason: str, code: str, peer: str, used: int) -> None:
        if (round_ := self._current(number)) is None:
            return
        if kind == NoPeers.__name__:
            self._fail(round_, NoPeers(reason=reason, code=_code(NoPeersCode, code, NoPeersCode.NO_GROUP)))
            return
        failed = Failed(
            reason=reason,
            code=_code(FailedCode, code, FailedCode.OTHER),
            peer=peer or None,
            contribution_used=_USED.get(used, False),
        )
        self._fail(round_, failed)

    # ------------------------------------------------------------------ ends of a round

    def end_unsent(self, reason: str) -> bool:
        """End a round that the peer has not heard of; return whether there was one."""
        round_ = self.round
        if round_ is None or round_.sent or round_.result is not None:
            return False
        self._fail(round_, NoPeers(reason=reason, code=NoPeersCode.CANCELLED))
        return True

    def _succeed(self, round_: AttachedRound, description: bytes, vector: torch.Tensor) -> None:
        success = read_success(description, [])
        contribution = round_.contribution
        if contribution is not None:
            counted = process_id(self._link.peer_id, self._link.name) in success.peers
            (self._accumulation.release if counted else self._accumulation.give_back)(contribution)
            round_.contribution = None
        round_.vector, round_.result = vector, success

    def _fail(self, round_: AttachedRound, result: NoPeers | Failed) -> None:
        if round_.contribution is not None:
            used = isinstance(result, Failed) and result.contribution_used is True
            (self._accumulation.release if used else self._accumulation.give_back)(round_.contribution)
            round_.contribution = None
        round_.result = result


def _code(kind: type[CodeT], text: str, otherwise: CodeT) -> CodeT:
    """Return the code that a peer has named, which may be of a later version."""
    return kind(text) if text in set(kind) else otherwise
