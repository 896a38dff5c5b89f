"""Peers of several FSDP ranks in one run with peers of one rank: they fetch each other's states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.optim import whole_work
from tests.integration.optim.test_ddp import how, results, start


@pytest.mark.parametrize(
    ("ranks", "local"),
    [([1, 1, 2], False), ([2, 2, 1], False), ([1, 2, 2], True)],
    ids=["shards take the state of one rank", "one rank takes the state of shards", "local updates"],
)
def test_peers_of_one_rank_and_of_shards_fetch_each_others_states(
    ranks: list[int], local: bool, tmp_path: Path
) -> None:
    """Two peers train, and the last one comes late, with other parameters. All end with the same bits."""
    plans = [how(3, total=sum(ranks), local=local, late=peer == 2) for peer in range(3)]
    processes = start(tmp_path / "peers", plans, ranks, work=whole_work.late)
    found = results(tmp_path / "peers", processes)
    assert len(found) == sum(ranks)
    firsts = [rank for rank in found if rank["lineage"]]
    assert len(firsts) == 3
    assert len({rank["lineage"] for rank in firsts}) == 1
    assert all(rank["common"] == firsts[0]["common"] for rank in firsts)
    assert len({rank["epoch"] for rank in found}) == 1
    if not local:  # between two outer updates, each peer has parameters of its own
        assert all(rank["rank"] == found[0]["rank"] for rank in found)
