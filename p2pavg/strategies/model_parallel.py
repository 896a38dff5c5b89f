"""The strategy of peers that divide their model among several ranks, as a frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.optim import (
    AveragedOptimizer,
    CellOptimizer,
    LocalUpdates,
    PeerMesh,
    ReplicatedOptimizer,
    divided_optimizer,
)
from p2pavg.population.settings import check_whole
from p2pavg.strategies.base import Given, Strategy, check_one_of
from p2pavg.strategies.kinds import RECIPES, DataParallel, Federated

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

MAX_RANKS = 2**16
SIZES: Mapping[str, str] = MappingProxyType(
    {"stages": "stage", "copies": "copy", "shards": "shard", "tensor": "tensor"}
)
"""The sizes of the strategy, with the names of their dimensions in the mesh, from the outermost one."""
SCHEDULES: Mapping[str, str] = MappingProxyType({"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"})
"""Names of the schedules, and of their classes in ``torch.distributed.pipelining``."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallel(Strategy):
    """Each peer divides the model among its ranks, and each part is averaged with the same part of the other peers.

    A peer has ``stages * copies * shards * tensor`` ranks. Its optimizer is that of ``training``, as
    :func:`~p2pavg.optim.divided_optimizer` makes it. Call ``optimizer`` on all ranks of the peer together, with
    ``place=`` from :meth:`place`, and with an averager of ``place.config(strategy.config(config))``: ``None`` on the
    ranks for which ``place.averages`` is false. It raises ``ValueError`` as :func:`~p2pavg.optim.divided_optimizer`
    does, on all ranks.

    Args:
        training: how the peers train together: :class:`DataParallel` without ``overlap`` and ``cells``, or
            :class:`Federated` without ``delay`` and with a ``selection`` of 1.
        stages: number of pipeline stages; each has its own layers.
        copies: number of copies of the model in a peer, which take different batches: HSDP's replicas.
        shards: number of ranks among which FSDP shards the parameters of a stage.
        tensor: number of ranks among which tensor parallelism divides layers.
        microbatches: number of parts into which a pipeline cuts a batch; at least ``stages``. Needed with stages.
        schedule: ``"1f1b"`` or ``"gpipe"``: the order in which a pipeline computes its micro-batches.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "model_parallel"

    training: DataParallel | Federated
    stages: int = 1
    copies: int = 1
    shards: int = 1
    tensor: int = 1
    microbatches: int | None = None
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in SIZES:
            check_whole(name, getattr(self, name), 1, MAX_RANKS)
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"stages * copies * shards * tensor is {self.ranks}, {MAX_RANKS} is the most")
        check_one_of("schedule", self.schedule, SCHEDULES)
        self._check_microbatches()
        self._check_training()

    def _check_microbatches(self) -> None:
        if self.microbatches is None and self.stages > 1:
            raise ConfigError(f"microbatches is missing: give {self.stages} or more for {self.stages} stages")
        if self.microbatches is not None:
            check_whole("microbatches", self.microbatches, 1, MAX_RANKS)
            if self.microbatches < self.stages:
                raise ConfigError(
                    f"microbatches must be at least stages, {self.stages}, got {self.microbatches}: with fewer, stages"
                    " wait for each other"
                )

    def _check_training(self) -> None:
        training = self.training
        if not isinstance(training, DataParallel | Federated):
            raise ConfigError(f"training must be DataParallel or Federated, got {type(training).__name__}")
        if isinstance(training, DataParallel):
            only: dict[str, Any] = {"overlap": False, "cells": None}
        elif RECIPES[training.rule].mixes:
            raise ConfigError(f"training.rule must not be {training.rule}: it is for peers of one process")
        else:
            only = {"delay": 0, "selection": 1.0} | ({"fragments": 1} if self.tensor > 1 else {})
        for name, value in only.items():
            if getattr(training, name) != value:
                raise ConfigError(
                    f"training.{name} must be {value} if ranks divide the model, got {getattr(training, name)!r}"
                )

    @property
    def ranks(self) -> int:
        """Number of ranks of a peer."""
        return math.prod(getattr(self, name) for name in SIZES)

    def place(self, device_type: str = "cpu") -> PeerMesh:
        """Return this rank's place in its peer; call it on all ranks of the peer together.

        Its ``mesh`` has the dimensions ``stage``, ``copy``, ``shard`` and ``tensor``, for ``fully_shard`` and
        ``parallelize_module``.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.

        Raises:
            ConfigError: the peer has another number of ranks.
        """
        import torch.distributed as dist  # needs a torch that was built with it
        from torch.distributed.device_mesh import init_device_mesh

        present = dist.get_world_size()
        if present != self.ranks:
            sizes = " * ".join(f"{name} {getattr(self, name)}" for name in SIZES if getattr(self, name) > 1)
            raise ConfigError(
                f"{sizes or 'this strategy'} needs {self.ranks} ranks, and this peer has {present}: start it with"
                f" torchrun --nproc-per-node={self.ranks}, or give the strategy other sizes"
            )
        shape = tuple(getattr(self, name) for name in SIZES)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(SIZES.values()))
        return PeerMesh(mesh, stages="stage", copies="copy" if self.copies > 1 else None)

    def pipeline(self, module: nn.Module, place: PeerMesh, loss: Loss) -> PipelineScheduleSingle:
        """Return the schedule that computes batches through the stages of this rank's pipeline.

        Its ``step(inputs)`` on the first stage, and ``step(target=targets, losses=losses)`` on the last one, leave in
        the gradients the mean over the batch, if ``loss`` is the mean over a micro-batch.

        Args:
            module: this rank's stage, on its device.
            place: from :meth:`place`.
            loss: of the last stage's output and the targets.

        Raises:
            ConfigError: the strategy has no stages, or ``place`` is another strategy's.
        """
        from torch.distributed import pipelining

        if self.stages == 1:
            raise ConfigError("stages is 1: there is no pipeline; call the module itself")
        self._check_place(place)
        device = next((p.device for p in module.parameters()), torch.device(place.mesh.device_type))
        group = place.mesh.get_group("stage")
        stage = pipelining.PipelineStage(module, place.stage, self.stages, device, group=group)
        made: PipelineScheduleSingle = getattr(pipelining, SCHEDULES[self.schedule])(
            stage, self.microbatches, loss_fn=loss
        )
        return made

    def _check_averager(self, averager: Averager | None) -> None:
        """Check nothing here: :func:`divided_optimizer` raises the errors of one rank on all ranks of the peer."""

    def _make(self, given: Given) -> AveragedOptimizer | LocalUpdates | ReplicatedOptimizer:
        self._check_place(given.options.get("place"))
        return divided_optimizer(
            given.inner, given.averager, model=given.model, recipe=self._part, **given.options
        )

    def _part(self, inner: Optimizer, averager: Averager, **options: Any) -> AveragedOptimizer | LocalUpdates:
        """Make the optimizer of one rank's part, as ``training`` says."""
        self._check_config(averager.config)
        made = self.training._make(Given(options.pop("model"), averager, inner, options))
        assert not isinstance(made, CellOptimizer)  # `training` has no cells
        return made

    def _check_place(self, place: PeerMesh | None) -> None:
        advice = "make it on all ranks with place = strategy.place(device_type)"
        if place is None:
            raise ConfigError(f"place is missing: {advice}")
        division = place.division
        sizes = dict(zip(division.names, division.sizes, strict=True))
        if sizes != {dimension: getattr(self, name) for name, dimension in SIZES.items()}:
            raise ConfigError(f"place is of the mesh {division.shape}, which is not the strategy's: {advice}")

    def _settings(self) -> dict[str, Any]:
        return self.training._settings()
