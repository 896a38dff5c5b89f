"""Helpers: optimizers of a model with averaged buffers, and what the peers of one lineage have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, diloco

BATCH = 8


def normalised_model(seed: int) -> torch.nn.Module:
    """Return a model with averaged buffers, and with first parameters that follow from ``seed``."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    generator = torch.Generator().manual_seed(seed)  # its own: the peers' threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


AnyOptimizer = AveragedOptimizer | LocalUpdates
Maker = Callable[[torch.nn.Module, Averager, RunState, dict[str, Any]], AnyOptimizer]


def adamw(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(inner, T_max=60)
    return AveragedOptimizer(
        inner, averager, target_batch_size=3 * BATCH, scheduler=schedule, state=state, **options
    )


def by_diloco(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(inner, T_max=150)
    return diloco(inner, averager, sync_every=2, scheduler=schedule, state=state, **options)


def common_tensors(optimizer: AnyOptimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors that the peers of one lineage share."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(optimizer, LocalUpdates):
        found = {}  # a peer that was late has inner steps that no average has yet, and so have other fragments
    found |= {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    common = optimizer.inner
    if isinstance(optimizer, LocalUpdates):
        common = optimizer.outer
        found |= {f"anchor {index}": tensor for index, tensor in enumerate(optimizer.anchor)}
    for number, state in common.state_dict()["state"].items():
        found |= {f"{name} {number}": value for name, value in state.items() if torch.is_tensor(value)}
    return {name: tensor.clone() for name, tensor in found.items()}


def common_values(optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the lineage, the hyperparameters and the place in the schedule.

    With local updates, each peer has an inner schedule of its own: its steps are not those of the other peers.
    """
    common = optimizer.outer if isinstance(optimizer, LocalUpdates) else optimizer.inner
    schedule: LRScheduler | None = None if isinstance(optimizer, LocalUpdates) else optimizer.scheduler
    return {
        "epoch": optimizer.epoch,
        "state": optimizer.lineage.state.hex(),
        "groups": common.state_dict()["param_groups"],
        "schedule": None if schedule is None else (schedule.last_epoch, schedule.get_last_lr()),
    }
