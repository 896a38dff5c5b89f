"""The memory of the values that a member holds: no copy, and no buffer longer than it is needed."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from p2pavg.allreduce import values
from p2pavg.allreduce.reduction import average_part
from p2pavg.group.aggregation import Aggregation, Median
from p2pavg_compression import Blockwise8, Codec, Fp32
from tests.unit.allreduce.held import (
    ELEMENTS,
    IDS,
    PART,
    SIZE,
    WEIGHTS,
    Held,
    bits,
    codecs,
    in_threads,
    share,
    use_small_parts,
    vector,
)
from tests.unit.allreduce.vector.idle import idle_bytes


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_parts(monkeypatch)


def test_bytes_that_are_the_values_are_not_kept_twice() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([1])
    held.receive_share(IDS[2], share(Fp32(), 2))
    memory = held.averages.values.numpy().view(np.uint8)
    for index in range(SIZE):
        for part in held.parts(index):
            kept = np.frombuffer(held.averages.encoded(IDS[index], part.index), np.uint8)
            assert kept.ctypes.data == memory.ctypes.data + 4 * part.start
            assert kept.nbytes == 4 * part.elements


def test_an_encoded_average_is_kept_as_it_came() -> None:
    """The member may have to pass on the same bytes."""
    codec = Blockwise8(block_size=64)
    held = Held(codec)
    payload = share(codec, 1)[0]
    held.receive_average(IDS[1], held.parts(1)[0], payload)
    assert held.averages.encoded(IDS[1], 0) is payload


def test_contributions_are_let_go_when_they_are_averaged() -> None:
    held = Held(Fp32())
    for member in (1, 2):
        payload = held.buffer(held.parts(0)[0])
        payload[:] = vector(member)[:PART].numpy().tobytes()
        assert held.contributed(IDS[member], 0, payload) == (member == 2)
        del payload
    assert idle_bytes(held.buffers) == 0
    held.average(0)
    assert idle_bytes(held.buffers) == 3 * 4 * PART, "two that came, and the one to work in"


@pytest.mark.parametrize("robust", [False, True])
def test_a_robust_rule_has_one_part_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch, robust: bool) -> None:
    """However many parts are complete at once, in as many threads."""
    both, most, running = threading.Barrier(2), [0], [0]

    def slow(*given: Any, **named: Any) -> memoryview:
        running[0] += 1
        most[0] = max(most[0], running[0])
        if not robust:
            both.wait(30.0)  # the premise: without the rule, threads average at the same time
        time.sleep(0.01)
        running[0] -= 1
        return average_part(*given, **named)

    monkeypatch.setattr(values, "average_part", slow)
    held = Held(Fp32(), aggregation=Aggregation(Median() if robust else None))
    for index in range(2):
        for member in (1, 2):
            part = held.parts(0)[index]
            held.contributed(IDS[member], index, vector(member)[part.start : part.stop].numpy().tobytes())
    in_threads(partial(held.average, 0), partial(held.average, 1))
    assert sorted(held.ready) == [0, 1]
    assert most[0] == (1 if robust else 2)


def test_a_robust_rule_takes_and_releases_one_part_per_contributor() -> None:
    held = Held(Fp32(), aggregation=Aggregation(Median()))
    for member in (1, 2):
        held.contribute(member, 0)
    assert idle_bytes(held.buffers) == 3 * 4 * PART, (
        "two decoded contributions, and the result before it is encoded"
    )
    middle = torch.stack([vector(member)[:PART] for member in range(SIZE)])
    # The weights are 1, 5 and 0.25. None counts more than the median weight, so no member alone has more than half.
    assert sorted(WEIGHTS) == [0.25, 1.0, 5.0]
    assert torch.equal(held.averages.values[:PART], middle.median(0).values)


@codecs
def test_letting_go_keeps_no_buffer_of_the_vectors_size(codec: Codec) -> None:
    held = Held(codec)
    own = weakref.ref(held._vector)
    came: list[weakref.ref[Any]] = []
    for part in held.parts(0):
        payload = held.buffer(part)
        payload[:] = codec.encode(vector(1)[part.start : part.stop])
        held.contributed(IDS[1], part.index, payload)
        came.append(weakref.ref(np.asarray(payload.obj)))
    del payload
    for index in range(3):
        held.contribute(2, index)
    held.receive_all([1])
    assert [each() is None for each in came] == [True, True, True, False], "one waits for another member's"
    held.let_go()
    assert came[-1]() is None
    assert idle_bytes(held.buffers) >= 4 * ELEMENTS + 4 * codec.encoded_nbytes(PART)
    assert own() is None


def test_letting_go_does_not_change_a_result_in_use() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all()
    result = held.averages.values[5:10]
    before = bits(result)
    held.let_go()
    held.buffers.floats(ELEMENTS).fill_(-1.0)
    assert bits(result) == before
