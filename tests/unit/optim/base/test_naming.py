"""Names of a model's parts: the same for each way to wrap it, and without buffers that are not persistent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD

from p2pavg.base.errors import StateError
from p2pavg.optim import RunState
from p2pavg.optim.base.joined import plain_buffers, plain_name, plain_parameters
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.catching_up.checkpoints import Checkpoints
from p2pavg.optim.ranks.whole import layout_of
from p2pavg.population.weights import Weights
from tests.unit.optim.fakes import Alone, Make, both, large_batch, local
from tests.unit.optim.loops import batch, small


def compiled(model: nn.Module) -> nn.Module:
    """Return a module as torch.compile wraps it; nothing is compiled before its first call."""
    return cast(nn.Module, torch.compile(model, backend="eager"))


def compiled_inside(model: nn.Module) -> nn.Module:
    """Compile one layer only, as programs do with repeated blocks."""
    model[0] = compiled(model[0])  # type: ignore[operator, index]
    return model


def in_both(model: nn.Module) -> nn.Module:
    return DataParallel(compiled(model))


wrapped = pytest.mark.parametrize("wrap", [compiled, DataParallel, in_both, compiled_inside])
Wrap = Callable[[nn.Module], nn.Module]


@wrapped
def test_a_wrapper_changes_no_name(wrap: Wrap) -> None:
    model, other = small(), wrap(small())
    assert list(plain_parameters(other)) == [name for name, _ in model.named_parameters()]
    assert list(plain_buffers(other)) == [name for name, _ in model.named_buffers()]
    for name, _ in other.named_buffers():
        assert plain_name(other, name) in plain_buffers(other)
    for name in plain_buffers(other):
        assert plain_name(other, name) == name


@wrapped
@both
def test_a_peer_that_wraps_its_model_is_in_the_lineage_of_one_that_does_not(make: Make, wrap: Wrap) -> None:
    model, other = small(), wrap(small())
    one = make(Alone(), SGD(model.parameters(), lr=0.1), model=model)
    two = make(Alone(), SGD(other.parameters(), lr=0.1), model=other)
    assert one.lineage == two.lineage
    assert one._parts.labels == two._parts.labels


@wrapped
def test_fragments_do_not_see_the_wrapper(wrap: Wrap) -> None:
    model, other = small(), wrap(small())
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "buffers": []}
    one = local(Alone(), SGD(model.parameters(), lr=0.1), model=model, **options)
    two = local(Alone(), SGD(other.parameters(), lr=0.1), model=other, **options)
    assert one.lineage == two.lineage


@pytest.mark.parametrize("name", ["1.running_mean", "_orig_mod.1.running_mean"])
def test_a_buffer_is_chosen_by_either_name(name: str) -> None:
    model = compiled(small())
    parts = ModelParts(model, list(model.parameters()), buffers=[name], codec=Alone().config.codec)
    assert list(parts.common) == ["1.running_mean"]


def test_members_of_a_population_may_wrap_their_models() -> None:
    one, two = small(), in_both(small(4))
    donor = Weights(one, SGD(one.parameters(), lr=0.1), None, ["lr"])
    taker = Weights(two, SGD(two.parameters(), lr=0.1), None, ["lr"])
    taker.prepare(donor.content([])).take()
    assert torch.equal(
        nn.utils.parameters_to_vector(one.parameters()), nn.utils.parameters_to_vector(two.parameters())
    )


# ---------------------------------------------------------------------- buffers that are not persistent


class Masked(nn.Module):
    """A model with a cache that grows with the longest sequence, and a table that is part of its state."""

    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mask", torch.ones(length), persistent=False)
        self.register_buffer("table", torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(len(self.mask) + 1)  # for a longer sequence
        return cast(torch.Tensor, self.layer(inputs))


def masked(length: int) -> Masked:
    model = Masked(length)
    with torch.no_grad():
        for weights in model.parameters():
            weights.fill_(0.5)
    return model


@both
def test_caches_of_other_sizes_are_no_other_settings_and_may_change(make: Make) -> None:
    short, long = masked(4), masked(9)
    one = make(Alone(), SGD(short.parameters(), lr=0.1), model=short)
    two = make(Alone(), SGD(long.parameters(), lr=0.1), model=long)
    assert one.lineage == two.lineage
    assert batch(short, one).updated
    assert batch(long, two).updated
    assert one.lineage == two.lineage


def test_a_cache_that_is_asked_for_is_averaged() -> None:
    model = masked(4)
    optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model, buffers=["mask"])
    assert optimizer.averaged_buffers == {"mask"}


def test_a_checkpoint_fits_a_model_whose_cache_has_grown(tmp_path: Path) -> None:
    short, long = masked(4), masked(9)
    common: Any = type("Common", (), {"buffers": frozenset[str]()})()
    rest: Any = (None, None, None)
    saved = Checkpoints(RunState(short, tmp_path), common, *rest)._own_buffers()
    assert list(saved) == ["table"]
    saved = {name: 2 * buffer for name, buffer in saved.items()}
    Checkpoints(RunState(long, tmp_path), common, *rest)._load_buffers(saved)
    assert long.table.tolist() == [2.0, 2.0]
    assert len(long.mask) == 9


def test_members_of_a_population_and_whole_copies_do_not_have_caches() -> None:
    short, long = masked(4), masked(9)
    assert layout_of(short) == layout_of(long)
    donor = Weights(short, SGD(short.parameters(), lr=0.1), None, ["lr"])
    Weights(long, SGD(long.parameters(), lr=0.1), None, ["lr"]).prepare(donor.content([]))
    short.table = torch.ones(3)
    with pytest.raises(StateError, match="table"):
        Weights(long, SGD(long.parameters(), lr=0.1), None, ["lr"]).prepare(donor.content([]))
