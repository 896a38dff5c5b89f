"""Peers that divide their model among ranks: pipeline stages, tensor parallel parts, HSDP; against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.strategies import DataParallel, Federated, ModelParallel, Strategy
from tests.integration.optim import divided_work as work
from tests.integration.optim.company import Batches, loss_of, vector_of
from tests.integration.optim.test_shards import results, start
from tests.simulation.test_recipes import Nesterov, load

STEPS = 5
CLIP = 0.2
LARGE = DataParallel(target_batch_size=2 * work.BATCH, max_grad_norm=CLIP)
STAGES = ModelParallel(training=LARGE, stages=2, microbatches=4)


def how(strategy: Strategy, **changes: Any) -> dict[str, Any]:
    return {"peers": 2, "steps": STEPS, "strategy": strategy.json, "ends": 2} | changes


def whole(ranks: list[dict[str, Any]]) -> torch.Tensor:
    """Return a peer's parameters as one vector, after checking that its ranks of one stage hold the same."""
    stages = {rank["stage"]: rank["parameters"] for rank in ranks}
    assert all(rank["parameters"] == stages[rank["stage"]] for rank in ranks)
    return torch.tensor([value for stage in sorted(stages) for value in stages[stage]])


def one_process(updates: list[list[tuple[int, int]]]) -> tuple[torch.nn.Module, list[float]]:
    """Train in one process. Each update has some batches, given as (peer, step). Return the gradients' norms too."""
    network, norms = work.model(), []
    inner, drawn = work.inner_of(network), [Batches(peer, work.BATCH) for peer in range(2)]
    batches = [[each.next() for _ in range(STEPS)] for each in drawn]
    for update in updates:
        inner.zero_grad()
        for peer, step in update:
            torch.autograd.backward(loss_of(network, batches[peer][step]) / len(update))
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)))
        inner.step()
    return network, norms


def of_both(steps: int) -> list[list[tuple[int, int]]]:
    """Return updates with the batches of both peers."""
    return [[(0, step), (1, step)] for step in range(steps)]


@pytest.mark.parametrize(
    "strategy",
    [
        STAGES,
        ModelParallel(training=LARGE, tensor=2),
        pytest.param(ModelParallel(training=LARGE, shards=2, copies=2), marks=pytest.mark.long),
        pytest.param(
            ModelParallel(training=LARGE, stages=2, shards=2, microbatches=2), marks=pytest.mark.long
        ),
        pytest.param(
            ModelParallel(training=LARGE, stages=2, tensor=2, microbatches=2, schedule="gpipe"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["pipeline", "tensor", "hsdp", "pipeline of shards", "pipeline of tensor parallel stages"],
)
def test_two_peers_match_one_process_with_the_whole_batch(strategy: ModelParallel, tmp_path: Path) -> None:
    """With clipping, which needs the norm of the whole model: each part counts once, however many ranks hold it."""
    processes = start(tmp_path / "peers", [how(strategy)] * 2, ranks=strategy.ranks, work=work.train)
    network, norms = one_process(of_both(STEPS))
    assert max(norms) > CLIP
    found = results(tmp_path / "peers", processes)
    assert len(found) == 2 * strategy.ranks
    assert all(rank["epoch"] == STEPS for rank in found)
    peers = [whole(found[: strategy.ranks]), whole(found[strategy.ranks :])]
    assert torch.equal(*peers)
    assert (peers[0] - vector_of(network)).abs().max() < 1e-5
    assert sum(rank["averages"] for rank in found) == 2 * strategy.ranks // strategy.copies
    for rank in found:
        assert torch.allclose(
            torch.tensor([step["norm"] for step in rank["seen"]]), torch.tensor(norms), rtol=1e-4
        )
        assert [step["moved"] for step in rank["seen"]] == [step["moved"] for step in found[0]["seen"]]
        assert all(step["loss"] is not None for step in rank["seen"] if rank["stage"] == strategy.stages - 1)


@pytest.mark.long
def test_copies_of_a_parameter_stay_the_same_with_a_lossy_codec(tmp_path: Path) -> None:
    """Each rank's round rounds in its own way: the ranks take the average of the first rank that holds a part."""
    strategy = ModelParallel(training=LARGE, tensor=2)
    plans = [how(strategy, compression="blockwise8")] * 2
    found = results(tmp_path / "peers", start(tmp_path / "peers", plans, ranks=2, work=work.train))
    assert torch.equal(whole(found[:2]), whole(found[2:])), "`whole` compares the ranks of each peer"


@pytest.mark.long
def test_stages_stay_together_when_the_other_peer_is_lost_between_their_rounds(tmp_path: Path) -> None:
    """One stage has the average with the lost peer, the other has none: neither takes it, and both go on alone."""
    lost = 2
    plans = [how(STAGES, alone=True, ends=1), how(STAGES, alone=True, ends=1, dies_at=lost)]
    found = results(tmp_path / "peers", start(tmp_path / "peers", plans, ranks=2, work=work.train))
    assert len(found) == 2, "only the first peer's ranks came to an end"
    updated = [[step["updated"] for step in rank["seen"]] for rank in found]
    # The batch of the step in which the peer was lost is forgotten. Alone, an update needs the batches of two steps.
    assert updated[0] == updated[1] == [True, True, False, False, True]
    network, _ = one_process([*of_both(lost), [(0, 3), (0, 4)]])
    assert (whole(found) - vector_of(network)).abs().max() < 1e-5


@pytest.mark.long
def test_two_peers_of_stages_stay_together_when_a_third_is_lost_between_their_rounds(tmp_path: Path) -> None:
    """Whatever each round of that step came to, the peers that are left have taken the same updates in all stages."""
    plans = [how(STAGES, peers=3, updates=5) for _ in range(3)]
    plans[2]["dies_at"] = 2
    found = results(tmp_path / "peers", start(tmp_path / "peers", plans, ranks=2, work=work.train))
    assert len(found) == 4, "only two peers' ranks came to an end"
    assert [rank["epoch"] for rank in found] == [5] * 4
    assert torch.equal(whole(found[:2]), whole(found[2:]))
    for peer in (found[:2], found[2:]):
        first, second = ([step["updated"] for step in rank["seen"]] for rank in peer)
        assert first == second


@pytest.mark.long
def test_a_peer_of_stages_that_comes_late_fetches_the_state_of_each_stage(tmp_path: Path) -> None:
    plans = [how(STAGES, late=False, ends=3, peers=3) for _ in range(2)] + [
        how(STAGES, late=True, ends=3, peers=3)
    ]
    found = results(tmp_path / "peers", start(tmp_path / "peers", plans, ranks=2, work=work.train))
    peers = [whole(found[at : at + 2]) for at in (0, 2, 4)]
    assert torch.equal(peers[0], peers[1])
    assert torch.equal(peers[0], peers[2])
    assert len({rank["epoch"] for rank in found}) == 1


def test_a_mistake_on_one_rank_is_raised_on_all_and_says_what_to_do(tmp_path: Path) -> None:
    """Otherwise the other ranks would wait in a collective for ever."""
    found = results(tmp_path / "peer", start(tmp_path / "peer", [{}], ranks=2, work=work.mistakes))
    first, second = (rank["said"] for rank in found)
    nothing = "inner has no parameters that require a gradient"
    assert (first["frozen"], second["frozen"]) == (f"on rank 1 of this peer: {nothing}", nothing)
    assert second["missing"].startswith("averager is missing: each rank of the first copy averages its part")
    assert first["missing"] == f"on rank 1 of this peer: {second['missing']}"
    other = (
        "averager is of the run 'company/pp 0 of 2', and this rank holds the part 'pp 1 of 2': open it with"
    )
    assert second["of another rank"].startswith(other)
    assert first["of another rank"] == f"on rank 1 of this peer: {second['of another rank']}"
    no_stages = "0.weight of rank 0 and 3.weight of rank 1 of this peer are the same tensor by their layout"
    assert first["no stages"] == second["no stages"]
    assert first["no stages"].startswith(no_stages)
    assert "process_group=PeerMesh(mesh, stages=...)" in first["no stages"]
    assert "optimizer has a process_group with rank 1" in first["copies that divide"]
    assert first["fragments"].startswith("fragments must be 1 if ranks of this peer hold the same parameters")
    assert first["fragments"] == second["fragments"]
    assert first["right"] == second["right"] == "AveragedOptimizer"


@pytest.mark.long
def test_diloco_of_stages_matches_one_process(tmp_path: Path) -> None:
    """Each stage averages its pseudo-gradients, and takes the outer steps of them."""
    training = Federated(rule="diloco", sync_every=2, options={"lr": 0.7, "momentum": 0.9})
    strategy = ModelParallel(training=training, stages=2, microbatches=2)
    plans = [how(strategy, steps=6)] * 2
    processes = start(tmp_path / "peers", plans, ranks=2, work=work.train)
    models = [work.model() for _ in range(2)]
    inners = [work.inner_of(each) for each in models]
    batches = [Batches(peer, work.BATCH) for peer in range(2)]
    anchor, outer = vector_of(models[0]).double(), Nesterov(0.7, 0.9)
    for step in range(6):
        for each, inner, drawn in zip(models, inners, batches, strict=True):
            inner.zero_grad()
            torch.autograd.backward(loss_of(each, drawn.next()))
            inner.step()
        if step % 2:
            anchor = outer(anchor, anchor - sum(vector_of(each).double() for each in models) / 2)
            for each in models:
                load(each, anchor.float())
    found = results(tmp_path / "peers", processes)
    assert [rank["epoch"] for rank in found] == [3] * 4
    assert torch.equal(whole(found[:2]), whole(found[2:]))
    assert (whole(found[:2]) - anchor).abs().max() < 1e-5
