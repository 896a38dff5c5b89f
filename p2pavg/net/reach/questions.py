"""A peer's questions to others about itself, and when it asks them again. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LOOK_SECONDS = 15.0
"""The time between two looks at one peer. A look takes 5 s at most, so a new outer address is noticed within 20 s."""

RETRY_SECONDS = 60.0
"""The time until a peer that gave no answer is asked the same again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A peer with a direct connection."""

    peer_id: str
    host: str
    """The IP address at which this process sees it."""
    port: int = field(default=0, compare=False)
    """The listening port at which this process has dialled it; 0 if the peer has dialled this one."""


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
        self._open: set[Question] = set()
        self._not_before: dict[Question, float] = {}

    def begin(self, question: Question) -> None:
        """Note that a question is being asked."""
        self._open.add(question)

    def end(self, now: float, question: Question, *, answered: bool) -> bool:
        """Note the end of a question. Return false if it was withdrawn meanwhile, so that its answer does not count."""
        if question not in self._open:
            return False
        self._open.discard(question)
        self._not_before[question] = now + (LOOK_SECONDS if answered else RETRY_SECONDS)
        return True

    def may_ask(self, now: float, question: Question) -> bool:
        """Return whether a question is not open, and not to be asked later."""
        return question not in self._open and now >= self._not_before.get(question, now)

    def count(self, is_one: Callable[[Question], bool]) -> int:
        """Return how many open questions are of a kind."""
        return sum(map(is_one, self._open))

    def withdraw(self, is_one: Callable[[Question], bool]) -> None:
        """Forget questions of a kind: an open one's answer does not count, and all may be asked at once."""
        self._open = {question for question in self._open if not is_one(question)}
        self.hurry(is_one)

    def hurry(self, is_one: Callable[[Question], bool]) -> None:
        """Let questions of a kind be asked again at once."""
        self._not_before = {found: at for found, at in self._not_before.items() if not is_one(found)}

    def keep_peers(self, peer_ids: Iterable[str]) -> None:
        """Forget when peers that are not connected any more are to be asked."""
        kept = set(peer_ids)
        self.hurry(lambda question: question.peer.peer_id not in kept)
