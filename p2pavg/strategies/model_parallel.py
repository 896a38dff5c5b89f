"""The strategy of peers that divide their model among several ranks, as a frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
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
from p2pavg.strategies.base import Strategy
from p2pavg.strategies.kinds import MIXES, DataParallel, Federated

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
    :func:`~p2pavg.optim.divided_optimizer` makes it.

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
            _check_size(name, getattr(self, name))
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"stages * copies * shards * tensor is {self.ranks}, {MAX_RANKS} is the most")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        self._check_microbatches()
        self._check_training()

    def _check_microbatches(self) -> None:
        if self.microbatches is None and self.stages > 1:
            raise ConfigError(f"microbatches is missing: give {self.stages} or more for {self.stages} stages")
        if self.microbatches is not None:
            _check_size("microbatches", self.microbatches)
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
        elif training.rule in MIXES:
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

    def optimizer(
        self,
        model: nn.Module,
        averager: Averager | None,
        inner: Optimizer,
        *,
        allow: Collection[str] = (),
        place: PeerMesh | None = None,
        **options: Any,
    ) -> AveragedOptimizer | LocalUpdates | ReplicatedOptimizer:
        """Return the optimizer of one rank; call it on all ranks of the peer together.

        Args:
            model: this rank's part of the model.
            averager: averager with the configuration ``place.config(strategy.config(config))``; ``None`` on ranks for
                which ``place.averages`` is false.
            inner: a torch optimizer of this rank's parameters.
            allow: of no use here.
            place: from :meth:`place`.
            options: further options of what is made, such as ``state``.

        Raises:
            ConfigError: the averager's configuration differs from the strategy, or ``place`` is missing or another
                strategy's.
            ValueError: as :func:`~p2pavg.optim.divided_optimizer`; on all ranks.
        """
        self._check_place(place)
        return self._build(model, averager, inner, allow=allow, place=place, **options)

    def _build(
        self,
        model: nn.Module,
        averager: Averager | None,
        inner: Optimizer,
        *,
        allow: Collection[str] = (),  # noqa: ARG002 - it runs no function
        **options: Any,
    ) -> AveragedOptimizer | LocalUpdates | ReplicatedOptimizer:
        def recipe(inner: Optimizer, averager: Averager, **given: Any) -> AveragedOptimizer | LocalUpdates:
            self._check_config(averager.config)
            found = self.training._build(given.pop("model"), averager, inner, **given)
            assert not isinstance(found, CellOptimizer)  # `training` has no cells
            return found

        return divided_optimizer(inner, averager, model=model, recipe=recipe, **options)

    def _check_place(self, place: PeerMesh | None) -> None:
        advice = "make it on all ranks with place = strategy.place(device_type)"
        if place is None:
            raise ConfigError(f"place is missing: {advice}")
        division = place.division
        sizes = dict(zip(division.names, division.sizes, strict=True))
        if sizes != {dimension: getattr(self, name) for name, dimension in SIZES.items()}:
            raise ConfigError(f"place is of the mesh {division.shape}, which is not the strategy's: {advice}")

    def _plain(self, name: str) -> Any:
        if name == "training":
            return {key: value for key, value in self.training.table.items() if key != "version"}
        return getattr(self, name)

    def _settings(self) -> dict[str, Any]:
        return self.training._settings()


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ConfigError(f"{name} must be a whole number from 1 to {MAX_RANKS}, got {value!r}")
