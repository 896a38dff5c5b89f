"""The mesh of a peer's ranks, on a backend without any other process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pavg import AveragingConfig
from p2pavg.optim import PeerMesh
from p2pavg.optim.ranks.shards import Ranks, Sharing


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    def begin(rank: int, ranks: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_a_rank_has_its_part_and_its_group(as_rank: Callable[[int, int], None]) -> None:
    as_rank(6, 8)
    place = PeerMesh(mesh_of((2, 2, 2), ("dp", "pp", "tp")), stages="pp", copies="dp")
    assert (place.stage, place.part, place.averages) == (1, "pp 1 of 2, tp 0 of 2", False)
    assert dist.get_process_group_ranks(place.group) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(cast(dist.ProcessGroup, place.copies_group)) == [2, 6]


def test_the_ranks_of_a_mesh_need_not_be_in_order(as_rank: Callable[[int, int], None]) -> None:
    as_rank(1, 4)
    mesh = dist.device_mesh.DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "pp"))
    place = PeerMesh(mesh, stages="pp", copies="dp")
    assert (place.stage, place.averages) == (0, False)
    assert dist.get_process_group_ranks(place.group) == [1, 3]


def test_ranks_of_one_part_share_a_run(as_rank: Callable[[int, int], None]) -> None:
    as_rank(1, 2)
    config = AveragingConfig(run_id="lab", group_size=8)
    place = PeerMesh(mesh_of((2,), ("pp",)), stages="pp")
    assert place.config(config).run_id == "lab/pp 1 of 2"
    assert place.config(config).group_size == 8
    assert place.group is dist.group.WORLD
    assert place.copies_group is None
    whole = PeerMesh(mesh_of((2,), ("dp",)), copies="dp")
    assert whole.config(config) == config


def test_a_rank_without_copies_exchanges_nothing(as_rank: Callable[[int, int], None]) -> None:
    """Other ranks of its peer may have copies, in another stage."""
    as_rank(0, 2)
    ranks = Ranks(dist.group.WORLD)
    ranks.hold_copies, ranks._sharing = True, Sharing((True,))
    averaged = torch.ones(3)
    assert ranks.settle([averaged])[0] is averaged


def test_a_mesh_without_all_ranks_is_refused_with_what_to_do(as_rank: Callable[[int, int], None]) -> None:
    as_rank(0, 4)
    everyone = mesh_of((2, 2), ("pp", "dp"))
    with pytest.raises(
        ValueError, match=r"mesh \(pp 2\) has 2 ranks, and this peer has 4: make it of all ranks"
    ):
        PeerMesh(everyone["pp"], stages="pp")
    with pytest.raises(ValueError, match=r"stages is 'tp', and mesh has the dimensions pp, dp"):
        PeerMesh(everyone, stages="tp")
    with pytest.raises(
        ValueError, match="mesh has no names of its dimensions: give init_device_mesh mesh_dim_names"
    ):
        PeerMesh(mesh_of((4,), None))
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got ProcessGroup: make one with"):
        PeerMesh(cast(Any, dist.group.WORLD))
