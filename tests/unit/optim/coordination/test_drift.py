"""Peers with other parameters after the same updates are named, with the differing tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from p2pavg.optim.base.state import MAX_CHUNKS, SHORT_BYTES, chunk_bounds, short_digests, tensor_digest
from p2pavg.optim.coordination.watch import drifted

LABELS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def digests(*changed: int, tensors: int = 4) -> bytes:
    values = [torch.full((3,), float(index)) for index in range(tensors)]
    for index in changed:
        values[index][1] += 1e-6
    return short_digests([tensor_digest(value) for value in values])


def test_peers_that_agree_have_not_drifted() -> None:
    assert drifted(20, digests(), {}, LABELS) is None
    assert drifted(20, digests(), {"a": digests(), "b": digests()}, LABELS) is None


def test_differing_peer_is_named_with_the_parameters() -> None:
    told = drifted(20, digests(), {"peer-a": digests(1), "peer-b": digests()}, LABELS)
    assert told == (
        "1 peer (..peer-a) says that it holds other parameters after update 20 than this one and 1 other:"
        " 0.bias differs"
    )


def test_groups_of_peers_are_told_apart() -> None:
    others = {"a": digests(0), "b": digests(0), "c": digests(1, 3)}
    assert drifted(10, digests(), others, LABELS) == (
        "2 peers (..a, ..b) say that they hold other parameters after update 10 than this one: 0.weight differs;"
        " 1 peer (..c) says that it holds other parameters after update 10 than this one: 0.bias, 2.bias differ"
    )


def test_thousand_liars_cause_one_short_line() -> None:
    others = {f"{index:060}": bytes([index % 251]) * 32 for index in range(1000)}
    told = drifted(10, digests(), others, LABELS)
    assert told is not None
    assert len(told) < 1000


def test_chunk_of_many_tensors_is_named_by_its_ends() -> None:
    many = 1000
    labels = [f"p{index}" for index in range(many)]
    told = drifted(10, digests(tensors=many), {"a": digests(20, tensors=many)}, labels)
    first, end = next(bounds for bounds in chunk_bounds(many) if bounds[0] <= 20 < bounds[1])
    assert told is not None
    assert told.endswith(f"p{first} to p{end - 1} differs")


def test_digests_of_another_number_of_tensors_differ() -> None:
    told = drifted(10, digests(), {"a": digests(tensors=3)}, LABELS)
    assert told is not None
    assert "another number of tensors" in told


@pytest.mark.parametrize("tensors", [1, 2, 63, 64, 65, 1000, 100_000])
def test_every_tensor_is_in_one_chunk(tensors: int) -> None:
    bounds = chunk_bounds(tensors)
    assert len(bounds) == min(tensors, MAX_CHUNKS)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == tensors
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(first < end for first, end in bounds)


def test_the_digests_fit_beside_the_rest_of_a_record() -> None:
    assert len(digests(tensors=500)) == MAX_CHUNKS * SHORT_BYTES
