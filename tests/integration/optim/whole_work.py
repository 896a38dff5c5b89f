"""One rank of a peer whose ranks hold shards, and whose first rank trains a whole copy with peers of one rank."""

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

from p2pavg.blocking import open_averager
from p2pavg.errors import P2PAvgError
from p2pavg.files import PUBLIC, replace_file
from p2pavg.optim import AveragedOptimizer, ReplicatedOptimizer
from p2pavg.result import Success
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, small_model, vector_of
from tests.integration.optim.ddp_work import BATCH, all_ranks_say, open_peer_of, wait_until
from tests.integration.optim.replica_work import MORE_UPDATES, common_of, optimizer_of


def begin(how: dict[str, Any]) -> None:
    """Join the process group of this peer's ranks."""
    torch.set_num_threads(1)
    place = f"file://{how['folder']}/rendezvous{how['peer']}"
    dist.init_process_group("gloo", init_method=place, rank=how["rank"], world_size=how["ranks"])


def whole_vector(network: torch.nn.Module) -> list[float]:
    """Return all parameters of a module, sharded or not; call it on all ranks."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in map(_any, network.parameters())]
    return cast(list[float], torch.cat([tensor.detach().reshape(-1) for tensor in whole]).tolist())


def _any(parameter: torch.Tensor) -> Any:
    return parameter


def late(how: dict[str, Any]) -> None:
    """Train until all peers are at one update that the late peer names.

    ``how`` is as for :func:`tests.integration.optim.replica_work.late`. A peer of several ranks shards its model.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    begin(how)
    network, until = small_model(), folder / "until"
    if how.get("late"):
        wait_until((folder / "three").exists)
    if how.get("late") or rank:  # only rank 0's parameters count
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(-2.0 - rank)
    whole = copy.deepcopy(network) if ranks > 1 and rank == 0 else None
    if ranks > 1:
        fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    with ExitStack() as stack:
        optimizer = None
        if rank == 0:
            averager = stack.enter_context(open_peer_of(folder, peer, how))
            optimizer = optimizer_of(whole or network, averager, how)
        replicas = ReplicatedOptimizer(optimizer, network, whole=whole)
        batches = Batches(peer * 10 + rank, BATCH)
        contributed = 0
        while not all_ranks_say(until.exists() and replicas.epoch >= int(until.read_text())):
            replicas.zero_grad()
            torch.autograd.backward(loss_of(network, batches.next()))
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
    dist.barrier()
    dist.destroy_process_group()
