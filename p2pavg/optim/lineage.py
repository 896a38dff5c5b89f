"""Which parameters a peer has, as a name: where it began, and every update since. No I/O, no clock.

Two peers of one lineage took the same updates, bit for bit, in the same order, from the same parameters. On machines
of one kind their parameters are then identical; kinds of processors and versions of torch may round an optimizer's
arithmetic differently, and a lineage does not see that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from p2pavg.net.wire import pack

_FIRST = "p2pavg/lineage/first/1"
_NEXT = "p2pavg/lineage/next/1"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a peer stands."""

    epoch: int
    """Updates since the run began."""
    state: bytes
    """32 bytes: the same for two peers only if they began alike and took the same updates."""

    def after(self, group_id: str) -> Lineage:
        """Once the average of a group has been taken as an update.

        Args:
            group_id: :attr:`p2pavg.Success.group_id`; all of a group that succeeded hold the same bits.
        """
        epoch = self.epoch + 1
        return Lineage(epoch, hashlib.sha256(pack(_NEXT, self.state, epoch, group_id)).digest())


@torch.no_grad()
def first_lineage(parameters: Iterable[torch.Tensor]) -> Lineage:
    """Of a peer that begins: a digest of the parameters' shapes, dtypes and bytes, in their order."""
    digest = hashlib.sha256(_FIRST.encode())
    for parameter in parameters:
        values = parameter.detach().contiguous().cpu()
        digest.update(f"{tuple(values.shape)}:{values.dtype};".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return Lineage(0, digest.digest())
