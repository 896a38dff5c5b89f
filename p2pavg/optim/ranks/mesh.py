"""The ranks of one peer as a mesh: pipeline stages, tensor parallel ranks, shards, and copies of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from p2pavg.runs.config import AveragingConfig

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


# The division of a model among the ranks of one peer: which rank holds which part.


@dataclass(frozen=True, slots=True)
class Division:
    """The dimensions of a peer's mesh of ranks, as ``torch.distributed.device_mesh`` has them.

    Args:
        names: names of the dimensions.
        sizes: number of ranks along each of them.
        stages: name of the dimension along which the ranks hold different layers; ``None`` if there is none.
        copies: name of the dimension along which the ranks hold the same parameters; ``None`` if there is none.

    Raises:
        ValueError: a name is none of the mesh, or stands for two things.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stages: str | None = None
    copies: str | None = None

    def __post_init__(self) -> None:
        for argument in ("stages", "copies"):
            name = getattr(self, argument)
            if name is not None and name not in self.names:
                raise ValueError(
                    f"{argument} is {name!r}, and mesh has the dimensions {', '.join(self.names)}: give one of these"
                )
        if self.stages is not None and self.stages == self.copies:
            raise ValueError(
                f"copies is {self.copies!r}, as stages is: ranks of different stages hold different parameters."
                " Name another dimension, or leave one of both out"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> str:
        """The mesh as a text, such as ``pp 2 x dp 2``."""
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))

    def stage(self, coordinates: Sequence[int]) -> int:
        """Return the number of a rank's stage."""
        return self._along(self.stages, coordinates)

    def copy(self, coordinates: Sequence[int]) -> int:
        """Return the number of the copy of the model that a rank holds a part of."""
        return self._along(self.copies, coordinates)

    def part(self, coordinates: Sequence[int]) -> str:
        """Return a text that ranks share if they hold the same part, such as ``pp 0 of 2, tp 1 of 2``.

        Dimensions of one rank are left out, so it is empty if no part is divided.
        """
        return ", ".join(
            f"{name} {at} of {size}"
            for name, size, at in zip(self.names, self.sizes, coordinates, strict=True)
            if name != self.copies and size > 1
        )

    def groups(self) -> list[list[int]]:
        """Return the positions of each copy's ranks in the flattened mesh, copy by copy."""
        found: dict[int, list[int]] = {}
        for position, coordinates in enumerate(itertools.product(*map(range, self.sizes))):
            found.setdefault(self.copy(coordinates), []).append(position)
        return [found[copy] for copy in sorted(found)]

    def _along(self, name: str | None, coordinates: Sequence[int]) -> int:
        return 0 if name is None else coordinates[self.names.index(name)]


class PeerMesh:
    """Says how the ranks of one peer divide a model; make it on all ranks of the peer together.

    Each rank averages its part with the rank of the other peers that holds the same part. Ranks that hold copies of one
    part average it once: the first of them does, and the others copy the result::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp_shard"))
        place = PeerMesh(mesh, stages="pp")
        with open_averager(place.config(config), bootstrap=bootstrap) as averager:
            optimizer = divided_optimizer(inner, averager, place, model=stage_module, target_batch_size=4096)

    Along any other dimension than ``stages`` and ``copies``, parameters are either divided, as DTensors are by FSDP and
    tensor parallelism, or the same on all ranks.

    Args:
        mesh: mesh of all ranks of this peer, with names of its dimensions.
        stages: name of the dimension along which ranks hold different layers, for ``torch.distributed.pipelining``.
        copies: name of the dimension along which all parameters are the same: the replicas of HSDP, or of
            ``DistributedDataParallel`` in each stage.

    Raises:
        TypeError: ``mesh`` is no ``DeviceMesh``.
        ValueError: ``mesh`` has no names, lacks ranks of this peer, or has no dimension of the name given.
    """

    def __init__(self, mesh: DeviceMesh, *, stages: str | None = None, copies: str | None = None) -> None:
        import torch.distributed as dist  # needs a torch that was built with it
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a DeviceMesh, got {type(mesh).__name__}: make one with"
                " torch.distributed.device_mesh.init_device_mesh"
            )
        names = mesh.mesh_dim_names
        if not names:
            raise ValueError(
                'mesh has no names of its dimensions: give init_device_mesh mesh_dim_names, such as ("pp", "tp")'
            )
        self.division = Division(tuple(names), tuple(mesh.shape), stages, copies)
        """The dimensions, and what they mean."""
        present = dist.get_world_size()
        if self.division.ranks != present:
            raise ValueError(
                f"mesh ({self.division.shape}) has {self.division.ranks} ranks, and this peer has {present}: make it of"
                f" all ranks, or start {self.division.ranks} with torchrun --nproc-per-node={self.division.ranks}"
            )
        coordinates = mesh.get_coordinate()
        assert coordinates is not None  # all ranks are in it
        self.mesh = mesh
        self._at = tuple(coordinates)
        self.group = self._group_of_my_copy()
        """The ranks that together hold one copy of the model, this one among them."""

    def _group_of_my_copy(self) -> dist.ProcessGroup:
        import torch.distributed as dist

        positions = self.division.groups()
        everyone = dist.group.WORLD
        assert everyone is not None  # the mesh has made it
        if len(positions) == 1:
            return everyone
        ranks = self.mesh.mesh.flatten().tolist()
        enumerated = [[ranks[each] for each in copy] for copy in positions]
        mine, _ = dist.new_subgroups_by_enumeration(enumerated)  # type: ignore[no-untyped-call]
        return cast("dist.ProcessGroup", mine)

    @property
    def stage(self) -> int:
        """Number of this rank's pipeline stage, from 0."""
        return self.division.stage(self._at)

    @property
    def part(self) -> str:
        """The name of this rank's part of the model: the same for ranks of all peers that average it together."""
        return self.division.part(self._at)

    @property
    def averages(self) -> bool:
        """True if this rank has an averager: it is in the first copy of the model."""
        return self.division.copy(self._at) == 0

    @property
    def copies_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part as this one; ``None`` without copies."""
        return None if self.division.copies is None else self.mesh.get_group(self.division.copies)

    def config(self, config: AveragingConfig) -> AveragingConfig:
        """Return the configuration of the run in which this rank's part is averaged.

        Args:
            config: common configuration of all ranks of all peers. All peers divide the model in the same way.

        Raises:
            ConfigError: the run's id becomes too long.
        """
        return replace(config, run_id=f"{config.run_id}/{self.part}") if self.part else config
