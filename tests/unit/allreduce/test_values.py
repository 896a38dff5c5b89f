"""The values that a member holds of an attempt: completeness, exact bits, and parts that come too late."""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce import combiner
from p2pavg.allreduce.errors import BadContributionError
from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.reduction import Contribution, Ledger, average_part
from p2pavg.allreduce.values import Values, check_index
from p2pavg.consensus.votes import DIGEST_BYTES
from p2pavg.errors import RemoteProtocolError
from p2pavg.group.aggregation import PLAIN, Aggregation, Median
from p2pavg.group.roster import Roster
from p2pavg.group.shares import Part
from p2pavg.net.transport import Buffer
from p2pavg.vector.buffers import Buffers
from p2pavg_compression import Blockwise8, Codec, Fp16, Fp32, Int8
from tests.unit.group.samples import SIGNERS, candidate, roster

IDS = [signer.peer_id for signer in SIGNERS]
PART = 64
SHARE = 4 * PART
SIZE = 3
ELEMENTS = SIZE * SHARE
WEIGHTS = [1.0, 5.0, 0.25]
CODECS: list[Codec] = [Fp32(), Fp16(), Int8(block_size=64), Blockwise8(block_size=64)]

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PART)


def members() -> Roster:
    return roster([candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)], [SHARE] * SIZE)


def with_auxiliary() -> Roster:
    found = [candidate(0, weight=1.0), candidate(1, weight=5.0), candidate(2, auxiliary=True)]
    return roster(found, [SHARE] * SIZE)


def with_observer() -> Roster:
    """Return a roster whose last member has a vector but only observes."""
    found = [candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)]
    return roster(found, [SHARE] * SIZE, observers=found[2:])


def sole() -> Roster:
    """Return a roster in which only the first member contributes."""
    found = [candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)]
    return roster(found, [SHARE] * SIZE, observers=found[1:])


def vector(index: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index))


class Held(Values):
    """The values of one member, with the parts that were reported as ready."""

    def __init__(
        self, codec: Codec, me: int = 0, group: Roster | None = None, aggregation: Aggregation = PLAIN
    ) -> None:
        group = members() if group is None else group
        self.ready: list[int] = []
        self.buffers = Buffers(1 << 30)
        self.ledger = Ledger(group, IDS[me], codec.granularity)
        contributes = group.members[me] in group.contributors
        super().__init__(
            ledger=self.ledger,
            codec=codec,
            vector=vector(me) if contributes else None,
            buffers=self.buffers,
            on_ready=self.ready.append,
            aggregation=aggregation,
        )

    def contribute(self, member: int, index: int, payload: Buffer | None = None) -> None:
        """Let a member's part come. The last contribution to a part averages it."""
        part = self.ledger.parts[self.ledger.me][index]
        if payload is None:
            payload = self._codec.encode(vector(member)[part.start : part.stop])
        if self.contributed(IDS[member], index, payload):
            self.average(index)

    def reduce_all(self, others: Iterable[int] = (1, 2)) -> None:
        for member in others:
            for part in self.ledger.parts[self.ledger.me]:
                self.contribute(member, part.index)

    def receive_all(self, reducers: Iterable[int] = (1, 2)) -> None:
        for reducer in reducers:
            for part, payload in zip(self.parts(reducer), share(self._codec, reducer), strict=True):
                self.receive_average(IDS[reducer], part, payload)

    def parts(self, reducer: int) -> tuple[Part, ...]:
        return self.ledger.parts[IDS[reducer]]

    def share_of(self, reducer: int) -> list[int]:
        """Return the bits of a share's averages."""
        found = self.averaged[reducer * SHARE : (reducer + 1) * SHARE]
        return [int(bits) for bits in found.view(torch.int32)]


def averaged_part(codec: Codec, part: Part, group: Roster | None = None) -> tuple[bytes, torch.Tensor]:
    """Return the result of :func:`average_part` for a part whose reducer holds its own values unencoded."""
    group = members() if group is None else group
    reducer = part.start // SHARE
    out = torch.empty(part.elements)
    contributions = []
    for index, member in enumerate(group.members):
        values = vector(index)[part.start : part.stop]
        if member in group.contributors:
            sent: torch.Tensor | Buffer = values if index == reducer else codec.encode(values)
            contributions.append(Contribution(member.peer_id, member.weight, sent))
    encoded = bytes(average_part(codec, contributions, group.total_weight, out))
    return encoded, out


def share(codec: Codec, reducer: int) -> list[Buffer]:
    """Return the averaged parts that a reducer sends."""
    starts = range(reducer * SHARE, (reducer + 1) * SHARE, PART)
    return [averaged_part(codec, Part(index, start, start + PART))[0] for index, start in enumerate(starts)]


def bits(values: torch.Tensor) -> list[int]:
    return [int(each) for each in values.view(torch.int32)]


def expected(codec: Codec) -> list[int]:
    """Return the bits of the whole result."""
    return [
        each
        for start in range(0, ELEMENTS, PART)
        for each in bits(averaged_part(codec, Part(0, start, start + PART))[1])
    ]


def in_threads(*work: Callable[[], Any]) -> None:
    """Run all functions at once, each in its own thread."""
    begin = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> None:
        begin.wait(30.0)
        one()

    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(run, one) for one in work]:
            future.result(30.0)


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
    assert bits(held.averaged) == expected(codec)


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


def test_waiting_contributions_are_counted_until_they_are_averaged() -> None:
    held = Held(Fp32())
    for index in range(3):
        held.contribute(1, index)
    assert (held.waiting(IDS[1]), held.waiting(IDS[2])) == (3, 0)
    held.contribute(2, 0)
    assert (held.waiting(IDS[1]), held.waiting(IDS[2])) == (2, 0)
    assert [held.is_ready(index) for index in range(4)] == [True, False, False, False]
    assert held.ready == [0]


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


def test_a_thread_that_waits_for_an_average_is_woken() -> None:
    held = Held(Fp32())
    waits = threading.Event()
    woken: list[bool] = []

    def wait() -> None:
        with held.changed:
            waits.set()
            woken.append(held.changed.wait(10.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert waits.wait(30.0)
    held.contribute(1, 0)
    held.contribute(2, 0)
    waiting.join(30.0)
    assert woken == [True]


def test_a_part_that_is_not_due_is_refused_by_name() -> None:
    check_index(3, Part(3, 0, 1))
    with pytest.raises(RemoteProtocolError, match="part 4 came where part 3 was due"):
        check_index(4, Part(3, 0, 1))


# -- exact bits


@codecs
@given(st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_averages_are_the_same_bits_in_any_order_of_arrival(codec: Codec, draw: random.Random) -> None:
    """They equal the result of one call with all contributions in the roster's order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PART)
        held = Held(codec)
        turns = [1] * 4 + [2] * 4
        draw.shuffle(turns)
        come = {1: 0, 2: 0}
        for member in turns:
            held.contribute(member, come[member])
            come[member] += 1
        for part in held.ledger.parts[IDS[0]]:
            encoded, averaged = averaged_part(codec, part)
            assert bytes(held.encoded(IDS[0], part.index)) == encoded
            assert bits(held.averaged[part.start : part.stop]) == bits(averaged)


@codecs
def test_every_member_holds_the_same_bits_and_digests(codec: Codec) -> None:
    all_held = [Held(codec, me) for me in range(SIZE)]
    for me, held in enumerate(all_held):
        others = [index for index in range(SIZE) if index != me]
        held.reduce_all(others)
        for reducer in others:
            for part, payload in zip(held.parts(reducer), share(codec, reducer), strict=True):
                held.receive_average(IDS[reducer], part, payload)
    assert all(held.complete for held in all_held)
    assert len({tuple(bits(held.averaged)) for held in all_held}) == 1
    assert len({held.digests() for held in all_held}) == 1
    sent = [[bytes(held.encoded(IDS[0], index)) for index in range(4)] for held in all_held]
    assert sent[0] == sent[1] == sent[2] == share(codec, 0)


@codecs
def test_several_members_contribute_at_once(codec: Codec) -> None:
    """From several threads: the thread with a part's last contribution averages it, once."""
    for _ in range(30):
        held = Held(codec)
        in_threads(
            lambda held=held: held.reduce_all([1]),  # type: ignore[misc]
            lambda held=held: held.reduce_all([2]),  # type: ignore[misc]
            lambda held=held: held.receive_all([1]),  # type: ignore[misc]
            lambda held=held: held.receive_all([2]),  # type: ignore[misc]
        )
        assert held.complete
        assert sorted(held.ready) == [0, 1, 2, 3]
        assert bits(held.averaged) == expected(codec)
        assert [bytes(held.encoded(IDS[0], index)) for index in range(4)] == share(codec, 0)


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
    assert bytes(held.contribution(part)) == plain
    room = held.buffer(part)
    room[:] = bytes(len(room))
    sent = held.contribution(part, room)
    assert bytes(sent) == plain
    if codec.is_identity:
        where = torch.frombuffer(sent, dtype=torch.float32).data_ptr()
        assert held._vector is not None
        assert where == held._vector[part.start :].data_ptr(), "nothing is copied where the bytes are there"
    else:
        assert bytes(room) == plain, "where there is room, it goes there"
    assert bytes(held.contribution(part, room[:-1])) == plain, "as where the last part is shorter"


def test_an_auxiliary_holds_its_own_share_only() -> None:
    held = Held(Fp32(), 2, with_auxiliary())
    assert held.averaged.shape == (SHARE,)
    assert held.digests() == ()
    held.reduce_all([0])
    assert not held.complete
    held.reduce_all([1])
    assert held.complete
    for part in held.parts(2):
        averaged = averaged_part(Fp32(), part, with_auxiliary())[1]
        assert bits(held.averaged[part.index * PART : (part.index + 1) * PART]) == bits(averaged)


@codecs
@pytest.mark.parametrize("group", [with_observer(), sole()], ids=["one observes", "one contributes"])
def test_an_observer_holds_the_same_bits_and_digests(codec: Codec, group: Roster) -> None:
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
                        IDS[reducer], part, held[reducer].encoded(IDS[reducer], part.index)
                    )
        assert values.complete
    assert all(torch.equal(values.averaged, held[0].averaged) for values in held)
    assert len({values.digests() for values in held}) == 1
    assert len(set(held[0].digests())) == SIZE
    weights = [group.members[index].weight for index in contributors]
    exact = sum(w * vector(i).double() for w, i in zip(weights, contributors, strict=True)) / sum(weights)
    assert isinstance(exact, torch.Tensor)
    error = float((held[0].averaged.double() - exact).norm() / exact.norm())
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
    return held.digests()


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


def test_parts_that_change_places_are_another_digest() -> None:
    payloads = {reducer: share(Fp32(), reducer) for reducer in (1, 2)}
    before = digests(payloads, IN_ORDER)
    payloads[1][0], payloads[1][1] = payloads[1][1], payloads[1][0]
    assert digests(payloads, IN_ORDER)[1] != before[1]


@codecs
def test_a_passed_on_share_has_the_same_digest(codec: Codec) -> None:
    held, other = Held(codec, 0), Held(codec, 1)
    held.reduce_all()
    other.receive_share(IDS[0], [bytes(held.encoded(IDS[0], index)) for index in range(4)])
    assert held.digests()[0] == other.digests()[0]


# -- held memory


def test_bytes_that_are_the_values_are_not_kept_twice() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([1])
    held.receive_share(IDS[2], share(Fp32(), 2))
    memory = held.averaged.numpy().view(np.uint8)
    for index in range(SIZE):
        for part in held.parts(index):
            kept = np.frombuffer(held.encoded(IDS[index], part.index), np.uint8)
            assert kept.ctypes.data == memory.ctypes.data + 4 * part.start
            assert kept.nbytes == 4 * part.elements


def test_the_bytes_of_an_average_are_released_if_they_are_the_values() -> None:
    held = Held(Fp32())
    part = held.parts(1)[0]
    payload = held.buffer(part)
    payload[:] = share(Fp32(), 1)[0]
    memory = weakref.ref(np.asarray(payload.obj).base)
    held.receive_average(IDS[1], part, payload)
    del payload
    assert held.buffers.idle_bytes == 4 * PART
    assert memory() is not None
    assert bytes(held.encoded(IDS[1], 0)) == share(Fp32(), 1)[0]


def test_an_encoded_average_is_kept_as_it_came() -> None:
    """The member may have to pass on the same bytes."""
    codec = Blockwise8(block_size=64)
    held = Held(codec)
    payload = share(codec, 1)[0]
    held.receive_average(IDS[1], held.parts(1)[0], payload)
    assert held.encoded(IDS[1], 0) is payload


def test_contributions_are_let_go_when_they_are_averaged() -> None:
    held = Held(Fp32())
    for member in (1, 2):
        payload = held.buffer(held.parts(0)[0])
        payload[:] = vector(member)[:PART].numpy().tobytes()
        assert held.contributed(IDS[member], 0, payload) == (member == 2)
        del payload
    assert held.buffers.idle_bytes == 0
    held.average(0)
    assert held.buffers.idle_bytes == 3 * 4 * PART, "two that came, and the one to work in"


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

    monkeypatch.setattr(combiner, "average_part", slow)
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
    assert held.buffers.idle_bytes == 3 * 4 * PART, (
        "two decoded contributions, and the result before it is encoded"
    )
    middle = torch.stack([vector(member)[:PART] for member in range(SIZE)])
    weights = WEIGHTS  # 1, 5 and 0.25: the second alone has more than half
    assert max(weights) == weights[1] > sum(weights) / 2
    assert torch.equal(held.averaged[:PART], middle[1])


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
    assert held.buffers.idle_bytes >= 4 * ELEMENTS + 4 * codec.encoded_nbytes(PART)
    assert own() is None


def test_letting_go_does_not_change_a_result_in_use() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all()
    result = held.averaged[5:10]
    before = bits(result)
    held.let_go()
    held.buffers.floats(ELEMENTS).fill_(-1.0)
    assert bits(result) == before


# -- shares that are passed on


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
    assert [bytes(held.encoded(IDS[2], index)) for index in range(4)] == other_share(2)
    assert held.averaged[2 * SHARE :: PART].tolist() == [7.0, 8.0, 9.0, 10.0]


def test_a_passed_on_share_does_not_replace_a_whole_one() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all()
    before, told = bits(held.averaged), held.digests()
    held.receive_share(IDS[1], other_share(1))
    assert (bits(held.averaged), held.digests()) == (before, told)
    assert [bytes(held.encoded(IDS[1], index)) for index in range(4)] == share(Fp32(), 1)


def test_a_second_source_changes_nothing() -> None:
    held = Held(Fp32())
    held.receive_share(IDS[1], share(Fp32(), 1))
    told = held.digests()[1]
    held.receive_share(IDS[1], other_share(1))
    assert held.digests()[1] == told
    assert bits(held.averaged[SHARE : 2 * SHARE]) == expected(Fp32())[SHARE : 2 * SHARE]


def test_late_parts_of_the_reducer_that_is_gone_change_nothing() -> None:
    held = Held(Fp32())
    held.reduce_all()
    held.receive_all([2])
    held.receive_average(IDS[1], held.parts(1)[0], share(Fp32(), 1)[0])
    held.receive_share(IDS[1], other_share(1))
    assert held.complete
    before, told = bits(held.averaged), held.digests()
    for index in range(1, 4):
        held.receive_average(IDS[1], held.parts(1)[index], share(Fp32(), 1)[index])
    assert held.complete
    assert (bits(held.averaged), held.digests()) == (before, told)
    assert [bytes(held.encoded(IDS[1], index)) for index in range(4)] == other_share(1)


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
    assert bits(held.averaged) == expected(Fp32())


DECODING = threading.Event()


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
    there: list[Buffer] = [bytes(held.encoded(IDS[1], index)) for index in range(4)]
    assert there in (genuine, passed)
    assert held.averaged[SHARE : 2 * SHARE].numpy().tobytes() == b"".join(map(bytes, there))
    other = Held(Fp32())
    other.receive_share(IDS[1], there)
    assert held.digests()[1] == other.digests()[1]
