"""Parameters that are spread over the ranks of one peer: each rank averages its own part of them.

With FSDP (``torch.distributed.fsdp.fully_shard``) a parameter is a DTensor, of which each rank holds a shard. Ranks of
the same number of all peers hold the same shard, and average it in a run of their own, so that nothing is gathered.
"""

from __future__ import annotations

import hashlib
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
    """Of the run in which the ranks of one number average their shard.

    Args:
        config: of all ranks of all peers.
        rank: 0 to ``ranks - 1``, within the peer.
        ranks: over which each peer spreads its parameters; the same for all peers.

    Raises:
        ValueError: no such rank.
        ConfigError: the run's id becomes too long.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank!r}")
    return replace(config, run_id=f"{config.run_id}/shard {rank} of {ranks}")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process: a DTensor's shard, and any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(torch.Tensor, to_local())


def spread_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of which ``local`` is this process' part, spread as ``parameter`` is."""
    if not hasattr(parameter, "to_local"):
        return local
    from torch.distributed.tensor import DTensor  # needs a torch that was built with torch.distributed

    like = cast(Any, parameter)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole_of(value: torch.Tensor) -> float:
    """A number, which a DTensor may hold in parts. All ranks call it."""
    full = getattr(value, "full_tensor", None)
    return float(value if full is None else full())


class Ranks:
    """The ranks of one peer, which decide alike.

    Args:
        group: of ``torch.distributed``; ``None`` where the peer is one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def as_the_first(self, decide: Callable[[], T]) -> T:
        """What the first rank decides."""
        if self._group is None:
            return decide()
        import torch.distributed as dist

        found = [decide() if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return cast(T, found[0])

    def as_one(self, name: str) -> str:
        """One name for what each rank has another name of: a digest of all, in their order; the name of one alone."""
        if self._group is None:
            return name
        return hashlib.sha256(pack(*self.gather(name))).hexdigest()

    @property
    def are_several(self) -> bool:
        """Whether the peer is several processes."""
        return self._group is not None

    def check_batch(self, tensors: Sequence[torch.Tensor], samples: float) -> None:
        """Raise AccumulateError on all ranks when a value of one is not finite, or their samples are not the same.

        A peer that is one process checks when it accumulates.
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
        """Act on every rank. What one of them raises as P2PAvgError, each of them raises."""
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
        """Whether it is so on every rank."""
        return all(self.gather(here))

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in their order."""
        if self._group is None:
            return [mine]
        import torch.distributed as dist

        found: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        return cast(list[T], found)
