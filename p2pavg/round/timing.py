"""Moments of a round."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Moments of a round on trio's clock, in seconds."""

    started: float
    exchange_began: float
