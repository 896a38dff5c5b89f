"""The contributions of one peer's processes, combined as those of as many peers would be. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from p2pavg.allreduce.reduction import Contribution, average_part
from p2pavg.allreduce.vector.accumulation import LIMIT
from p2pavg.base.errors import AccumulateError
from p2pavg.group.aggregation import RobustRule
from p2pavg_compression import Fp32

SLICE = 2**20
"""Elements that are combined at once."""


class ProcessContributionError(AccumulateError):
    """A process has written values that cannot be averaged."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the contribution of the process {name} holds NaN, Inf or a value of more than {LIMIT:g}"
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class Part:
    """The contribution of one process."""

    name: str
    weight: float
    values: torch.Tensor
    """float32, in memory that the process shares."""


@torch.no_grad()
def combine(parts: Sequence[Part], out: torch.Tensor, robust: RobustRule | None = None) -> None:
    """Combine contributions into ``out``, float32 of their length.

    Each value is copied once, before it is checked: its process can change the shared memory at any time. The
    arithmetic and the order, that of ``parts``, are those of a group of as many peers with the codec fp32.

    Raises:
        ProcessContributionError: a value is not finite, or too large.
    """
    codec, total = Fp32(), sum(part.weight for part in parts)
    rooms = [torch.empty(min(SLICE, out.numel())) for _ in parts]
    for start in range(0, out.numel(), SLICE):
        piece = out[start : start + SLICE]
        copies = []
        for part, room in zip(parts, rooms, strict=True):
            copy = room[: piece.numel()]
            copy.copy_(part.values[start : start + SLICE])
            if not bool(torch.stack(torch.aminmax(copy)).abs().amax() <= LIMIT):
                raise ProcessContributionError(part.name)
            copies.append(Contribution(part.name, part.weight, copy))
        average_part(codec, copies, total, piece, robust=robust)
