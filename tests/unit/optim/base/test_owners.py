"""Modules of an optimizer's parameters: the warning of buffers that an optimizer without a model leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from p2pavg.optim.base.touched import modules_around, saved_buffers
from tests.unit.optim.fakes import Alone, Make, both
from tests.unit.optim.loops import plain, small


class Masked(nn.Module):
    """A layer with a cache, which no state has, and a table, which is part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(3))


def saved_by(model: nn.Module) -> list[str]:
    trained = list(model.parameters())
    return saved_buffers(trained, modules_around(trained))


def test_running_statistics_and_tables_are_found() -> None:
    model = nn.Sequential(Masked(), nn.BatchNorm1d(2, affine=False))
    names = ["Masked.table", "BatchNorm1d.running_mean", "BatchNorm1d.running_var"]
    assert saved_by(model) == names


def test_frozen_parts_of_the_model_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Masked())
    model[1].requires_grad_(False)
    assert saved_by(model) == ["Masked.table"]


def test_buffers_beside_parameters_of_another_optimizer_do_not_count() -> None:
    """The networks of a GAN, in one module."""
    both = nn.ModuleDict({"generator": plain(), "discriminator": small()})
    assert saved_by(both["generator"]) == []
    assert saved_by(both["discriminator"]) != []


@both
def test_an_optimizer_without_the_model_says_what_it_leaves_out(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = small(), plain()
    make(Alone(), SGD(other.parameters(), lr=0.1))
    make(Alone(), SGD(model.parameters(), lr=0.1), model=model)
    assert "buffers" not in caplog.text
    make(Alone(), SGD(model.parameters(), lr=0.1))
    assert caplog.text.count("belong to a model with buffers (BatchNorm1d.running_mean, ") == 1
    assert "Give state=model" in caplog.text
