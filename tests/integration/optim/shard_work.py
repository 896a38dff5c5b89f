"""One rank of one peer in a separate process: trains its shard and writes its results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from p2pavg import Success
from p2pavg.base.errors import P2PAvgError
from p2pavg.base.files import PUBLIC, replace_file
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import AveragedOptimizer, RunState, diloco, shard_config
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, small_model
from tests.integration.optim.process_group import with_ranks

BATCH = 4
MOMENT = 1e-3  # seconds; too short for any round


@with_ranks
def shards(how: dict[str, Any]) -> None:
    """Train with sharded parameters, of which each rank averages its shard; end when the peer is behind.

    ``how``: folder, peer, rank, ranks, peers, steps, the norm to clip to, and optionally the rank that waits for no
    round.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    network = small_model()
    fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    batches = Batches(peer * ranks + rank, BATCH)
    with open_peer_of(folder, peer, how, rank=rank) as averager:
        optimizer = AveragedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            averager,
            target_batch_size=BATCH * how["peers"],
            max_samples_per_peer=BATCH,
            max_grad_norm=how.get("clip"),
            peers_to_start=how["peers"],
            sync_timeout=MOMENT if rank == how.get("impatient") else 60.0,
            process_group=dist.group.WORLD,
            state=False,
        )
        seen = []
        for _ in range(how["steps"]):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(network, batches.next()))
            report = optimizer.step(samples=BATCH)
            seen.append({"updated": report.updated, "behind": report.behind is not None})
            if report.behind:
                break
            if not report.updated:
                time.sleep(0.02)  # until it has read the others' progress
        (folder / f"done{peer}.{rank}").touch()
        # The others read its progress until then.
        wait_until(lambda: len(list(folder.glob("done*"))) == how["peers"] * ranks)
        whole = [cast(Any, parameter).full_tensor().detach() for parameter in network.parameters()]
        parameters = torch.cat([tensor.reshape(-1) for tensor in whole])
        found = {"parameters": parameters.tolist(), "seen": seen, "state": optimizer.lineage.state.hex()}
        (folder / f"result{peer}.{rank}.json").write_text(json.dumps(found))


@with_ranks
def local_shards(how: dict[str, Any]) -> None:
    """Train by DiLoCo with sharded parameters, of which each rank averages its shard.

    ``how`` has the number of ``fragments``, and optionally ``breaks_at``: a step in which the second rank's shard has
    NaN.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    network = small_model()
    fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    batches = Batches(peer * ranks + rank, BATCH)
    with open_peer_of(folder, peer, how, rank=rank) as averager:
        optimizer = diloco(
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            averager,
            sync_every=2,
            fragments=how["fragments"],
            peers_to_start=how["peers"],
            process_group=dist.group.WORLD,
            model=network,
            measure_updates=True,
        )
        updated, restored, norms = [], [], []
        for step in range(how["steps"]):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(network, batches.next()))
            if step == how.get("breaks_at") and rank == 1:
                for parameter in network.parameters():
                    cast(Any, parameter.grad).to_local().fill_(math.nan)
            report = optimizer.step(samples=BATCH * ranks)
            updated.append(report.updated)
            restored.append(report.restored is not None)
            norms.append([report.grad_norm, report.update_norm] if report.updated else None)
        (folder / f"done{peer}.{rank}").touch()
        wait_until(lambda: len(list(folder.glob("done*"))) == how["peers"] * ranks)
        whole = [cast(Any, parameter).full_tensor().detach() for parameter in network.parameters()]
        found = {
            "parameters": torch.cat([tensor.reshape(-1) for tensor in whole]).tolist(),
            "updated": updated,
            "restored": restored,
            "norms": norms,
            "state": optimizer.lineage.state.hex(),
        }
        (folder / f"result{peer}.{rank}.json").write_text(json.dumps(found))


@with_ranks
def late_shards(how: dict[str, Any]) -> None:
    """Train with sharded parameters until all peers are at one update that the late peer names.

    ``how`` has ``late``: a peer that begins with other parameters when the others have taken three updates.
    """
    folder, peer, rank, ranks = Path(how["folder"]), how["peer"], how["rank"], how["ranks"]
    torch.set_num_threads(1)
    network, until = small_model(), folder / "until"
    if how.get("late"):
        wait_until((folder / "three").exists)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(-2.0)
    fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    batches = Batches(peer * ranks + rank, BATCH)
    with open_peer_of(folder, peer, how, rank=rank) as averager:
        inner = torch.optim.AdamW(network.parameters(), lr=0.01)
        optimizer = AveragedOptimizer(
            inner,
            averager,
            target_batch_size=BATCH * how["peers"],
            max_samples_per_peer=BATCH,
            process_group=dist.group.WORLD,
            state=RunState(network),
        )
        contributed = 0
        while not all_ranks_say(until.exists() and optimizer.epoch >= int(until.read_text())):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(network, batches.next()))
            report = optimizer.step(samples=BATCH)
            contributed += isinstance(report.result, Success) and averager.peer_id in report.result.peers
            if optimizer.epoch >= 3:
                (folder / "three").touch()
            if how.get("late") and contributed == 2 and rank == 0 and not until.exists():
                replace_file(until, str(optimizer.epoch + 6).encode(), mode=PUBLIC)
        state = optimizer.lineage.state.hex()
        (folder / f"done{peer}.{rank}").touch()
        wait_until(lambda: len(list(folder.glob("done*"))) == 3 * ranks)
        kept = [value for each in inner.state.values() for _, value in sorted(each.items())]
        tensors = [cast(Any, tensor) for tensor in (*network.parameters(), *kept)]
        whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
        found = torch.cat([tensor.detach().reshape(-1) for tensor in whole]).tolist()
        (folder / f"result{peer}.{rank}.json").write_text(
            json.dumps({"values": found, "state": state, "contributed": contributed})
        )


def all_ranks_say(here: bool) -> bool:
    """Return whether a condition holds on all ranks."""
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return all(found)


@with_ranks
def mistakes(how: dict[str, Any]) -> None:
    """Make mistakes on one rank of a peer; write the errors of all ranks as texts."""
    folder, rank, said = Path(how["folder"]), how["rank"], []
    network = small_model()

    def attempt(act: Callable[[], object]) -> None:
        try:
            said.append(type(act()).__name__)
        except (P2PAvgError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    with open_averager(shard_config(config(2), rank, 2), listen=LISTEN) as averager:
        optimizer = AveragedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1),
            averager,
            target_batch_size=BATCH,
            process_group=dist.group.WORLD,
            peers_to_start=1,
        )
        for samples, loss in ((BATCH, math.inf if rank else 1.0), (BATCH + rank, 1.0), (BATCH, 1.0)):
            attempt(partial(optimizer.step, samples=samples, metrics={"loss": loss}))
            said.append(str(averager.weight))
        if rank:
            for parameter in network.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
        attempt(partial(optimizer.step, samples=BATCH))
        said.append(str(averager.weight))
    (folder / f"result0.{rank}.json").write_text(json.dumps({"said": said}))


def wait_until(it_is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds, for 60 s at most."""
    end = time.monotonic() + 60.0
    while not it_is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def open_peer_of(folder: Path, peer: int, how: dict[str, Any], rank: int | None = None) -> Iterator[Averager]:
    """Open a peer; the first peer, or each of its ranks, writes its address to a file."""
    name, bootstrap = "addresses" if rank is None else f"addresses{rank}", []
    place, settings = folder / name, config(how["peers"], match_timeout=5.0)
    if rank is not None:
        settings = shard_config(settings, rank, how["ranks"])
    if peer:
        wait_until(place.exists)
        bootstrap = json.loads(place.read_text())
    with open_averager(settings, listen=LISTEN, bootstrap=bootstrap) as averager:
        if not peer:
            (folder / f"{name}.new").write_text(json.dumps(averager.addresses))
            (folder / f"{name}.new").rename(place)
        yield averager
