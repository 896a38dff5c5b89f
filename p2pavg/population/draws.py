"""Draws that follow from a seed, the same on every machine. No I/O, no clock, no random source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_BITS = 53  # a float's precision


class Draws:
    """A sequence of draws. Two objects with the same seed make the same draws.

    Args:
        seed: any bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.sha256(seed).digest()
        self._count = 0

    def fraction(self) -> float:
        """Return a number from 0 to below 1."""
        drawn = hashlib.sha256(self._seed + self._count.to_bytes(8, "big")).digest()
        self._count += 1
        number = int.from_bytes(drawn[:8], "big") >> (64 - _BITS)
        return number / float(1 << _BITS)

    def choose(self, items: Sequence[T]) -> T:
        """Return one of some items, which must not be empty."""
        return items[int(self.fraction() * len(items))]
