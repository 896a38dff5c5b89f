"""Peers of several ranks that hold the same parameters: rank 0 trains, and the others copy it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.optim import replica_work
from tests.integration.optim.test_ddp import how, results, start

STREAMED = {"sync_every": 4, "fragments": 2, "delay": 1, "offload": True}


@pytest.mark.parametrize(
    ("local", "options"),
    [(False, {}), (True, {}), (True, STREAMED)],
    ids=["averaged", "local", "in fragments"],
)
def test_a_late_peer_of_two_ranks_fetches_the_state_of_peers_with_other_numbers_of_ranks(
    local: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """A peer of one rank and one of two train; the late one has two, which begin with other parameters."""
    ranks = [1, 2, 2]
    plans = [how(3, total=sum(ranks), local=local, options=options, late=peer == 2) for peer in range(3)]
    processes = start(tmp_path / "peers", plans, ranks, work=replica_work.late)
    found = results(tmp_path / "peers", processes)
    assert len(found) == sum(ranks)
    firsts = [rank for rank in found if rank["lineage"]]
    assert len(firsts) == 3
    assert len({rank["lineage"] for rank in firsts}) == 1
    assert all(rank["common"] == firsts[0]["common"] for rank in firsts)
    assert len({rank["epoch"] for rank in found}) == 1
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
