"""Lineage: a name of a peer's parameters, made of its beginning, its recipe and every update. No I/O, no clock.

Two peers of one lineage began with the same parameters and the same recipe. They took the same averages, bit for bit,
in the same order and with the same hyperparameters. On machines of one kind their parameters are then identical.
Different processors and versions of torch may round an optimizer's arithmetic differently. A lineage does not show
that; the digests that peers compare every few updates do (:mod:`p2pavg.optim.coordination.drift`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from p2pavg.base.messages import pack
from p2pavg.optim.base.digest import digest_of

_FIRST = "p2pavg/lineage/first/2"
_NEXT = "p2pavg/lineage/next/2"
_OTHER_RULES = "p2pavg/lineage/rules/1"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Position of a peer in its run."""

    epoch: int
    """Updates since the run began."""
    state: bytes
    """32 bytes: the same for two peers only if they began alike and took the same updates in the same way."""

    def after(self, group_id: str, result: bytes = b"", numbers: bytes = b"") -> Lineage:
        """Return the lineage after an update with a group's average.

        Args:
            group_id: :attr:`p2pavg.Success.group_id`.
            result: digest of the averaged tensors; all of a group that succeeded hold the same bits.
            numbers: digest of the hyperparameters that the update was taken with.
        """
        epoch = self.epoch + 1
        packed = pack(_NEXT, self.state, epoch, group_id, result, numbers)
        return Lineage(epoch, hashlib.sha256(packed).digest())

    def with_rules(self, rules: bytes) -> Lineage:
        """Return the lineage of a peer that continues from here with other rules than the run had so far.

        Args:
            rules: digest of the new rules. Peers that continue with the same ones stay together.
        """
        return Lineage(self.epoch, hashlib.sha256(pack(_OTHER_RULES, self.state, rules)).digest())


def first_lineage(parameters: Iterable[torch.Tensor], recipe: bytes = b"") -> Lineage:
    """Return the lineage of a peer that begins.

    Args:
        parameters: the first parameters; shapes, dtypes, bytes and order count.
        recipe: digest of the peer's recipe.
    """
    return lineage_from(digest_of(parameters), recipe)


def lineage_from(parameters: bytes, recipe: bytes = b"") -> Lineage:
    """Return the same as :func:`first_lineage`, from the parameters' digest."""
    return Lineage(0, hashlib.sha256(pack(_FIRST, parameters, recipe)).digest())
