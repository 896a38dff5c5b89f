"""One rank of a peer that divides its model, in a process of its own: trains and writes its results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import (
    AveragedOptimizer,
    PeerMesh,
    ReplicatedOptimizer,
    RunState,
    diloco,
    divided_optimizer,
    shard_config,
)
from p2pavg.strategies import DataParallel, ModelParallel, read_json
from tests.integration.optim.company import LISTEN, Batches, config
from tests.integration.optim.process_group import with_ranks
from tests.integration.optim.shard_work import all_ranks_say, wait_until

BATCH = 8
CUT = 3  # number of modules in the first stage


def model() -> nn.Sequential:
    """Return the whole model, with the same parameters everywhere."""
    found = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return found


def inner_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer of all peers."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Part:
    """This rank's part of the model, and how it computes the gradients of a batch."""

    module: nn.Module
    compute: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
    """Leaves the gradients of a peer's batch in the module; returns the losses, on the last stage."""


def part_of(strategy: ModelParallel, place: Any) -> Part:
    """Divide the model as the strategy says, and return this rank's part."""
    whole, loss_of = model(), nn.functional.mse_loss
    data = place.mesh["copy", "shard"]
    at = data.get_local_rank("copy") * strategy.shards + data.get_local_rank("shard")
    count = strategy.copies * strategy.shards
    module = whole if strategy.stages == 1 else whole[:CUT] if place.stage == 0 else whole[CUT:]
    if strategy.tensor > 1:
        names = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
        first = 3 - (CUT if strategy.stages > 1 else 0)
        plan = {str(first): ColwiseParallel(), str(first + 2): RowwiseParallel()}
        if plan.keys() <= names:
            parallelize_module(module, place.mesh["tensor"], plan)
    if count > 1:
        fully_shard(module, mesh=data if strategy.copies > 1 else place.mesh["shard"])
    if strategy.stages == 1:

        def directly(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
            loss = loss_of(module(inputs.chunk(count)[at]), targets.chunk(count)[at])
            torch.autograd.backward(loss)
            return [loss]

        return Part(module, directly)
    schedule = strategy.pipeline(module, place, loss_of)

    def staged(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        if place.stage == 0:
            schedule.step(inputs.chunk(count)[at])
        elif place.stage == strategy.stages - 1:
            schedule.step(target=targets.chunk(count)[at], losses=losses)
        else:
            schedule.step()
        return losses

    return Part(module, staged)


@with_ranks
def train(how: dict[str, Any]) -> None:
    """Train one rank of a peer.

    ``how``: folder, peer, rank, ranks, peers, steps, strategy (JSON); and optionally ``dies_at``: the step in which the
    peer's last rank ends in place of its round; ``late``: the peer begins after the others' third update;
    ``updates`` to take in place of ``steps``.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    strategy = cast(ModelParallel, read_json(how["strategy"]))
    place = strategy.place("cpu")
    part, batches = part_of(strategy, place), Batches(peer, BATCH)
    if how.get("late"):
        wait_until((folder / "three").exists)
        with torch.no_grad():
            for parameter in part.module.parameters():
                parameter.mul_(-2.0)
    with averager_of(folder, how, strategy, place) as averager:
        options: dict[str, Any] = {"min_peers": 1} if how.get("alone") else {}
        if isinstance(strategy.training, DataParallel):
            options["max_samples_per_peer"] = BATCH
        if "late" in how or "updates" in how:
            options["state"] = RunState(part.module)
        optimizer = strategy.optimizer(
            part.module,
            averager,
            inner_of(part.module),
            place=place,
            peers_to_start=how["peers"] - ("late" in how),
            measure_updates=True,
            **options,
        )
        seen: list[dict[str, Any]] = []
        while not is_over(how, folder, optimizer, len(seen)):
            optimizer.zero_grad()
            losses = part.compute(*batches.next())
            if how.get("dies_at") == len(seen):
                die_in_the_round(optimizer, rank, ranks)
            metrics = {"loss": torch.stack(losses).mean().item()} if losses else {}
            report = optimizer.step(samples=BATCH, metrics=metrics)
            seen.append(
                {
                    "updated": report.updated,
                    "peers": report.peers,
                    "loss": report.metrics.get("loss"),
                    "norm": report.grad_norm if report.updated else None,
                    "moved": report.update_norm if report.updated else None,
                }
            )
            if optimizer.epoch >= 3:
                (folder / "three").touch()
        (folder / f"done{peer}.{rank}").touch()
        wait_until(lambda: len(list(folder.glob("done*"))) >= how["ends"] * ranks)
        whole = [
            cast(Any, p).full_tensor() if hasattr(p, "full_tensor") else p for p in part.module.parameters()
        ]
        found = {
            "stage": place.stage,
            "parameters": torch.cat([tensor.detach().reshape(-1) for tensor in whole]).tolist(),
            "seen": seen,
            "averages": place.averages,
            "epoch": optimizer.epoch,
        }
        (folder / f"result{peer}.{rank}.json").write_text(json.dumps(found))


def is_over(how: dict[str, Any], folder: Path, optimizer: Any, batches: int) -> bool:
    """Return whether this rank ends: after some batches or updates, or at the update that all peers know of."""
    if "updates" in how:
        return all_ranks_say(optimizer.epoch >= how["updates"])
    if "late" not in how:
        return batches >= int(how["steps"])
    if how["late"] and how["rank"] == 0 and optimizer.epoch >= 4 and not (folder / "until").exists():
        (folder / "until.new").write_text(str(optimizer.epoch + 3))
        (folder / "until.new").rename(folder / "until")
    until = folder / "until"
    return all_ranks_say(until.exists() and optimizer.epoch >= int(until.read_text()))


def die_in_the_round(optimizer: Any, rank: int, ranks: int) -> None:
    """End this peer in the middle of its next round: its last rank never comes to it, and the others do."""
    if rank == ranks - 1:
        optimizer._together.average = lambda _: os._exit(0)
        return
    take = optimizer._take

    def take_and_end(result: object) -> object:
        try:
            return take(result)
        except RuntimeError:  # the other rank is gone
            os._exit(0)

    optimizer._take = take_and_end


@contextmanager
def averager_of(
    folder: Path, how: dict[str, Any], strategy: ModelParallel, place: Any
) -> Iterator[Averager | None]:
    """Open this rank's averager; the first peer writes the addresses of each part."""
    if not place.averages:
        yield None
        return
    peer, rank = how["peer"], how["rank"]
    where, bootstrap = folder / f"addresses{rank}", []
    if peer:
        wait_until(where.exists)
        bootstrap = json.loads(where.read_text())
    settings = config(how["peers"], match_timeout=5.0, compression=how.get("compression"))
    settings = place.config(strategy.config(settings))
    with open_averager(settings, listen=LISTEN, bootstrap=bootstrap) as averager:
        if not peer:
            (folder / f"addresses{rank}.new").write_text(json.dumps(averager.addresses))
            (folder / f"addresses{rank}.new").rename(where)
        yield averager


@with_ranks
def mistakes(how: dict[str, Any]) -> None:
    """Make mistakes on the ranks of one peer; write the words of each rank."""
    folder, rank, said = Path(how["folder"]), how["rank"], {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    place, module = PeerMesh(mesh, stages="pp"), model()[:CUT] if rank == 0 else model()[CUT:]
    large: dict[str, Any] = {"target_batch_size": BATCH, "peers_to_start": 1}

    def attempt(name: str, act: Callable[[], object]) -> None:
        try:
            said[name] = type(act()).__name__
        except ValueError as error:
            said[name] = str(error)

    with open_averager(place.config(config(2)), listen=LISTEN) as averager:

        def made(module: nn.Module, averager: Averager | None, **changes: Any) -> object:
            options: dict[str, Any] = (
                {"inner": inner_of(module), "place": place, "model": module} | large | changes
            )
            return divided_optimizer(averager=averager, **options)

        frozen, inner = nn.Linear(1, 1), inner_of(module)
        if rank == 1:
            inner = inner_of(frozen)
            frozen.requires_grad_(False)
        attempt("frozen", lambda: made(frozen if rank else module, averager, inner=inner))
        attempt("missing", lambda: made(module, None if rank else averager))
        with open_averager(config(2, run_id="company/pp 0 of 2"), listen=LISTEN) as other:
            attempt("of another rank", lambda: made(module, other))
        everyone: dict[str, Any] = {"process_group": dist.group.WORLD}
        attempt(
            "no stages",
            lambda: AveragedOptimizer(inner_of(module), averager, model=module, **everyone, **large),
        )
        attempt("right", lambda: made(module, averager))
    with open_averager(shard_config(config(2), rank, 2), listen=LISTEN) as averager:
        whole = model()

        def copied() -> object:
            optimizer = AveragedOptimizer(inner_of(whole), averager, **everyone, **large)
            return ReplicatedOptimizer(optimizer if rank == 0 else None, whole)

        attempt("copies that divide", copied)
        attempt("fragments", lambda: diloco(inner_of(whole), averager, sync_every=4, fragments=2, **everyone))
    (folder / f"result0.{rank}.json").write_text(json.dumps({"said": said}))
