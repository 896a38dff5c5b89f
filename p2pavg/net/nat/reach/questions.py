"""A peer's questions to others about itself, and when it asks them again. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pavg.base.limits import RETRY_SECONDS

REACH_LOOK_SECONDS = 15.0
"""The time between two looks at one peer. A look takes 5 s at most, so a new outer address is noticed within 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A peer with a direct connection."""

    peer_id: str
    host: str
    """The IP address at which this process sees it."""
    port: int = field(default=0, compare=False)
    """The listening port at which this process has dialled it; 0 if the peer has dialled this one."""
    arrived: bool = field(default=False, compare=False)
    """True if the peer has dialled this one, at a listening port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLook:
    """Ask a peer at which host it sees this one."""

    peer: Neighbour
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDialBack:
    """Ask a peer to dial this one back at a port."""

    peer: Neighbour
    host: str
    """The host at which that peer sees this one."""
    port: int
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWhoami:
    """Probe a peer's listener from a local port; ``None`` takes a fresh one."""

    peer: Neighbour
    local_port: int | None = field(compare=False)
    reason: str = field(compare=False)


Question = AskLook | AskDialBack | AskWhoami


class Agenda:
    """The questions that are open, and the moments before which others are not asked again."""

    def __init__(self) -> None:
        self._open: dict[Question, Question] = {}
        self._void: set[Question] = set()
        """Open questions whose answers do not count any more."""
        self._not_before: dict[Question, float] = {}

    def begin(self, question: Question) -> None:
        """Note that a question is being asked."""
        self._open[question] = question

    def end(self, now: float, question: Question, *, answered: bool) -> bool:
        """Note the end of a question. Return false if its answer does not count any more.

        Args:
            question: the object with which it began. An equal one may have begun after it was withdrawn.
        """
        if self._open.get(question) is not question:
            return False
        del self._open[question]
        if question in self._void:
            self._void.discard(question)
            return False
        self._not_before[question] = now + (REACH_LOOK_SECONDS if answered else RETRY_SECONDS)
        return True

    def may_ask(self, now: float, question: Question) -> bool:
        """Return whether a question is not open, and not to be asked later."""
        return question not in self._open and now >= self._not_before.get(question, now)

    def count(self, is_one: Callable[[Question], bool]) -> int:
        """Return how many open questions of a kind have answers that count."""
        return sum(is_one(question) for question in self._open if question not in self._void)

    def is_busy(self, is_one: Callable[[Question], bool]) -> bool:
        """Return whether a question of a kind is open, even if its answer does not count."""
        return any(map(is_one, self._open))

    def ignore_answers(self, is_one: Callable[[Question], bool]) -> None:
        """Let the answers to open questions of a kind not count. They are asked again when they have ended."""
        self._void.update(filter(is_one, self._open))
        self.hurry(is_one)

    def withdraw(self) -> None:
        """Forget all questions. They may be asked again at once: the old ones were asked in another network."""
        self._open.clear()
        self._void.clear()
        self._not_before.clear()

    def hurry(self, is_one: Callable[[Question], bool]) -> None:
        """Let questions of a kind be asked again at once."""
        self._not_before = {found: at for found, at in self._not_before.items() if not is_one(found)}

    def keep_peers(self, peer_ids: Iterable[str]) -> None:
        """Forget when peers that are not connected any more are to be asked."""
        kept = set(peer_ids)
        self.hurry(lambda question: question.peer.peer_id not in kept)
