"""Notices: what a run's authority signs after the run has begun. No I/O, no clock, no random source.

A notice is complete: of one kind, the one with the highest number replaces all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class SignedNotice(Protocol):
    """A message that an authority has signed."""

    @property
    def number(self) -> int:
        """Grows with every notice of its kind."""
        ...

    def encode(self) -> bytes:
        """Return the notice as bytes."""
        ...


N = TypeVar("N", bound=SignedNotice)


class NewestNotice(Generic[N]):
    """The newest notice of one kind that this peer has seen. All of its users at this peer share one object.

    Args:
        first: the one that is known from the beginning.
    """

    def __init__(self, first: N) -> None:
        self.newest = first
        self.changed: list[Callable[[], None]] = []
        """Called after a newer one was learned."""

    def learn(self, notice: N) -> bool:
        """Take a notice, which was checked; return whether it is newer than all others."""
        if notice.number <= self.newest.number:
            return False
        self.newest = notice
        for changed in tuple(self.changed):
            changed()
        return True
