"""Milestones of a member in a round, for observers, e.g. a test that crashes the member at one of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias


class Milestone(enum.Enum):
    """A point in a round. A member reaches some of them many times."""

    FORMED = "its group was formed"
    CONTRIBUTION_SENT = "it sent a part of its contribution"
    AVERAGE_SENT = "it sent an averaged part of its share"
    HOLDING = "it holds the whole result"
    COMMITTED = "it committed the result"
    FAILED = "its round failed"


OnMilestone: TypeAlias = Callable[[Milestone], None]


def ignore(_milestone: Milestone) -> None:
    """Do nothing: the observer of a round that is not watched."""
