"""Peers of two processes each under torch.distributed, whose ranks hold shards, compared with one process."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.optim import shard_work
from tests.integration.optim.company import Batches, loss_of, small_model, vector_of
from tests.simulation.test_recipes import Auto, load

STEPS = 6


def start(
    folder: Path,
    peers: list[dict[str, Any]],
    ranks: int | Sequence[int],
    work: Callable[[dict[str, Any]], None],
) -> Sequence[multiprocessing.process.BaseProcess]:
    """Start a process for each rank of each peer, forked from one that has done the imports.

    Args:
        ranks: number of ranks of each peer.
    """
    counts = [ranks] * len(peers) if isinstance(ranks, int) else ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([shard_work.__name__])
    folder.mkdir()
    processes = [
        context.Process(
            target=work,
            args=({"folder": str(folder), "peer": peer, "rank": rank, "ranks": counts[peer], **how},),
        )
        for peer, how in enumerate(peers)
        for rank in range(counts[peer])
    ]
    for process in processes:
        process.start()
    return processes


def results(folder: Path, processes: Sequence[multiprocessing.process.BaseProcess]) -> list[dict[str, Any]]:
    """Return the results of all ranks, peer by peer, after every process has ended by itself."""
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]


def how(peers: int, **changes: Any) -> dict[str, Any]:
    return {"peers": peers, "steps": STEPS} | changes


@pytest.mark.long
def test_sharded_ranks_average_their_own_shards(tmp_path: Path) -> None:
    """Two peers of two FSDP ranks match one process with all four batches, with clipping by the whole norm."""
    clip = 0.05
    processes = start(tmp_path / "shards", [how(2, clip=clip)] * 2, ranks=2, work=shard_work.shards)
    model, batches = small_model(), [Batches(rank, shard_work.BATCH) for rank in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for each in batches:
            torch.autograd.backward(loss_of(model, each.next()) / 4)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
    found = results(tmp_path / "shards", processes)
    assert len(found) == 4
    assert all(rank["seen"] == [{"updated": True, "behind": False}] * STEPS for rank in found)
    assert len({rank["state"] for rank in found}) == 1, "what names the parameters names all shards of them"
    assert all(rank["parameters"] == found[0]["parameters"] for rank in found)
    assert (torch.tensor(found[0]["parameters"]) - vector_of(model)).abs().max() < 1e-5


def test_diloco_of_sharded_ranks_matches_one_process(tmp_path: Path) -> None:
    """Two peers of two FSDP ranks: each averages its shards' pseudo-gradients, and takes the outer steps of them."""
    plans = [how(2, fragments=1)] * 2
    processes = start(tmp_path / "shards", plans, ranks=2, work=shard_work.local_shards)
    models = [small_model() for _ in range(2)]
    inners = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    batches = [Batches(rank, shard_work.BATCH) for rank in range(4)]
    anchor, outer, norms = vector_of(models[0]).double(), Auto(0.7, 0.9), []
    for step in range(STEPS):
        for peer, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            for each in batches[2 * peer : 2 * peer + 2]:
                torch.autograd.backward(loss_of(model, each.next()) / 2)
            inner.step()
        if step % 2:
            pseudo = anchor - sum(vector_of(model).double() for model in models) / 2
            before, anchor = anchor, outer(anchor, pseudo)
            norms.append([pseudo.norm().item(), (anchor - before).norm().item()])
            for model in models:
                load(model, anchor.float())
    found = results(tmp_path / "shards", processes)
    assert len(found) == 4
    assert all(rank["updated"] == [False, True] * (STEPS // 2) for rank in found)
    assert len({rank["state"] for rank in found}) == 1
    assert all(rank["parameters"] == found[0]["parameters"] for rank in found)
    assert (torch.tensor(found[0]["parameters"]) - anchor).abs().max() < 1e-5
    told = [pair for pair in found[0]["norms"] if pair]
    assert torch.allclose(torch.tensor(told), torch.tensor(norms), rtol=1e-4), "norms are of all shards"


@pytest.mark.long
def test_sharded_ranks_return_to_the_anchor_together(tmp_path: Path) -> None:
    """One rank's shard has NaN, and all ranks of its peer drop the step. The run goes on with its fragments."""
    plans = [how(2, fragments=2, steps=8, breaks_at=2), how(2, fragments=2, steps=8)]
    found = results(
        tmp_path / "shards", start(tmp_path / "shards", plans, ranks=2, work=shard_work.local_shards)
    )
    assert [rank["restored"] for rank in found[:2]] == [[step == 2 for step in range(8)]] * 2
    assert not any(any(rank["restored"]) for rank in found[2:])
    assert found[0]["updated"] == found[1]["updated"]
    assert sum(found[0]["updated"]) >= 6
    assert all(torch.tensor(rank["parameters"]).isfinite().all() for rank in found)
    assert found[0]["parameters"] == found[1]["parameters"]


@pytest.mark.long
def test_sharded_peer_that_comes_late_fetches_each_ranks_state(tmp_path: Path) -> None:
    """A peer of two ranks joins two others, and all ranks end with the same parameters and optimizer state."""
    plans = [how(2), how(2), how(2, late=True)]
    processes = start(tmp_path / "shards", plans, ranks=2, work=shard_work.late_shards)
    found = results(tmp_path / "shards", processes)
    assert len(found) == 6
    assert len({rank["state"] for rank in found}) == 1
    assert all(rank["values"] == found[0]["values"] for rank in found)
    assert all(rank["contributed"] >= 2 for rank in found)


@pytest.mark.long
def test_rank_without_its_rounds_result_blocks_no_other(tmp_path: Path) -> None:
    """One of two sharded ranks has the average and the other has not: neither takes it, and both report it."""
    plans = [how(2, steps=1500, impatient=1), how(2, steps=1)]
    found = results(tmp_path / "shards", start(tmp_path / "shards", plans, ranks=2, work=shard_work.shards))
    first, second = found[:2], found[2:]
    assert [rank["seen"] for rank in second] == [[{"updated": True, "behind": False}]] * 2
    assert first[0]["seen"] == first[1]["seen"]
    assert not any(step["updated"] for step in first[0]["seen"])
    assert first[0]["seen"][-1]["behind"]
    assert first[0]["parameters"] == vector_of(small_model()).tolist()


@pytest.mark.long
def test_mistake_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Otherwise the other ranks would wait in a collective for ever."""
    found = results(tmp_path / "peer", start(tmp_path / "peer", [how(2)], ranks=2, work=shard_work.mistakes))
    first, second = (rank["said"] for rank in found)
    assert first[:2] == second[:2] == ["StepReport", "0.0"], (
        "a loss of one rank is infinite: the batch is left out"
    )
    samples = "AccumulateError: samples are those of all ranks together, the same number on each; got [4, 5]"
    gradient = (
        "AccumulateError: a gradient on one of this peer's ranks holds NaN or Inf; nothing was accumulated"
    )
    assert first[2:] == second[2:] == [samples, "0.0", "StepReport", "4.0", gradient, "4.0"]
