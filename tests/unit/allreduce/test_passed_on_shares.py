"""Shares that come from another member than their reducer: whole, with the reducer's digest, and never mixed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec, Fp32
from tests.unit.allreduce.held import (
    IDS,
    PART,
    SHARE,
    Held,
    bits,
    codecs,
    expected,
    in_threads,
    share,
    use_small_parts,
)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_parts(monkeypatch)


def other_share(reducer: int) -> list[Buffer]:
    """Return another share, which a source passes on as the reducer's share."""
    return [np.full(PART, 7.0 + index, np.float32).tobytes() for index in range(4)]


@pytest.mark.parametrize("come", [0, 1, 3])
def test_a_passed_on_share_replaces_an_incomplete_one(come: int) -> None:
    """The whole share is from one source. A mixture would match the digest of neither."""
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([1])
    for index in range(come):
        held.receive_average(IDS[2], held.parts(2)[index], share(Fp32(), 2)[index])
    assert not held.complete
    held.receive_share(IDS[2], other_share(2))
    assert held.complete
    assert [bytes(held.averages.encoded(IDS[2], index)) for index in range(4)] == other_share(2)
    assert held.averages.values[2 * SHARE :: PART].tolist() == [7.0, 8.0, 9.0, 10.0]


def test_a_passed_on_share_does_not_replace_a_whole_one() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all()
    before, told = bits(held.averages.values), held.averages.digests()
    held.receive_share(IDS[1], other_share(1))
    assert (bits(held.averages.values), held.averages.digests()) == (before, told)
    assert [bytes(held.averages.encoded(IDS[1], index)) for index in range(4)] == share(Fp32(), 1)


def test_late_parts_of_the_reducer_that_is_gone_change_nothing() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([2])
    held.receive_average(IDS[1], held.parts(1)[0], share(Fp32(), 1)[0])
    held.receive_share(IDS[1], other_share(1))
    assert held.complete
    before, told = bits(held.averages.values), held.averages.digests()
    for index in range(1, 4):
        held.receive_average(IDS[1], held.parts(1)[index], share(Fp32(), 1)[index])
    assert held.complete
    assert (bits(held.averages.values), held.averages.digests()) == (before, told)
    assert [bytes(held.averages.encoded(IDS[1], index)) for index in range(4)] == other_share(1)


def test_a_share_with_an_undecodable_part_may_come_again() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([2])
    bad = [*other_share(1)[:3], np.full(PART, np.inf, np.float32).tobytes()]
    with pytest.raises(RemoteProtocolError):
        held.receive_share(IDS[1], bad)
    assert not held.complete
    held.receive_share(IDS[1], share(Fp32(), 1))
    assert held.complete
    assert bits(held.averages.values) == expected(Fp32())


DECODING = threading.Event()


@codecs
def test_a_passed_on_share_has_the_same_digest(codec: Codec) -> None:
    held, other = Held(codec, 0), Held(codec, 1)
    held.reduce_all()
    other.receive_share(IDS[0], [bytes(held.averages.encoded(IDS[0], index)) for index in range(4)])
    assert held.averages.digests()[0] == other.averages.digests()[0]


class Slow(Fp32):
    """A codec that decodes the lost reducer's parts slowly, so other threads run meanwhile."""

    def decode(self, payload: Buffer, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if payload not in other_share(1):
            DECODING.set()
            time.sleep(0.005)
        return Fp32.decode(self, payload, elements, out)


@pytest.mark.parametrize("come", range(4))
def test_two_threads_never_mix_two_sources_of_a_share(come: int) -> None:
    """The digest is that of the held share, for any order of arrival."""
    genuine, passed = share(Fp32(), 1), other_share(1)
    held = Held(Slow())
    held.reduce_all()
    held.receive_all([2])
    for index in range(come):
        held.receive_average(IDS[1], held.parts(1)[index], genuine[index])
    DECODING.clear()

    def late() -> None:
        for index in range(come, 4):
            held.receive_average(IDS[1], held.parts(1)[index], genuine[index])

    def pass_on() -> None:
        assert DECODING.wait(30.0), "a part of the reducer is half-way"
        held.receive_share(IDS[1], passed)

    in_threads(late, pass_on)
    assert held.complete
    there: list[Buffer] = [bytes(held.averages.encoded(IDS[1], index)) for index in range(4)]
    assert there in (genuine, passed)
    assert held.averages.values[SHARE : 2 * SHARE].numpy().tobytes() == b"".join(map(bytes, there))
    other = Held(Fp32())
    other.receive_share(IDS[1], there)
    assert held.averages.digests()[1] == other.averages.digests()[1]
