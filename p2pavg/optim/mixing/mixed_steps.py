"""The outer steps of a peer that mixes: what it contributes, and its own step from its own anchor.

A peer with the anchor x and the parameters p contributes the point x + ahead * (p - x). The outer optimizer steps from
the own anchor, and its gradient is the anchor minus the group's average point c:

    g <- x - c
    m <- momentum * m + g
    x <- x - lr * m

With a rate of 1, no momentum and ``ahead`` 1 that is gossip: x becomes the average of the group's parameters. NoLoCo's
step (Kolehmainen et al. 2025, arXiv 2506.10911) has the pseudo-gradients D = p - x and the anchors in two terms,

    d <- alpha * d + beta * mean(D) - gamma * (x - mean(x)),    x <- x + d

and is this one with lr = gamma, momentum = alpha and ahead = beta / gamma, as d = -lr * m shows: the two
means are those of one vector, so a peer sends half of the bytes. With equal beta and gamma the vector is p itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.local.anchor import Anchor, Change
from p2pavg.optim.local.local_options import LocalOptions
from p2pavg.optim.local.outer_steps import OuterSteps
from p2pavg.optim.mixing.mixing import ROUND
from p2pavg.optim.ranks.shards import Ranks

SKETCH = 1024
"""Values of a random projection: the squared distance between two has a relative standard error of sqrt(2 / 1024)."""
_AT_ONCE = 2**20
# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed numbers of 64 bits.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@torch.no_grad()
def sketch_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a random projection of tensors to 1,024 values, float32, linear in the tensors.

    Element i is added with a sign that is drawn from i to the value i modulo 1,024. So the expected square of the
    difference of two projections is that of the difference of the tensors (Charikar et al. 2002, count sketch).
    """
    found = torch.zeros(SKETCH, dtype=torch.float32, device="cpu")
    at = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _AT_ONCE):
            part = flat[start : start + _AT_ONCE].float().cpu()
            first = at % SKETCH
            signed = torch.zeros(
                -(-(first + part.numel()) // SKETCH) * SKETCH, dtype=torch.float32, device="cpu"
            )
            signed[first : first + part.numel()] = part * _signs(at, part.numel())
            found += signed.view(-1, SKETCH).sum(0)
            at += part.numel()
    return found


def _signs(first: int, count: int) -> torch.Tensor:
    """Return the signs of ``count`` elements from the position ``first`` on, by splitmix64."""
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * _MIX[0]
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX[1]
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX[2]
    return 1.0 - 2.0 * (_shifted(mixed, 31) & 1).float()


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 values shifted to the right, with zeros from the left."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def check_sketch(sketch: object) -> None:
    """Raise ValueError if this is no projection of a saved state."""
    if not isinstance(sketch, torch.Tensor) or tuple(sketch.shape) != (SKETCH,):
        raise ValueError("state: its projection of the first parameters is malformed")
    if not bool(sketch.isfinite().all()):
        raise ValueError("state: its projection of the first parameters has values that are not finite")


class MixedSteps(OuterSteps):
    """The outer steps of one optimizer that mixes.

    Args:
        ahead: multiple of this peer's progress since its anchor that it contributes beyond the anchor.
    """

    def __init__(
        self,
        anchor: Anchor,
        parts: ModelParts,
        options: LocalOptions,
        ranks: Ranks,
        change: Change,
        *,
        ahead: float,
    ) -> None:
        super().__init__(anchor, parts, None, options, ranks, change)
        self._ahead = ahead
        self._origin: torch.Tensor | None = None
        self._mine = torch.zeros(SKETCH, dtype=torch.float32, device="cpu")
        elements = sum(tensor.numel() for tensor in anchor.tensors)
        # Codecs scale values in blocks, so the projection's are made as large as those of the anchors' changes.
        self._scale = math.sqrt(SKETCH / max(elements, 1))
        self.distance: float | None = None
        """Estimated distance from this peer's anchor to its group's mean anchor, before the last outer step."""
        self.contributed_round = 0.0
        """This peer's round number, as its last contribution has it."""

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes, dtypes and devices of what is averaged beside the buffers."""
        return [*self.anchor.like, torch.zeros(SKETCH, dtype=torch.float32, device="cpu")]

    @property
    def origin(self) -> torch.Tensor:
        """Projection of the anchor with which the run began; the others measure their anchors from the same."""
        return sketch_of(self.anchor.tensors) if self._origin is None else self._origin

    def begin_from(self, origin: torch.Tensor | None) -> None:
        """Set the projection of the run's first anchor; ``None``: that of the anchor at the first contribution."""
        self._origin = None if origin is None else origin.float().clone()

    def contribute(self, fragment: int, now: float) -> tuple[list[torch.Tensor], float, dict[str, float]]:
        """Return what this peer contributes to the next round: tensors, weight and metrics."""
        pseudo, weight, means = super().contribute(fragment, now)
        count = len(self.anchor.tensors)
        points = [
            torch.sub(anchor, away, alpha=self._ahead)
            for anchor, away in zip(self.anchor.tensors, pseudo[:count], strict=True)
        ]
        self._origin = self.origin
        self._mine = (sketch_of(self.anchor.tensors) - self._origin) * self._scale
        self.contributed_round = means.get(ROUND, 0.0)
        return [*points, self._mine, *pseudo[count:]], weight, means

    def _step(self, fragment: int, averaged: list[torch.Tensor]) -> float:
        count = len(self.anchor.tensors)
        self._parts.take(averaged[count + 1 :])
        self.distance = float((self._mine - averaged[count].cpu()).norm()) / self._scale
        gradients = [
            anchor - point for anchor, point in zip(self.anchor.tensors, averaged[:count], strict=True)
        ]
        return self.anchor.step(fragment, gradients, self._change, self._ranks.norm)
