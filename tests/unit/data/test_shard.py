"""Shards are fixed, disjoint, complete, and of sizes that differ by one at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from p2pavg.data import shard


@given(length=st.integers(0, 2000), count=st.integers(1, 300))
def test_shards_hold_each_sample_once_and_are_level(length: int, count: int) -> None:
    shards = [shard(length, index, count) for index in range(count)]
    assert sorted(sample for part in shards for sample in part) == list(range(length))
    sizes = [len(part) for part in shards]
    assert max(sizes) - min(sizes) <= 1


def test_a_length_gives_indices_and_a_data_set_gives_a_subset() -> None:
    assert shard(10, 1, 4) == range(1, 10, 4)
    part = shard(TensorDataset(torch.arange(10)), 1, 4)
    assert isinstance(part, Subset)
    assert [int(part[number][0]) for number in range(len(part))] == [1, 5, 9]


def test_a_shard_of_the_largest_length_takes_no_memory() -> None:
    part = shard(2**62, 2, 3)
    assert part[0] == 2
    assert part[-1] < 2**62 <= part[-1] + 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("dataset_or_length", value) for value in (-1, 2**62 + 1, 1.0, True, None, 1j)],
        *[("index", value) for value in (-1, 4, 0.0, "0", None, True)],
        *[("count", value) for value in (0, -1, 2**63, 4.0, "4", None, True)],
    ],
    ids=repr,
)
def test_what_is_out_of_range_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"dataset_or_length": 10, "index": 0, "count": 4, name: value}
    with pytest.raises(ValueError, match=rf"^{name} must"):
        shard(**arguments)
