"""Checks that no member's values are longer than the norm that it signed. No I/O, no clock.

A reducer sees one share of each contribution. Of that share, the norm is at most that of the whole vector. A member may
still send every reducer a share as long as the norm that it signed: no reducer can see that alone. With R reducers its
whole vector is then at most sqrt(R) times too long.
"""

from __future__ import annotations

import math
import threading

import torch

from p2pavg.allreduce.errors import FalseNormError
from p2pavg.group.roster import Roster

SLACK = 2.0
"""An honest share is at most twice as long as its member's vector, with any codec. A codec rounds each value to the
nearest level, and 0 is a level. So rounding moves a value by no more than its own magnitude."""
_ROUNDING = 1 + 1e-5  # of the sums of squares
_BLOCK = 2**20


class NormCheck:
    """Sums up each member's squares over the parts of one share. Safe to use from any thread."""

    def __init__(self, roster: Roster) -> None:
        self._norms = {member.peer_id: member.norm for member in roster.contributors}
        self._squares: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, peer_id: str, values: torch.Tensor) -> None:
        """Count a decoded part of a member's, float32 on the CPU.

        Raises:
            FalseNormError: the parts so far are longer than the member's vector can be.
        """
        squares = vector_norm(values) ** 2
        with self._lock:
            squares += self._squares.get(peer_id, 0.0)
            self._squares[peer_id] = squares
        length, signed = math.sqrt(squares), self._norms[peer_id]
        if length > SLACK * _ROUNDING * signed:
            raise FalseNormError(peer_id, length, signed)


def vector_norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm of float32 values on any device, summed in float64, block by block."""
    blocks = torch.split(values, _BLOCK)
    norms = [float(torch.linalg.vector_norm(block, dtype=torch.float64)) for block in blocks if block.numel()]
    return math.sqrt(math.fsum(norm**2 for norm in norms))
