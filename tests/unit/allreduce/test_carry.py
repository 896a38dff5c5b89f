"""Contributions that go over from one attempt to the next: bits, signatures, and what a liar can do."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.movers.reuse import START, Leftover, ResumeMark
from p2pavg.allreduce.proofs import Proofs, Subject
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.aggregation import PLAIN, Aggregation, read_aggregation
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.group.shares import SharePart
from p2pavg_compression import Blockwise8, Codec, Fp32
from tests.unit.group.samples import SIGNERS
from tests.unit.verification.audit.played import ELEMENTS, IDS, group_of, vector

SIZE = 4
CODEC: Codec = Blockwise8(block_size=64)
PART = 64


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PART)


class Play:
    """One attempt among members in one process, whose contributions come part by part and byte by byte."""

    def __init__(
        self,
        group: Roster,
        number: int,
        members: tuple[int, ...],
        before: Play | None = None,
        *,
        codec: Codec = CODEC,
        aggregation: Aggregation = PLAIN,
        audited: bool = True,
    ) -> None:
        self.group = group
        self.codec = codec
        self.members = members
        self.roster = group.among(number, members, ShareCutter(ELEMENTS, codec.granularity))
        self.moved = 0
        """Encoded bytes of contributions that were sent."""
        self.told: dict[int, dict[str, ResumeMark]] = {} if before is None else before.tell()
        self.values: dict[int, AttemptData] = {}
        for me in members:
            ledger = PartTracker(self.roster, IDS[me], codec.granularity)
            subject = Subject(group.group_id, number, members, aggregation.text)
            proofs = Proofs(subject, ledger, SIGNERS[me], {IDS[each]: each for each in members})
            self.values[me] = AttemptData(
                ledger=ledger,
                codec=codec,
                vector=vector(me),
                buffers=Buffers(1 << 24),
                aggregation=aggregation,
                proofs=proofs if audited else None,
                leftover=None if before is None else before.leftover(me, self.told[me]),
            )

    def share_of(self, member: int) -> tuple[SharePart, ...]:
        """Return the parts of the share that a member averages."""
        return PartTracker(self.roster, IDS[member], self.codec.granularity).parts[IDS[member]]

    def tell(self) -> dict[int, dict[str, ResumeMark]]:
        """Return for each member what the reducers say of its contribution."""
        return {
            me: {
                IDS[reducer]: values.carry.mark(IDS[me])
                for reducer, values in self.values.items()
                if reducer != me
            }
            for me in self.members
        }

    def leftover(self, me: int, told: dict[str, ResumeMark]) -> Leftover | None:
        return self.values[me].carry.leave(told)

    def contribute(
        self, source: int, reducer: int, up_to: ResumeMark | None = None, begin: ResumeMark | None = None
    ) -> None:
        """Let a contribution come, up to a place in it."""
        to, from_ = self.values[reducer], self.values[source]
        parts = to._ledger.parts[IDS[reducer]]
        begin = from_.carry.goes_on_at(IDS[reducer]) if begin is None else begin
        to.carry.check_begin(IDS[source], begin)
        for part in parts[begin.parts :]:
            payload = begin.of(part, from_.contribution(IDS[reducer], part))
            comes_again = to.has(IDS[source], Lane.CONTRIBUTIONS, part.index)
            coming = to.carry.receive(IDS[source], part, begin)
            stop = len(payload)
            if up_to is not None and part.index >= up_to.parts:
                stop = up_to.nbytes if part.index == up_to.parts else 0
            coming.rest[:stop] = payload[:stop]
            coming.add(stop)
            self.moved += stop
            if stop < len(payload):
                return
            trailer = from_.trailer(Lane.CONTRIBUTIONS, IDS[reducer]) if part is parts[-1] else b""
            if not comes_again and to.contributed(IDS[source], part.index, coming.payload, trailer):
                to.average(part.index)

    def contribute_all(self, up_to: ResumeMark | None = None) -> None:
        for reducer, values in self.values.items():
            for index in values.carry.complete:
                values.average(index)
            for source in self.members:
                if source != reducer:
                    self.contribute(source, reducer, up_to)

    def spread(self) -> None:
        for reducer, source in self.values.items():
            parts = source._ledger.parts[IDS[reducer]]
            for member, to in self.values.items():
                for part in parts if member != reducer else ():
                    trailer = source.trailer(Lane.AVERAGES, IDS[reducer]) if part is parts[-1] else b""
                    to.receive_average(
                        IDS[reducer], part, source.averages.encoded(IDS[reducer], part.index), trailer
                    )

    def results(self) -> list[tuple[bytes, ...]]:
        return [values.averages.digests() for values in self.values.values()]


def lost_one(up_to: ResumeMark | None, **changes: Any) -> tuple[Play, Play, Play]:
    """Return an attempt of four that ended early, the next one of three, and the same without what was left."""
    codec = changes.get("codec", CODEC)
    group = group_of(codec, SIZE)
    first = Play(group, 0, (0, 1, 2, 3), **changes)
    first.contribute_all(up_to)
    after = Play(group, 5, (0, 1, 2), first, **changes)
    anew = Play(group, 5, (0, 1, 2), **changes)
    for each in (after, anew):
        each.contribute_all()
        each.spread()
    return first, after, anew


@pytest.mark.parametrize("codec", [Fp32(), CODEC], ids=lambda codec: codec.name)
@pytest.mark.parametrize("rule", ["", "median", "centered_clip:1.0:3"])
@pytest.mark.parametrize(
    "up_to",
    [START, ResumeMark(0, 5), ResumeMark(2, 0), ResumeMark(2, 31), None],
    ids=["nothing", "5", "2", "2+31", "all"],
)
def test_the_average_has_the_bits_of_an_attempt_that_begins_from_nothing(
    codec: Codec, rule: str, up_to: ResumeMark | None
) -> None:
    aggregation = read_aggregation(rule)
    _, after, anew = lost_one(up_to, codec=codec, aggregation=aggregation)
    assert set(after.results()) == set(anew.results())
    assert len(set(after.results())) == 1
    assert after.moved <= anew.moved


def test_only_what_has_not_come_is_sent() -> None:
    """What the lost member reduced is sent to the others, and no byte that a reducer has."""
    first, after, anew = lost_one(None)
    lost = first.roster.shares[3]
    assert after.moved < 2 * CODEC.encoded_nbytes(lost) + SIZE * SIZE * PART
    assert after.moved < anew.moved / 3
    first, after, anew = lost_one(ResumeMark(2, 31))
    kept = 2 * CODEC.encoded_nbytes(PART) + 31
    assert anew.moved - after.moved == 6 * kept


def test_signatures_of_the_new_attempt_cover_what_was_sent_before() -> None:
    _, after, anew = lost_one(ResumeMark(2, 31))
    for member, one in after.values.items():
        other = anew.values[member]
        assert one.proofs is not None
        assert other.proofs is not None
        assert one.proofs.inputs() == other.proofs.inputs()
        assert one.proofs.share(IDS[0]) == other.proofs.share(IDS[0])
        for index in range(len(after.share_of(member))):
            assert one.inputs(index).keys() == other.inputs(index).keys()
            assert all(
                bytes(a) == bytes(b)
                for a, b in zip(one.inputs(index).values(), other.inputs(index).values(), strict=True)
            )


def test_a_second_loss_keeps_what_came_in_either_attempt() -> None:
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute_all(ResumeMark(1, 9))
    second = Play(group, 5, (0, 1, 2), first)
    second.contribute_all(ResumeMark(3, 20))
    third = Play(group, 10, (0, 1), second)
    anew = Play(group, 10, (0, 1))
    for each in (third, anew):
        each.contribute_all()
        each.spread()
    assert third.results() == anew.results()
    assert anew.moved - third.moved == 2 * (3 * CODEC.encoded_nbytes(PART) + 20)


def test_without_audits_nothing_goes_over() -> None:
    first, after, anew = lost_one(None, audited=False)
    assert first.values[0].carry.mark(IDS[1]) == START
    assert after.moved == anew.moved
    assert after.results() == anew.results()


def test_a_contributor_cannot_skip_what_has_not_come() -> None:
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute_all(ResumeMark(2, 31))
    after = Play(group, 5, (0, 1, 2), first)
    for begin in (ResumeMark(2, 32), ResumeMark(3, 0), ResumeMark(0, 10**6), ResumeMark(10**6, 0)):
        with pytest.raises(RemoteProtocolError, match="goes on at"):
            after.contribute(0, 1, begin=begin)
    with pytest.raises(RemoteProtocolError, match="goes on at"):
        Play(group, 5, (0, 1, 2)).contribute(0, 1, begin=ResumeMark(0, 1))


def test_a_contributor_may_begin_earlier_and_what_comes_again_is_not_used() -> None:
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute_all(ResumeMark(2, 31))
    after = Play(group, 5, (0, 1, 2), first)
    for begin in (START, ResumeMark(0, 7), ResumeMark(1, 9), ResumeMark(2, 0), ResumeMark(2, 30)):
        again = Play(group, 5, (0, 1, 2), first)
        again.values[0].contribution(IDS[1], again.share_of(1)[0])
        again.contribute(0, 1, begin=begin)
        after.contribute(2, 1)
    assert after.values[1].carry.mark(IDS[2]).parts == len(after.share_of(1))


def test_a_contributor_that_sends_another_contribution_now_has_not_signed_what_came_before() -> None:
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute_all(ResumeMark(2, 0))
    after = Play(group, 5, (0, 1, 2), first)
    proofs = after.values[0].proofs
    assert proofs is not None
    proofs.were_sent(IDS[1], [bytes(32), bytes(32)])
    with pytest.raises(RemoteProtocolError, match="does not verify"):
        after.contribute(0, 1)


def test_a_reducer_that_claims_more_than_was_sent_gets_the_rest_all_the_same() -> None:
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute(0, 1, ResumeMark(1, 9))
    leftover = first.leftover(0, {IDS[1]: ResumeMark(4, 0)})
    assert leftover is not None
    sent = len(leftover.sent[IDS[1]])
    ledger = PartTracker(first.roster, IDS[0], CODEC.granularity)
    subject = Subject(group.group_id, 5, (0, 1, 2, 3), PLAIN.text)
    values = AttemptData(
        ledger=ledger,
        codec=CODEC,
        vector=vector(0),
        buffers=Buffers(1 << 24),
        proofs=Proofs(subject, ledger, SIGNERS[0], {IDS[each]: each for each in range(SIZE)}),
        leftover=leftover,
    )
    assert values.carry.goes_on_at(IDS[1]) == ResumeMark(sent, 0)


def test_what_has_come_never_decreases_when_a_sender_begins_again() -> None:
    """What a reducer has told stays true: the contributor goes on there in the next attempt."""
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute(0, 1, ResumeMark(2, 31))
    first.contribute(0, 1, ResumeMark(1, 3))
    assert first.values[1].carry.mark(IDS[0]) == ResumeMark(2, 31)
    first.contribute(0, 1, ResumeMark(2, 3))
    assert first.values[1].carry.mark(IDS[0]) == ResumeMark(2, 31)


def test_nothing_is_written_any_more_into_what_was_kept() -> None:
    """A thread of the attempt that ended may still receive."""
    group = group_of(CODEC, SIZE)
    first = Play(group, 0, (0, 1, 2, 3))
    first.contribute_all(ResumeMark(2, 31))
    after = Play(group, 5, (0, 1, 2), first)
    late = first.values[1]._inputs.begun(IDS[0], 2)
    assert late is not None
    late.payload[:] = bytes(len(late.payload))
    after.contribute(0, 1)
    assert after.values[1].carry.mark(IDS[0]).parts == len(after.share_of(1))
