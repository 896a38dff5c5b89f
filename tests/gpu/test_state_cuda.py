"""Snapshots and checkpoints of tensors on a GPU have the bytes of the same tensors on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2pavg.state.checking import is_finite
from p2pavg.state.checkpoint import read, write_checkpoint
from p2pavg.state.snapshot import Content, copy_of
from tests.unit.state.contents import of_every_dtype, same_content

pytestmark = pytest.mark.gpu


def test_a_snapshot_of_a_gpu_is_that_of_the_cpu() -> None:
    tensors = of_every_dtype()
    on_gpu = {name: tensor.to("cuda") for name, tensor in tensors.items()}
    assert copy_of(Content(on_gpu)) == copy_of(Content(tensors))


def test_a_checkpoint_of_a_gpu_comes_back(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    on_gpu = {name: tensor.to("cuda") for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "file", 1, Content(on_gpu), Content())
    assert same_content(read(tmp_path / "file").common, Content(tensors))


def test_a_nan_on_a_gpu_is_found() -> None:
    numbers = torch.ones(1000, device="cuda")
    assert is_finite(numbers)
    numbers[-1] = float("nan")
    assert not is_finite(numbers)
