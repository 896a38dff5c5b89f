"""The values that a member holds of an attempt: completeness, exact bits, and digests."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.events import BadContributionError
from p2pavg.allreduce.messages import Lane
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.votes import DIGEST_BYTES
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec, Fp32
from tests.unit.allreduce.held import (
    IDS,
    PART,
    SHARE,
    SIZE,
    Held,
    averaged_part,
    bits,
    codecs,
    expected,
    in_threads,
    members,
    share,
    sole,
    use_small_parts,
    vector,
    with_auxiliary,
    with_observer,
)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_parts(monkeypatch)


# -- completeness


EVENTS = [("contribution", 1), ("contribution", 2), ("average", 1), ("average", 2)]


@codecs
@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS))[::5])
def test_the_result_is_whole_when_all_parts_have_come_and_not_before(
    codec: Codec, order: Sequence[tuple[str, int]]
) -> None:
    held = Held(codec)
    for what, member in order:
        for index in range(4):
            assert not held.complete
            if what == "contribution":
                held.contribute(member, index)
            else:
                held.receive_average(IDS[member], held.parts(member)[index], share(codec, member)[index])
    assert held.complete
    assert bits(held.averages.values) == expected(codec)


def test_contributions_that_are_not_averaged_yet_do_not_count() -> None:
    held = Held(Fp32())
    held.receive_all()
    held.reduce_all([1])
    for index in range(4):
        part = vector(2)[index * PART : (index + 1) * PART].numpy().tobytes()
        assert held.contributed(IDS[2], index, part), "it was the last contribution to its part"
    for index in (2, 0, 3, 1):
        assert not held.is_ready(index)
        assert not held.complete
        held.average(index)
        assert held.is_ready(index)
    assert held.complete


def test_the_received_parts_of_a_lane_are_known() -> None:
    """After a direct lane broke, its sender begins again from the first part."""
    held = Held(Fp32())
    held.contribute(1, 0)
    held.receive_average(IDS[2], held.parts(2)[0], share(Fp32(), 2)[0])
    for peer_id, lane, has in (
        (IDS[1], Lane.CONTRIBUTIONS, 1),
        (IDS[1], Lane.AVERAGES, 0),
        (IDS[2], Lane.CONTRIBUTIONS, 0),
        (IDS[2], Lane.AVERAGES, 1),
    ):
        assert [held.has(peer_id, lane, index) for index in range(4)] == [index < has for index in range(4)]


# -- exact bits


@codecs
@given(st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_averages_are_the_same_bits_in_any_order_of_arrival(codec: Codec, draw: random.Random) -> None:
    """They equal the result of one call with all contributions in the roster's order."""
    with pytest.MonkeyPatch.context() as patch:
        use_small_parts(patch)
        held = Held(codec)
        turns = [1] * 4 + [2] * 4
        draw.shuffle(turns)
        come = {1: 0, 2: 0}
        for member in turns:
            held.contribute(member, come[member])
            come[member] += 1
        for part in held.ledger.parts[IDS[0]]:
            encoded, averaged = averaged_part(codec, part)
            assert bytes(held.averages.encoded(IDS[0], part.index)) == encoded
            assert bits(held.averages.values[part.start : part.stop]) == bits(averaged)


@codecs
def test_several_members_contribute_at_once(codec: Codec) -> None:
    """From several threads: the thread with a part's last contribution averages it, once."""
    for _ in range(8):
        held = Held(codec)
        in_threads(
            lambda held=held: held.reduce_all([1]),  # type: ignore[misc]
            lambda held=held: held.reduce_all([2]),  # type: ignore[misc]
            lambda held=held: held.receive_all([1]),  # type: ignore[misc]
            lambda held=held: held.receive_all([2]),  # type: ignore[misc]
        )
        assert held.complete
        assert sorted(held.ready) == [0, 1, 2, 3]
        assert bits(held.averages.values) == expected(codec)
        assert [bytes(held.averages.encoded(IDS[0], index)) for index in range(4)] == share(codec, 0)


def test_only_one_of_several_simultaneous_contributions_is_the_last() -> None:
    class Slow(list[int]):
        """Lets other threads run between looking and counting."""

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            time.sleep(0)
            return found

    payload = vector(1)[:PART].numpy().tobytes()
    for _ in range(50):
        held = Held(Fp32())
        held.ledger._missing = Slow(held.ledger._missing)
        last: list[bool] = []

        def bring(member: int, held: Held = held, last: list[bool] = last) -> None:
            last.extend(held.contributed(IDS[member], index, payload) for index in range(4))

        in_threads(partial(bring, 1), partial(bring, 2))
        assert sorted(last) == [False] * 4 + [True] * 4


@codecs
def test_a_contribution_is_the_members_values_encoded(codec: Codec) -> None:
    held = Held(codec)
    part = held.parts(1)[2]
    plain = bytes(codec.encode(vector(0)[part.start : part.stop]))
    assert bytes(held.contribution(IDS[1], part)) == plain
    room = held.buffer(part)
    room[:] = bytes(len(room))
    sent = held.contribution(IDS[1], part, room)
    assert bytes(sent) == plain
    if codec.is_identity:
        where = torch.frombuffer(sent, dtype=torch.float32).data_ptr()
        assert held._vector is not None
        assert where == held._vector[part.start :].data_ptr(), "nothing is copied where the bytes are there"
    else:
        assert bytes(room) == plain, "where there is room, it goes there"
    assert bytes(held.contribution(IDS[1], part, room[:-1])) == plain, "as where the last part is shorter"


def test_an_auxiliary_holds_its_own_share_only() -> None:
    held = Held(Fp32(), 2, with_auxiliary())
    assert held.averages.values.shape == (SHARE,)
    assert held.averages.digests() == ()
    held.reduce_all([0])
    assert not held.complete
    held.reduce_all([1])
    assert held.complete
    for part in held.parts(2):
        averaged = averaged_part(Fp32(), part, with_auxiliary())[1]
        assert bits(held.averages.values[part.index * PART : (part.index + 1) * PART]) == bits(averaged)


@codecs
@pytest.mark.parametrize(
    "group", [members(), with_observer(), sole()], ids=["all contribute", "one observes", "one contributes"]
)
def test_every_member_holds_the_same_bits_and_digests(codec: Codec, group: Roster) -> None:
    held = [Held(codec, me, group) for me in range(SIZE)]
    contributors = [group.position(member.peer_id) for member in group.contributors]
    for me, values in enumerate(held):
        others = [index for index in contributors if index != me]
        if others:
            values.reduce_all(others)
        else:
            for part in values.parts(me):
                values.average(part.index)
    for me, values in enumerate(held):
        assert not values.complete
        for reducer in range(SIZE):
            if reducer != me:
                for part in values.parts(reducer):
                    values.receive_average(
                        IDS[reducer], part, held[reducer].averages.encoded(IDS[reducer], part.index)
                    )
        assert values.complete
    assert all(torch.equal(values.averages.values, held[0].averages.values) for values in held)
    assert len({values.averages.digests() for values in held}) == 1
    assert len(set(held[0].averages.digests())) == SIZE
    weights = [group.members[index].weight for index in contributors]
    exact = sum(w * vector(i).double() for w, i in zip(weights, contributors, strict=True)) / sum(weights)
    assert isinstance(exact, torch.Tensor)
    error = float((held[0].averages.values.double() - exact).norm() / exact.norm())
    assert error < (1e-6 if codec.is_identity else 0.03)


def test_a_sole_contributors_values_are_the_result_bit_by_bit() -> None:
    held = Held(Fp32(), 0, sole())
    for part in held.parts(0):
        held.average(part.index)
    assert held.share_of(0) == bits(vector(0)[:SHARE])


def test_the_sender_of_an_undecodable_part_is_named_and_nothing_is_ready() -> None:
    held = Held(Fp32())
    held.contribute(2, 0)
    with pytest.raises(BadContributionError) as found:
        held.contribute(1, 0, np.full(PART, np.nan, np.float32).tobytes())
    assert found.value.peer_id == IDS[1]
    assert not held.is_ready(0)
    assert held.ready == []


@codecs
def test_an_average_that_does_not_decode_breaks_the_protocol(codec: Codec) -> None:
    held = Held(codec)
    with pytest.raises(RemoteProtocolError, match="an averaged part does not decode"):
        held.receive_average(IDS[1], held.parts(1)[0], b"\xff" * codec.encoded_nbytes(PART))
    assert not held.has(IDS[1], Lane.AVERAGES, 0)


# -- digests


def digests(payloads: dict[int, list[Buffer]], order: Sequence[tuple[int, int]]) -> tuple[bytes, ...]:
    held = Held(Fp32())
    held.reduce_all()
    for reducer, index in order:
        held.receive_average(IDS[reducer], held.parts(reducer)[index], payloads[reducer][index])
    assert held.complete
    return held.averages.digests()


IN_ORDER = [(reducer, index) for reducer in (1, 2) for index in range(4)]


def test_digests_are_one_per_share_and_do_not_depend_on_the_order() -> None:
    payloads = {reducer: share(Fp32(), reducer) for reducer in (1, 2)}
    first = digests(payloads, IN_ORDER)
    assert [len(digest) for digest in first] == [DIGEST_BYTES] * SIZE
    assert len(set(first)) == SIZE
    assert digests(payloads, IN_ORDER[4:] + IN_ORDER[:4]) == first
    mixed = [pair for pairs in zip(IN_ORDER[4:], IN_ORDER[:4], strict=True) for pair in pairs]
    assert digests(payloads, mixed) == first


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("byte", [0, 101, 4 * PART - 4])
def test_a_changed_byte_is_another_digest_of_its_share(index: int, byte: int) -> None:
    payloads = {reducer: share(Fp32(), reducer) for reducer in (1, 2)}
    before = digests(payloads, IN_ORDER)
    changed = bytearray(payloads[2][index])
    changed[byte] ^= 1
    payloads[2][index] = bytes(changed)
    after = digests(payloads, IN_ORDER)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False]
