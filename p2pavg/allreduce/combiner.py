"""Combines the contributions to one share, or of one site, part by part, by the rule of the group. No I/O, no clock.

Safe to use from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import nullcontext

import torch

from p2pavg.allreduce.norm_check import NormCheck
from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.aggregation import Aggregation
from p2pavg.group.norms import norm_factors
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec


class Combiner:
    """The rule by which one reducer combines contributions, and what it remembers of them from part to part.

    Args:
        weights: of the contributions that are combined, by the peer ids of their senders.
    """

    def __init__(
        self,
        roster: Roster,
        aggregation: Aggregation,
        codec: Codec,
        buffers: Buffers,
        weights: Mapping[str, float],
    ) -> None:
        self._weights = weights
        self._total_weight = math.fsum(weights.values())
        self._robust = aggregation.robust
        self._factors = norm_factors(roster, aggregation.max_norm)
        self._norm_check = None if aggregation.max_norm is None else NormCheck(roster)
        self._codec = codec
        self._buffers = buffers
        # A robust rule decodes all contributions to a part: those of one part at a time, however many are complete.
        self._one_at_a_time = threading.Lock() if aggregation.robust else nullcontext()

    def combine(self, values: Mapping[str, torch.Tensor | Buffer], out: torch.Tensor) -> memoryview:
        """Combine all contributions to a part.

        Args:
            values: the part of each contributor, by peer id: float32, or what the codec made of it.
            out: where the result goes, float32 of the part's length, on the CPU.

        Returns:
            The encoded part; with a codec that changes nothing, the bytes of ``out``.

        Raises:
            BadContributionError: a member's part does not decode, or is longer than the member signed.
        """
        contributions = [
            PartContribution(peer_id, weight, values[peer_id], self._factors.get(peer_id, 1.0))
            for peer_id, weight in self._weights.items()
        ]
        with self._one_at_a_time:
            return average_part(
                self._codec,
                contributions,
                self._total_weight,
                out,
                robust=self._robust,
                check=self._norm_check,
                floats=self._buffers.floats,
                payload=self._room(out.numel()),
            )

    def _room(self, elements: int) -> memoryview | None:
        return None if self._codec.is_identity else self._buffers.bytes(self._codec.encoded_nbytes(elements))
