"""Peers of several ranks, which hold the same parameters or shards: rank 0 trains, and the others copy it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.optim import replica_work
from tests.integration.optim.company import Batches, loss_of, small_model, vector_of
from tests.integration.optim.shard_work import BATCH
from tests.integration.optim.test_shards import STEPS, how, results, start

STREAMED = {"sync_every": 4, "fragments": 2, "delay": 1, "offload": True}


def late(folder: Path, plans: list[dict[str, Any]], ranks: list[int]) -> list[dict[str, Any]]:
    """Return what the ranks of three peers have at the end, of which the last one came late: one state."""
    found = results(folder, start(folder, plans, ranks, work=replica_work.late))
    assert len(found) == sum(ranks)
    firsts = [rank for rank in found if rank["lineage"]]
    assert len(firsts) == 3
    assert len({rank["lineage"] for rank in firsts}) == 1
    assert all(rank["common"] == firsts[0]["common"] for rank in firsts)
    assert len({rank["epoch"] for rank in found}) == 1
    return found


def test_two_peers_of_two_ranks_match_one_process(tmp_path: Path) -> None:
    """Each update is of the batches of all four ranks, of which one process takes the mean."""
    processes = start(tmp_path / "peers", [how(2)] * 2, 2, work=replica_work.copies)
    model, batches = small_model(), [Batches(rank, BATCH) for rank in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for each in batches:
            torch.autograd.backward(loss_of(model, each.next()) / 4)
        optimizer.step()
    found = results(tmp_path / "peers", processes)
    assert [rank["updated"] for rank in found] == [[True] * STEPS] * 4
    assert all(rank["parameters"] == found[0]["parameters"] for rank in found)
    assert (torch.tensor(found[0]["parameters"]) - vector_of(model)).abs().max() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("local", "options"), [(False, {}), (True, STREAMED)], ids=["averaged", "in fragments"]
)
def test_a_late_peer_of_two_ranks_fetches_the_state_of_peers_with_other_numbers_of_ranks(
    local: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """A peer of one rank and one of two train; the late one has two, which begin with other parameters."""
    ranks = [1, 2, 2]
    plans = [how(3, total=sum(ranks), local=local, options=options, late=peer == 2) for peer in range(3)]
    found = late(tmp_path / "peers", plans, ranks)
    assert found[1]["rank"] == found[2]["rank"], "ranks of one peer have the same parameters"
    assert found[3]["rank"] == found[4]["rank"]


def test_an_error_of_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """Otherwise the other ranks would wait in a collective for ever."""
    found = results(tmp_path / "peer", start(tmp_path / "peer", [how(2)], 2, work=replica_work.mistakes))
    first, second = (rank["said"] for rank in found)
    missing = "optimizer must be given on rank 0 of the peer, and there alone"
    assert (first[0], second[0]) == (f"ValueError: {missing}", f"ValueError: on rank 0: {missing}")
    other = "optimizer must train parameters of network"
    assert (first[1], second[1]) == (f"ValueError: {other}", f"ValueError: on rank 0: {other}")
    assert first[2] == second[2] == "StepReport"
    for here, there, kind in zip(first[3:], second[3:], ("AccumulateError",) * 2, strict=False):
        assert here.startswith(f"{kind}: ")
        assert there == f"{kind}: on rank 0 of this peer: {here.removeprefix(f'{kind}: ')}"
    assert first[5] == "KeyError: 'a mistake in the program'"
    assert second[5] == "RuntimeError: on rank 0 of this peer: 'a mistake in the program'"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "local"),
    [([2, 2, 1], False), ([1, 2, 2], True)],
    ids=["one rank from shards", "shards from one rank, local updates"],
)
def test_peers_of_one_rank_and_of_shards_fetch_each_others_states(
    ranks: list[int], local: bool, tmp_path: Path
) -> None:
    """Two peers train, and the last one comes late, with other parameters. All end with the same bits."""
    plans = [how(3, total=sum(ranks), local=local, late=peer == 2, shards=True) for peer in range(3)]
    found = late(tmp_path / "peers", plans, ranks)
    if not local:  # between two outer updates, each peer has parameters of its own
        assert all(rank["rank"] == found[0]["rank"] for rank in found)


def test_shards_and_their_whole_copy_are_the_same_with_fsdp_and_hsdp(tmp_path: Path) -> None:
    """Four ranks: the mean gradient of all of them is in the copy, and the copy's parameters are in the shards."""
    processes = start(tmp_path / "peer", [how(1)], 4, work=replica_work.there_and_back)
    found = results(tmp_path / "peer", processes)
    assert len(found) == 4
    assert all(max(rank["away"]) < 1e-6 for rank in found)


def test_a_mistake_with_shards_is_raised_on_all_ranks(tmp_path: Path) -> None:
    processes = start(tmp_path / "peer", [how(2)], 2, work=replica_work.sharded_mistakes)
    first, second = (rank["said"] for rank in results(tmp_path / "peer", processes))
    assert "the parameters of network are sharded: give rank 0 a copy that is not, as whole=" in first[0]
    assert "whole must be the module of network before it was sharded: network has no 'weight'" in first[1]
    assert second[2] == "ValueError: whole must be given on rank 0 of the peer, and there alone"
    assert first[2] == second[2].replace("ValueError: ", "ValueError: on rank 1: ")
    assert "whole is for a network whose parameters are sharded: leave it out" in first[3]
    assert second[3] == first[3]
    for place in (0, 1):
        assert second[place] == first[place].replace("ValueError: ", "ValueError: on rank 0: ")
    assert first[4] == second[4] == "StepReport"
    assert first[5].startswith("AccumulateError: the gradient of ")
    assert (
        second[5] == f"AccumulateError: on rank 0 of this peer: {first[5].removeprefix('AccumulateError: ')}"
    )
    missing = "AccumulateError: a parameter has a gradient on one rank of this peer, and none on another one"
    assert first[6].startswith(missing)
    assert second[6] == first[6]
    assert first[7] == second[7]
    assert first[7].startswith("ValueError: a GradScaler cannot scale the gradients of shards")
