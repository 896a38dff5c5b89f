"""What may be wrong with the whole copy of a sharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from p2pavg.optim.ranks.whole import difference, is_sharded, layout_of, wrong_network


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_a_copy_of_the_model_fits() -> None:
    assert difference(layout_of(model()), layout_of(model())) == ""


def lacks(module: nn.Module) -> None:
    module[1] = nn.Identity()  # type: ignore[operator]


def has_more(module: nn.Module) -> None:
    module.register_buffer("more", torch.zeros(1))


def has_other_shape(module: nn.Module) -> None:
    module[0] = nn.Linear(4, 2)  # type: ignore[operator]


def has_other_dtype(module: nn.Module) -> None:
    module[0].bfloat16()  # type: ignore[index]


def trains_less(module: nn.Module) -> None:
    module[0].bias.requires_grad_(False)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lacks, "whole must be the module of network before it was sharded: whole has no '1.weight'"),
        (has_more, "whole must be the module of network before it was sharded: network has no 'more'"),
        (
            has_other_shape,
            "whole must be like network: '0.weight' is float32 of shape (2, 4) there, and is float32 of shape (2, 3)"
            " in network",
        ),
        (
            has_other_dtype,
            "whole must be like network: '0.weight' is bfloat16 of shape (2, 3) there, and is float32 of shape (2, 3)"
            " in network",
        ),
        (
            trains_less,
            "whole must be like network: '0.bias' is float32 of shape (2,), not trained, there, and is float32 of"
            " shape (2,) in network",
        ),
    ],
)
def test_the_first_difference_is_named(change: Callable[[nn.Module], None], told: str) -> None:
    whole = model()
    change(whole)
    assert difference(layout_of(whole), layout_of(model())) == told


def test_parameters_in_another_order_are_refused() -> None:
    """Ranks name a parameter by its position."""
    layout = layout_of(model())
    turned = dict(reversed(list(layout.items())))
    assert difference(turned, layout) == "whole must have its parameters in the order of network's"


class Sharded(nn.Parameter):
    """Stands in for a parameter that is sharded over ranks."""

    def to_local(self) -> torch.Tensor:
        return self.detach()[:, :1]

    @property
    def device_mesh(self) -> object:
        return type("Mesh", (), {"mesh": torch.tensor([[2, 3]])})


def test_the_network_must_be_sharded_over_the_ranks_of_the_group() -> None:
    network = nn.Linear(2, 1)
    assert not is_sharded(network)
    network.weight = Sharded(torch.zeros(1, 2))
    assert is_sharded(network)
    assert wrong_network(network, [2, 3]) == (
        "the parameter 'bias' of network is not sharded: no rank reduces its gradients"
    )
    network.bias.requires_grad_(False)
    assert wrong_network(network, [2, 3]) == ""
    assert wrong_network(network, [0, 1]) == (
        "network is sharded over the ranks [2, 3], and process_group has [0, 1]: give the group of the same ranks, in"
        " the same order"
    )
