"""One rank of a peer that trains through its rank 0, with the same parameters or with shards: writes its results."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from p2pavg.base.errors import P2PAvgError
from p2pavg.base.files import PUBLIC, replace_file
from p2pavg.base.result import Success
from p2pavg.blocking import open_averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, ReplicatedOptimizer, RunState, StepReport, diloco
from p2pavg.optim.base.joined import plain_buffers
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.optim.ranks.whole import WholeCopy, full_of
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, small_model, vector_of
from tests.integration.optim.process_group import with_ranks
from tests.integration.optim.shard_work import BATCH, all_ranks_say, open_peer_of, wait_until

MORE_UPDATES = 6
"""Updates that all peers take together after the late one has contributed twice."""


def optimizer_of(
    network: torch.nn.Module, averager: Any, how: dict[str, Any]
) -> AveragedOptimizer | LocalUpdates:
    """Return rank 0's optimizer."""
    state = RunState(network)
    if how.get("local"):
        options = {"sync_every": 2} | how.get("options", {})
        return diloco(torch.optim.AdamW(network.parameters(), lr=0.01), averager, state=state, **options)
    inner = torch.optim.AdamW(network.parameters(), lr=0.01)
    target = BATCH * how["total"]
    return AveragedOptimizer(
        inner,
        averager,
        target_batch_size=target,
        max_samples_per_peer=BATCH * how["ranks"],
        peers_to_start=how["peers"] - 1,
        state=state,
    )


@with_ranks
def late(how: dict[str, Any]) -> None:
    """Train until all peers are at one update that the late peer names.

    ``how``: folder, peer, rank and ranks of this peer, number of peers, ``total`` ranks of all peers. The peer that is
    ``late`` begins with other parameters when the others have taken three updates. ``local`` takes local updates, with
    ``options``. With ``shards``, the ranks of a peer of several hold shards.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    network, until = small_model(), folder / "until"
    if how.get("late"):
        wait_until((folder / "three").exists)
    if how.get("late") or rank:  # only rank 0's parameters count
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(-2.0 - rank)
    whole: torch.nn.Module | None = None
    if shards := bool(how.get("shards")) and ranks > 1:
        whole = copy.deepcopy(network) if rank == 0 else None
        fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    with ExitStack() as stack:
        optimizer = None
        if rank == 0:
            averager = stack.enter_context(open_peer_of(folder, peer, how))
            optimizer = optimizer_of(whole or network, averager, how)
        replicas = ReplicatedOptimizer(optimizer, network, whole=whole)
        model = network if shards else DistributedDataParallel(network, init_sync=False)
        batches = Batches(peer * 10 + rank, BATCH)
        contributed = 0
        while not all_ranks_say(until.exists() and replicas.epoch >= int(until.read_text())):
            replicas.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            report = replicas.step(samples=BATCH * ranks)
            assert report.behind is None, report.behind
            contributed += isinstance(report.result, Success)
            if replicas.epoch >= 3:
                (folder / "three").touch()
            if how.get("late") and contributed == 2 and rank == 0 and not until.exists():
                replace_file(until, str(replicas.epoch + MORE_UPDATES).encode(), mode=PUBLIC)
        found = {
            "rank": whole_vector(network),
            "epoch": replicas.epoch,
            "common": [] if optimizer is None else common_of(optimizer),
            "lineage": "" if optimizer is None else optimizer.lineage.state.hex(),
        }
        (folder / f"done{peer}.{rank}").touch()
        wait_until(lambda: len(list(folder.glob("done*"))) == how["total"])
        (folder / f"result{peer}.{rank}.json").write_text(json.dumps(found))


@with_ranks
def copies(how: dict[str, Any]) -> None:
    """Take an update with each batch, with the same parameters on all ranks."""
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    network = small_model()
    with ExitStack() as stack:
        averager = stack.enter_context(open_peer_of(folder, peer, how)) if rank == 0 else None
        replicas = ReplicatedOptimizer.of(
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            network,
            averager,
            target_batch_size=BATCH * ranks * how["peers"],
            max_samples_per_peer=BATCH * ranks,
            peers_to_start=how["peers"],
        )
        model, batches = DistributedDataParallel(network), Batches(peer * ranks + rank, BATCH)
        updated = []
        for _ in range(how["steps"]):
            replicas.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            updated.append(replicas.step(samples=BATCH * ranks).updated)
    found = {"parameters": whole_vector(network), "updated": updated}
    (folder / f"result{peer}.{rank}.json").write_text(json.dumps(found))


def whole_vector(network: torch.nn.Module) -> list[float]:
    """Return all parameters of a module, which may be sharded; call it on all ranks."""
    return cast(
        list[float], torch.cat([full_of(p).detach().reshape(-1) for p in network.parameters()]).tolist()
    )


def common_of(optimizer: AveragedOptimizer | LocalUpdates) -> list[float]:
    """Return what all peers of a lineage share: the parameters or the anchor, and the common optimizer's state."""
    common = optimizer.outer if isinstance(optimizer, LocalUpdates) else optimizer.inner
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, LocalUpdates):
        tensors = optimizer.anchor
    kept = [value for each in common.state.values() for _, value in sorted(each.items())]
    found = [tensor.detach().reshape(-1) for tensor in (*tensors, *kept) if torch.is_tensor(tensor)]
    return torch.cat(found).tolist()


def _fails(samples: float, metrics: object) -> StepReport:
    raise KeyError("a mistake in the program")


@with_ranks
def mistakes(how: dict[str, Any]) -> None:
    """Make mistakes on one rank of a peer; write the errors of all ranks as texts."""
    folder, rank, said = Path(how["folder"]), how["rank"], []
    network = small_model()

    def attempt(act: Callable[[], object]) -> None:
        try:
            said.append(type(act()).__name__)
        except (P2PAvgError, RuntimeError, ValueError, KeyError) as error:
            said.append(f"{type(error).__name__}: {error}")

    with ExitStack() as stack:
        optimizer = None
        if rank == 0:
            averager = stack.enter_context(open_averager(config(2), listen=LISTEN))
            inner = torch.optim.SGD(network.parameters(), lr=0.1)
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=100.0, on_update=print)
        attempt(lambda: ReplicatedOptimizer(None, network))
        attempt(lambda: ReplicatedOptimizer(optimizer, torch.nn.Linear(1, 1)))
        replicas = ReplicatedOptimizer(optimizer, network)
        model = DistributedDataParallel(network, init_sync=False)
        batches = Batches(rank, BATCH)
        for factor, samples in ((1.0, 8), (math.inf, 8), (1.0, -1)):
            replicas.zero_grad()
            torch.autograd.backward(factor * loss_of(model, batches.next()))
            attempt(partial(replicas.step, samples=samples))
        if optimizer is not None:
            optimizer._step = _fails  # type: ignore[method-assign]
        attempt(partial(replicas.step, samples=8))
    (folder / f"result0.{rank}.json").write_text(json.dumps({"said": said}))


@with_ranks
def sharded_mistakes(how: dict[str, Any]) -> None:
    """Make mistakes with shards on one rank of a peer of two; write the errors of all ranks as texts."""
    folder, rank, said = Path(how["folder"]), how["rank"], []
    network = small_model()
    whole = copy.deepcopy(network) if rank == 0 else None
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))

    def attempt(act: Callable[[], object]) -> None:
        try:
            said.append(type(act()).__name__)
        except (P2PAvgError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    def made(whole: torch.nn.Module | None) -> ReplicatedOptimizer:
        return ReplicatedOptimizer(optimizer, network, whole=whole)

    with ExitStack() as stack:
        optimizer = None
        if whole is not None:
            averager = stack.enter_context(open_averager(config(2), listen=LISTEN))
            inner = torch.optim.SGD(whole.parameters(), lr=0.1)
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=100.0)
        attempt(lambda: made(None))
        attempt(lambda: made(torch.nn.Linear(1, 1) if rank == 0 else None))
        attempt(lambda: made(whole if rank == 0 else small_model()))
        attempt(lambda: ReplicatedOptimizer(optimizer, small_model(), whole=whole))
        replicas = made(whole)
        batches = Batches(rank, BATCH)
        for factor in (1.0, math.inf):
            replicas.zero_grad()
            torch.autograd.backward(factor * loss_of(network, batches.next()))
            attempt(partial(replicas.step, samples=8))
        if rank:
            network.zero_grad()
        attempt(partial(replicas.step, samples=8))
        scaler = torch.amp.GradScaler("cpu")
        replicas.zero_grad()
        torch.autograd.backward(scaler.scale(loss_of(network, batches.next())))
        attempt(lambda: scaler.step(replicas))
    (folder / f"result0.{rank}.json").write_text(json.dumps({"said": said}))


@with_ranks
def there_and_back(how: dict[str, Any]) -> None:
    """Copy parameters into shards and gradients out of them, with FSDP and with HSDP.

    Writes the largest differences of the shards from the copy, and of the copy's gradients from those of one process.
    """
    folder, rank, ranks = Path(how["folder"]), how["rank"], how["ranks"]
    batches = [Batches(each, BATCH).next() for each in range(ranks)]
    expected = small_model()
    for batch in batches:
        torch.autograd.backward(loss_of(expected, batch) / ranks)
    away = []
    for mesh in ((ranks,), (2, ranks // 2)):
        whole, network = small_model(), small_model()
        for parameter in network.parameters():
            torch.nn.init.zeros_(parameter)
        fully_shard(network, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)]))
        names = frozenset(plain_buffers(network))
        together = Ranks(dist.group.WORLD)
        copied = WholeCopy(network, whole if rank == 0 else None, together, dist.group.WORLD, names)
        copied.spread()
        shards = torch.tensor(whole_vector(network)) - vector_of(whole)
        torch.autograd.backward(loss_of(network, batches[rank]))
        copied.collect()
        if rank == 0:
            pairs = zip(whole.parameters(), expected.parameters(), strict=True)
            away += [(mine.grad - its.grad).abs().max().item() for mine, its in pairs]  # type: ignore[operator]
        away.append(shards.abs().max().item())
    (folder / f"result0.{rank}.json").write_text(json.dumps({"away": away}))
