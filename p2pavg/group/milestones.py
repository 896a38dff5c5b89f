"""What a member has reached in a round, for whoever wants to watch: a test that lets it crash there, for one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias


class Milestone(enum.Enum):
    """A point in a round. Some are reached many times."""

    FORMED = "its group was formed"
    CONTRIBUTION_SENT = "it sent a part of its contribution"
    AVERAGE_SENT = "it sent an averaged part of its share"
    HOLDING = "it holds the whole result"
    COMMITTED = "it committed the result"
    FAILED = "its round failed"


OnMilestone: TypeAlias = Callable[[Milestone], None]


def ignore(_milestone: Milestone) -> None:
    """Nobody watches."""
