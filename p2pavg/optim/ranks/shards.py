"""Divided parameters: each rank of a peer averages its own part of them.

With FSDP (``torch.distributed.fsdp.fully_shard``) a parameter is a DTensor, and each rank holds a shard of it. With
pipeline stages each rank holds other layers. Ranks with the same number hold the same part on all peers. They average
it in a run of their own, so no gathering is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from p2pavg.base.errors import AccumulateError, P2PAvgError
from p2pavg.base.messages import pack
from p2pavg.optim.base.state import tensor_digest
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.runs.config import AveragingConfig

if TYPE_CHECKING:
    import torch.distributed as dist

# Which ranks of one peer hold the same parts of parameters.
#
# A parameter that tensor parallelism leaves whole is the same on all ranks, and so is a replica of a shard. Each rank
# averages in a round of its own, whose result may differ in its last bits. So of all ranks that hold one part, the
# first one's average counts.

Keys = Sequence[Hashable]
"""For each of a rank's parameters, the place of its part. Two ranks with the same place hold the same part."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The parts that one rank has in common with other ranks of its peer."""

    is_first: tuple[bool, ...]
    """For each parameter, whether this rank is the first one that holds its part."""
    takes: tuple[tuple[int, int], ...] = ()
    """(parameter, rank) of each part that this rank takes from another one."""
    gives: tuple[tuple[int, int], ...] = ()
    """(parameter, rank) of each part that this rank gives to another one."""


def sharing_of(keys: Sequence[Keys], rank: int) -> Sharing:
    """Return the parts that a rank has in common with others.

    Args:
        keys: those of all ranks, in their order.
        rank: number of the rank.
    """
    is_first: list[bool] = []
    takes: list[tuple[int, int]] = []
    gives: list[tuple[int, int]] = []
    for index, ranks in _holders(keys):
        if rank == ranks[0]:
            gives += [(index, other) for other in ranks[1:]]
        elif rank in ranks:
            takes.append((index, ranks[0]))
        if rank in ranks:
            is_first.append(rank == ranks[0])
    return Sharing(tuple(is_first), tuple(takes), tuple(gives))


def are_common(keys: Sequence[Keys]) -> list[bool]:
    """Return for each number of a parameter whether any two ranks hold the same part of it."""
    found = [False] * max(map(len, keys), default=0)
    for index, ranks in _holders(keys):
        found[index] = found[index] or len(ranks) > 1
    return found


def first_difference(keys: Sequence[Keys], values: Sequence[Sequence[bytes]]) -> tuple[int, int, int] | None:
    """Return (parameter, rank, other rank) of the first part that two ranks hold with different values.

    Args:
        keys: those of all ranks.
        values: digests of the ranks' parts, parameter by parameter.
    """
    for index, ranks in _holders(keys):
        for other in ranks[1:]:
            if values[other][index] != values[ranks[0]][index]:
                return index, ranks[0], other
    return None


def _holders(keys: Sequence[Keys]) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each parameter, with the ranks that hold one part of it, in ascending order."""
    for index in range(max(map(len, keys), default=0)):
        found: dict[Hashable, list[int]] = {}
        for rank, mine in enumerate(keys):
            if index < len(mine):
                found.setdefault(mine[index], []).append(rank)
        for ranks in found.values():
            yield index, ranks


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


def total_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the L2 norm of this process's parts of all tensors.

    It is summed in float64. Peers scale what all of them take by factors of norms, and the sums of float32 differ from
    processor to processor in the digits that count.
    """
    norms = [
        float(torch.linalg.vector_norm(part.detach(), dtype=torch.float64))
        for part in map(local_of, tensors)
        if part.numel()
    ]
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def _place_of(parameter: torch.Tensor, stage: int) -> Hashable:
    """Return the place of this rank's part of a parameter, by its layout."""
    if not hasattr(parameter, "to_local"):
        return (stage,)
    like = cast(Any, parameter)
    at = like.device_mesh.get_coordinate() or ()
    # Coordinates along dimensions of replicas are left out: ranks that differ only in these hold the same part.
    divided = [not placement.is_replicate() for placement in like.placements]
    return (stage, *(each for each, is_divided in zip(at, divided, strict=False) if is_divided))


class RankRefusedError(ValueError):
    """Another rank of this peer could not make its optimizer."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The words of a rank that could not make its optimizer."""

    text: str


class Ranks:
    """The ranks of one peer, which take all decisions together.

    Args:
        group: group of ``torch.distributed``, or the mesh of a peer that divides its model; ``None`` for a peer of one
            process.
    """

    def __init__(self, group: dist.ProcessGroup | PeerMesh | None) -> None:
        if group is not None and not isinstance(group, PeerMesh) and not hasattr(group, "size"):
            raise TypeError(
                "process_group must be a group of torch.distributed or a PeerMesh, got "
                + type(group).__name__
            )
        self._group = group.group if isinstance(group, PeerMesh) else group
        self._stage = group.stage if isinstance(group, PeerMesh) else 0
        self._sharing: Sharing | None = None
        self.hold_copies = False
        """True if any two ranks hold the same part of a parameter."""

    def share(self, parameters: Sequence[torch.Tensor], labels: Sequence[str]) -> None:
        """Find out which ranks hold the same parts of parameters; call it on all ranks, before :meth:`settle`.

        Args:
            parameters: this rank's.
            labels: their names; there may be more of them.

        Raises:
            ValueError: two ranks hold the same part by its layout, and their values differ.
        """
        if self._group is None:
            return
        import torch.distributed as dist

        # Layouts are compared before values: digests of all parameters would take long.
        keys = self.gather([_place_of(parameter, self._stage) for parameter in parameters])
        common = are_common(keys)
        self.hold_copies = any(common)
        values = self.gather(
            [
                tensor_digest(local_of(parameter)) if is_common else b""
                for parameter, is_common in zip(parameters, common, strict=False)
            ]
        )
        # Two different layers may have the same layout. Averaged as one, they would replace each other.
        if differing := first_difference(keys, values):
            index, one, other = differing
            names = self.gather(list(labels))
            raise ValueError(
                f"{names[one][index]} of rank {one} and {names[other][index]} of rank {other} of this peer are the same"
                " tensor by their layout, and have different values. If these ranks hold different layers, name the"
                " dimension of the stages: process_group=PeerMesh(mesh, stages=...). Otherwise begin with the same"
                " values on both"
            )
        self._sharing = sharing_of(keys, dist.get_rank(self._group))

    def settle(self, averaged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages that all ranks of this peer take, where several have averaged the same part.

        Args:
            averaged: this rank's averages, the first of them in the order of its parameters.
        """
        found = list(averaged)
        if self._sharing is None or not self.hold_copies:
            return found
        import torch.distributed as dist

        exchanges = []
        # Each of these ranks has averaged in a round of its own, and may differ in the last bits: the first one counts.
        for index, other in self._sharing.gives:
            tensor = found[index].contiguous()
            exchanges.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=other))
        for index, first in self._sharing.takes:
            found[index] = torch.empty_like(found[index], memory_format=torch.contiguous_format)
            exchanges.append(dist.P2POp(dist.irecv, found[index], group=self._group, group_peer=first))
        # All at once: two ranks that each send first would wait for each other.
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        return found

    def norm(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return the L2 norm over all ranks of tensors in the order of the parameters; a shared part counts once."""
        if self._sharing is None or not self.hold_copies:
            return self.norm_of(total_norm(tensors))
        pairs = zip(tensors, self._sharing.is_first, strict=True)
        return self.norm_of(total_norm([tensor for tensor, is_first in pairs if is_first]))

    def refuse(self, error: Exception) -> None:
        """Let the other ranks' next :meth:`gather` raise a ValueError: this rank cannot make its optimizer."""
        self.gather(_Refusal(str(error) or type(error).__name__), is_refusal=True)

    def as_the_first(self, decide: Callable[[], T]) -> T:
        """Return the first rank's decision on all ranks."""
        if self._group is None:
            return decide()
        import torch.distributed as dist

        # The other ranks do not even look: their clocks and records may say something else.
        found = [decide() if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return cast(T, found[0])

    def as_one(self, name: str) -> str:
        """Return one common name for the ranks' different names: their digest, or the name itself for a single rank."""
        if self._group is None:
            return name
        # Each rank averages in a run of its own, whose groups have other ids.
        return hashlib.sha256(pack(*self.gather(name))).hexdigest()

    @property
    def is_first(self) -> bool:
        """True on the first rank, and for a peer of one process."""
        if self._group is None:
            return True
        import torch.distributed as dist

        return dist.get_rank(self._group) == 0

    def others_in(self, group: dist.ProcessGroup | None) -> list[int]:
        """Return the other ranks of this group that are in another one too, by their numbers among all processes."""
        if self._group is None or group is None:
            return []
        import torch.distributed as dist

        mine = set(dist.get_process_group_ranks(self._group)) - {dist.get_rank()}
        return sorted(mine & set(dist.get_process_group_ranks(group)))

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
        # Before any rank accumulates: of a batch that one rank refuses, no other may keep its shards.
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
            # Kept until the ranks have met: the others wait for this one in the collective below.
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

    def gather(self, mine: T, *, is_refusal: bool = False) -> list[T]:
        """Return the values of all ranks, in their order.

        Args:
            mine: this rank's value.
            is_refusal: true for :meth:`refuse`.

        Raises:
            ValueError: another rank has refused.
        """
        if self._group is None:
            return [mine]
        import torch.distributed as dist

        found: list[T | None] = [None] * dist.get_world_size(self._group)
        # Objects and not tensors: what is agreed on is small, and of many types.
        dist.all_gather_object(found, mine, group=self._group)
        for rank, other in enumerate(found):
            # A rank that refuses is in no later collective. Without this, the others would wait for it in the next one.
            if isinstance(other, _Refusal) and not is_refusal:
                raise RankRefusedError(f"on rank {rank} of this peer: {other.text}")
        return cast(list[T], found)
