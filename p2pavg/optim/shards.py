"""Sharded parameters: each rank of a peer averages its own shard of them.

With FSDP (``torch.distributed.fsdp.fully_shard``) a parameter is a DTensor, and each rank holds a shard of it. Ranks
with the same number hold the same shard on all peers. They average it in a run of their own, so no gathering is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from p2pavg.config import AveragingConfig
from p2pavg.encoding import pack
from p2pavg.errors import AccumulateError, P2PAvgError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


def shard_config(config: AveragingConfig, rank: int, ranks: int) -> AveragingConfig:
    """Return the configuration of the run in which all ranks with this number average their shard.

    Args:
        config: common configuration of all ranks of all peers.
        rank: number of the rank within its peer, 0 to ``ranks - 1``.
        ranks: number of ranks over which each peer shards its parameters; the same for all peers.

    Raises:
        ValueError: ``rank`` is out of range.
        ConfigError: the run's id becomes too long.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank!r}")
    return replace(config, run_id=f"{config.run_id}/shard {rank} of {ranks}")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor: a DTensor's shard, and any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(torch.Tensor, to_local())


def spread_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the layout of ``parameter``; ``local`` is this process's part of it."""
    if not hasattr(parameter, "to_local"):
        return local
    from torch.distributed.tensor import DTensor  # needs a torch that was built with torch.distributed

    like = cast(Any, parameter)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole_of(value: torch.Tensor) -> float:
    """Return the number in a tensor, which may be a DTensor; call it on all ranks."""
    full = getattr(value, "full_tensor", None)
    return float(value if full is None else full())


class Ranks:
    """The ranks of one peer, which take all decisions together.

    Args:
        group: group of ``torch.distributed``; ``None`` for a peer of one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def as_the_first(self, decide: Callable[[], T]) -> T:
        """Return the first rank's decision on all ranks."""
        if self._group is None:
            return decide()
        import torch.distributed as dist

        found = [decide() if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return cast(T, found[0])

    def as_one(self, name: str) -> str:
        """Return one common name for the ranks' different names: their digest, or the name itself for a single rank."""
        if self._group is None:
            return name
        return hashlib.sha256(pack(*self.gather(name))).hexdigest()

    @property
    def is_first(self) -> bool:
        """True on the first rank, and for a peer of one process."""
        if self._group is None:
            return True
        import torch.distributed as dist

        return dist.get_rank(self._group) == 0

    @property
    def are_several(self) -> bool:
        """True if the peer has several processes."""
        return self._group is not None

    def check_batch(self, tensors: Sequence[torch.Tensor], samples: float) -> None:
        """Raise AccumulateError on all ranks if a value on one is not finite, or their samples differ.

        A peer of one process checks this when it accumulates.
        """
        if self._group is None:
            return
        found = self.gather((all(bool(tensor.isfinite().all()) for tensor in tensors), samples))
        if not all(finite for finite, _ in found):
            raise AccumulateError(
                "a gradient on one of this peer's ranks holds NaN or Inf; nothing was accumulated"
            )
        if any(count != samples for _, count in found):
            raise AccumulateError(
                f"samples are those of all ranks together, the same number on each; got {[n for _, n in found]}"
            )

    def on_all(self, act: Callable[[], None]) -> None:
        """Act on every rank; if one rank raises a P2PAvgError, all ranks raise one."""
        wrong: P2PAvgError | None = None
        try:
            act()
        except P2PAvgError as error:
            wrong = error
        found = self.gather(None if wrong is None else str(wrong))
        if wrong is not None:
            raise wrong
        for text in found:
            if text is not None:
                raise AccumulateError(f"on another rank of this peer: {text}")

    def all_agree(self, here: bool) -> bool:
        """Return whether a condition holds on every rank."""
        return all(self.gather(here))

    def norm_of(self, mine: float) -> float:
        """Return the L2 norm over all ranks' shards; ``mine`` is that of this rank's."""
        return (
            mine if self._group is None else math.sqrt(math.fsum(part * part for part in self.gather(mine)))
        )

    def gather(self, mine: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if self._group is None:
            return [mine]
        import torch.distributed as dist

        found: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        return cast(list[T], found)
