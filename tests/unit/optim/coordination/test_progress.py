"""Peers' words of their progress, the limits of belief in them, and the decisions that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_VERSION
from p2pavg.base.messages import decoded_all, pack
from p2pavg.optim.coordination.progress import (
    MAX_BATCH_SECONDS,
    MAX_EPOCH,
    MAX_SAMPLES,
    Average,
    Compute,
    Decision,
    LeftBehind,
    PeerProgress,
    SeenPeer,
    Survey,
    WaitForPeers,
    decide,
    following,
)
from p2pavg.optim.coordination.progress import survey as survey_of

HERE, THERE, ELSEWHERE = (bytes([number]) * 32 for number in range(3))
PROGRESS = PeerProgress(
    epoch=300,
    state=bytes(range(32)),
    samples=96.0,
    samples_per_second=12.5,
    waiting=True,
    batch_seconds=2.5,
    started=True,
    follows=True,
    version=2,
)
ENCODED = bytes.fromhex(
    "9b06cd012cc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "cb4058000000000000cb4029000000000000c3cb4004000000000000c3c3c202"
)

amounts = st.floats(0.0, MAX_SAMPLES)
anything = st.builds(
    PeerProgress,
    epoch=st.integers(0, MAX_EPOCH),
    state=st.binary(min_size=32, max_size=32),
    samples=amounts,
    samples_per_second=amounts,
    waiting=st.booleans(),
    batch_seconds=st.floats(0.0, MAX_BATCH_SECONDS),
    started=st.booleans(),
    follows=st.booleans(),
    left=st.booleans(),
    version=st.integers(0, MAX_VERSION),
)
# Few states and few numbers, so that peers meet.
peers = st.builds(
    PeerProgress,
    epoch=st.integers(0, 2),
    state=st.sampled_from([HERE, THERE, ELSEWHERE]),
    samples=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    samples_per_second=st.sampled_from([0.0, 2.0]),
    waiting=st.booleans(),
)
targets = st.sampled_from([0.2, 3.0, 10.0, math.inf])


def at(
    state: bytes = HERE, epoch: int = 3, samples: float = 1.0, *, speed: float = 2.0, waiting: bool = False
) -> PeerProgress:
    return PeerProgress(epoch=epoch, state=state, samples=samples, samples_per_second=speed, waiting=waiting)


def survey(mine: PeerProgress, others: Iterable[PeerProgress]) -> Survey:
    """Return the survey of a peer that believes every word."""
    seen = [SeenPeer(peer_id="peer", progress=other, samples=other.samples) for other in others]
    return survey_of(mine, seen)


class TestWords:
    """``tests/properties/test_message_structs.py`` reads hostile words."""

    def test_the_bytes_never_change(self) -> None:
        assert PROGRESS.encode() == ENCODED
        assert PeerProgress.decode(ENCODED) == PROGRESS

    @given(anything)
    def test_a_word_is_short(self, progress: PeerProgress) -> None:
        assert len(progress.encode()) < 100

    @pytest.mark.parametrize(
        ("position", "value"),
        [
            *[(0, version) for version in (4, 5, 7)],
            *[(1, epoch) for epoch in (-1, MAX_EPOCH + 1, 2**64 - 1)],
            *[(2, state) for state in (b"", bytes(31), bytes(33))],
            *[
                (field, amount)
                for field in (3, 4, 6)
                for amount in (-1.0, -5e-324, 1.1e15, math.nan, math.inf, -math.inf, 1)
            ],
            (6, MAX_BATCH_SECONDS + 1.0),
            *[(10, version) for version in (-1, MAX_VERSION + 1)],
        ],
    )
    def test_a_field_out_of_range_is_refused(self, position: int, value: object) -> None:
        fields: list[Any] = [6, 300, bytes(range(32)), 96.0, 12.5, True, 2.5, True, True, False, 2]
        PeerProgress.decode(pack(*fields))
        fields[position] = value
        with pytest.raises(RemoteProtocolError):
            PeerProgress.decode(pack(*fields))

    def test_malformed_words_are_left_out(self) -> None:
        said = {"a": ENCODED, "b": b"", "c": b"nonsense", "d": ENCODED[:-1], "e": b"\x9b\x05" + ENCODED[2:]}
        assert decoded_all(said, PeerProgress) == {"a": PROGRESS}
        assert decoded_all({}, PeerProgress) == {}


class TestSurvey:
    def test_survey_of_a_peer_alone(self) -> None:
        assert survey(at(samples=7.0), []) == Survey(
            peers=1,
            samples=7.0,
            samples_per_second=2.0,
            waiting=False,
            others=0,
            ahead=None,
            claimed=7.0,
            apart="no other peer of this run is seen",
        )

    def test_peers_of_one_state_count_together(self) -> None:
        others = [at(samples=2.5, waiting=True), at(samples=0.0), at(THERE, samples=100.0, speed=50.0)]
        seen = survey(at(samples=1.0), others)
        assert (seen.peers, seen.samples, seen.samples_per_second) == (3, 3.5, 6.0)
        assert seen.others == 1

    def test_peers_wait_if_each_of_them_waits(self) -> None:
        waiting, busy = at(waiting=True), at()
        assert survey(waiting, [waiting, at(THERE)]).waiting
        assert not survey(waiting, [busy, waiting]).waiting
        assert not survey(busy, [waiting]).waiting

    def test_ties_are_broken_by_epoch_and_then_by_digest(self) -> None:
        """After any split into halves, exactly one of them learns that the other one continues."""
        assert survey(at(), [at(THERE, 9)]).ahead == (9, 1)
        assert survey(at(), [at(), *[at(THERE, 9)] * 2]).ahead == (9, 2)
        one, other = at(), at(THERE, at().epoch)
        assert (survey(one, [other]).ahead is None) != (survey(other, [one]).ahead is None)
        assert survey(at(), [at(), at(THERE, 9)]).ahead is None

    def test_largest_and_then_latest_group_is_ahead(self) -> None:
        two, three = [at(THERE, 9)] * 2, [at(ELSEWHERE, 4)] * 3
        assert survey(at(), [*two, *three]).ahead == (4, 3)
        assert survey(at(), [*two, *three[:2]]).ahead == (9, 2)
        # A larger group at an earlier epoch does not hide it.
        assert survey(at(), [*two, *[at(ELSEWHERE, 2)] * 8]).ahead == (9, 2)

    @given(peers, st.lists(peers, max_size=8), st.randoms(use_true_random=False))
    def test_order_of_words_does_not_matter(
        self, mine: PeerProgress, others: list[PeerProgress], random: Any
    ) -> None:
        seen = survey(mine, others)
        random.shuffle(others)
        assert survey(mine, others) == seen

    @given(peers, st.lists(peers, max_size=8))
    def test_every_peer_is_counted_once(self, mine: PeerProgress, others: list[PeerProgress]) -> None:
        seen = survey(mine, others)
        assert seen.peers + seen.others == len(others) + 1
        assert seen.peers >= 1


def seen_as(**changes: Any) -> Survey:
    fields: dict[str, Any] = {
        "peers": 3,
        "samples": 10.0,
        "samples_per_second": 1.0,
        "waiting": False,
        "others": 0,
        "ahead": None,
    }
    return Survey(**(fields | changes))


AHEAD = {"ahead": (5, 4), "others": 4}
ALL = {"waiting": True}
APART = {"others": 2, "apart": "2 peers are at other first parameters"}
OTHERS_WAIT = {"others_wait": True, "claimed": 100.0}
ENOUGH = {"samples": 100.0}
FEW = {"peers": 2}

# mine.samples, mine.waiting, survey, target -> decision and reason, with peers_to_start=3.
DECISIONS: list[tuple[float, bool, dict[str, Any], float, Decision]] = [
    (1.0, False, AHEAD, 100.0, LeftBehind(5, "4 peers are at epoch 5; 3 with this one at epoch 3")),
    (
        1.0,
        False,
        {"ahead": (3, 4), "others": 4},
        100.0,
        LeftBehind(3, "4 peers are at epoch 3 too, from other updates; 3 with this one at epoch 3"),
    ),
    (0.0, True, AHEAD | ENOUGH, 100.0, LeftBehind(5, "4 peers are at epoch 5; 3 with this one at epoch 3")),
    (0.0, True, AHEAD | ALL, math.inf, LeftBehind(5, "4 peers are at epoch 5; 3 with this one at epoch 3")),
    (1.0, True, AHEAD | FEW, 100.0, LeftBehind(5, "4 peers are at epoch 5; 2 with this one at epoch 3")),
    (0.0, False, {}, 100.0, Compute("nothing is accumulated")),
    (0.0, True, ENOUGH, 100.0, Compute("nothing is accumulated")),
    (0.0, True, FEW, 100.0, Compute("nothing is accumulated")),
    (0.0, True, ALL, math.inf, Compute("nothing is accumulated")),
    (1.0, False, FEW, 100.0, Compute("2 of 3 peers are there to start")),
    (1.0, True, FEW, 100.0, WaitForPeers("2 of 3 peers are there to start")),
    (1.0, False, FEW | ENOUGH, 100.0, WaitForPeers("2 of 3 peers are there to start")),
    (1.0, True, FEW | ENOUGH, 100.0, WaitForPeers("2 of 3 peers are there to start")),
    (1.0, True, FEW | ALL, 100.0, WaitForPeers("2 of 3 peers are there to start")),
    (1.0, True, FEW | ALL, math.inf, WaitForPeers("2 of 3 peers are there to start")),
    (
        1.0,
        True,
        FEW | APART,
        100.0,
        WaitForPeers("2 of 3 peers are there to start; 2 peers are at other first parameters"),
    ),
    (1.0, False, ENOUGH, 100.0, Average(3, "3 peers have 100 of 100 samples together")),
    (1.0, True, ENOUGH | ALL, 100.0, Average(3, "3 peers have 100 of 100 samples together")),
    (
        1.0,
        False,
        ENOUGH | APART,
        100.0,
        Average(3, "3 peers have 100 of 100 samples together; 2 peers are at other first parameters"),
    ),
    (1.0, True, ALL, math.inf, Average(3, "all 3 peers wait")),
    (1.0, False, OTHERS_WAIT, 100.0, Average(3, "the other 2 say that 100 samples are there")),
    (1.0, False, OTHERS_WAIT, 101.0, Compute("3 peers have 10 of 101 samples together")),
    (1.0, False, {"claimed": 100.0}, 100.0, Compute("3 peers have 10 of 100 samples together")),
    (1.0, False, OTHERS_WAIT, math.inf, Compute("3 peers have 10 of inf samples together")),
    (1.0, True, ALL, 100.0, Compute("3 peers have 10 of 100 samples together, and all wait")),
    (1.0, True, {}, 100.0, WaitForPeers("3 peers have 10 of 100 samples together")),
    (1.0, False, {}, 100.0, Compute("3 peers have 10 of 100 samples together")),
    (1.0, True, {}, math.inf, WaitForPeers("3 peers have 10 of inf samples together")),
    (1.0, False, {}, math.inf, Compute("3 peers have 10 of inf samples together")),
]


class TestDecide:
    @pytest.mark.parametrize(("samples", "waiting", "seen", "target", "decision"), DECISIONS)
    def test_decision_and_reason(
        self, samples: float, waiting: bool, seen: dict[str, Any], target: float, decision: Decision
    ) -> None:
        mine = at(samples=samples, waiting=waiting)
        assert decide(mine, seen_as(**seen), target=target, peers_to_start=3) == decision

    @pytest.mark.parametrize("changes", [{}, ENOUGH, ALL, ENOUGH | ALL])
    @pytest.mark.parametrize("target", [100.0, math.inf])
    def test_too_few_peers_for_a_group_keep_computing(self, changes: dict[str, Any], target: float) -> None:
        """They do not begin rounds that would fail, each after the whole match timeout."""
        seen = seen_as(peers=1, **changes)
        assert decide(at(samples=1.0, waiting=True), seen, target=target, least=2) == Compute(
            "1 of the 2 peers of a group are there"
        )
        assert decide(at(samples=1.0, waiting=True), seen_as(peers=2, **changes), target=target, least=2) == (
            decide(at(samples=1.0, waiting=True), seen_as(peers=2, **changes), target=target)
        )

    @pytest.mark.parametrize(("samples", "decision"), [(math.nextafter(100.0, 0), Compute), (100.0, Average)])
    def test_an_update_has_all_samples_of_the_target(self, samples: float, decision: type[Decision]) -> None:
        found = decide(at(samples=1.0), seen_as(peers=2, samples=samples), target=100.0)
        assert isinstance(found, decision)

    def test_reason_for_one_peer_is_singular(self) -> None:
        behind = decide(at(), seen_as(peers=1, ahead=(5, 1)), target=100.0)
        assert behind == LeftBehind(5, "1 peer is at epoch 5; 1 with this one at epoch 3")

    def test_one_peer_may_start_by_default(self) -> None:
        seen = seen_as(peers=1, samples=100.0)
        assert isinstance(decide(at(), seen, target=100.0), Average)

    @given(peers, st.lists(peers, max_size=8), targets, st.integers(1, 4))
    def test_no_average_without_samples(
        self, mine: PeerProgress, others: list[PeerProgress], target: float, start: int
    ) -> None:
        mine = replace(mine, samples=0.0)
        decision = decide(mine, survey(mine, others), target=target, peers_to_start=start)
        assert isinstance(decision, Compute | LeftBehind)

    @given(peers, st.lists(peers, max_size=8), targets, st.integers(1, 4))
    def test_peer_is_behind_a_larger_or_later_group(
        self, mine: PeerProgress, others: list[PeerProgress], target: float, start: int
    ) -> None:
        together = 1 + sum(other.state == mine.state for other in others)
        larger = [
            other
            for other in others
            if other.state != mine.state
            and other.epoch >= mine.epoch
            and (
                sum((o.state, o.epoch) == (other.state, other.epoch) for o in others),
                other.epoch,
                other.state,
            )
            > (together, mine.epoch, mine.state)
        ]
        decision = decide(mine, survey(mine, others), target=target, peers_to_start=start)
        if together < start:
            larger = [
                other
                for other in larger
                if other.epoch > mine.epoch
                or sum((o.state, o.epoch) == (other.state, other.epoch) for o in others) > together
            ]
        assert isinstance(decision, LeftBehind) == bool(larger)
        if isinstance(decision, LeftBehind):
            assert decision.epoch in {other.epoch for other in larger}

    @given(st.lists(peers, min_size=1, max_size=8), targets, st.integers(1, 4))
    def test_peers_of_one_state_agree_when_to_average(
        self, peers: list[PeerProgress], target: float, start: int
    ) -> None:
        peers = [replace(peer, state=HERE, epoch=3) for peer in peers if peer.samples > 0]
        decisions = [
            decide(mine, survey(mine, peers[:i] + peers[i + 1 :]), target=target, peers_to_start=start)
            for i, mine in enumerate(peers)
        ]
        assert len({isinstance(decision, Average) for decision in decisions}) <= 1
        assert len({decision for decision in decisions if isinstance(decision, Average)}) <= 1

    @given(st.lists(anything, min_size=2, max_size=6))
    def test_sum_of_samples_is_the_same_on_all_peers(self, peers: list[PeerProgress]) -> None:
        peers = [replace(peer, state=HERE) for peer in peers]
        samples = {survey(mine, peers[:i] + peers[i + 1 :]).samples for i, mine in enumerate(peers)}
        assert len(samples) == 1

    @given(st.lists(peers, min_size=1, max_size=8), targets)
    def test_peers_of_one_state_never_all_wait(self, peers: list[PeerProgress], target: float) -> None:
        decisions = [
            decide(mine, survey(mine, peers[:i] + peers[i + 1 :]), target=target)
            for i, mine in enumerate(peers)
        ]
        assert not all(isinstance(decision, WaitForPeers) for decision in decisions)


class TestRoundsInTheBackground:
    """Peers that count their own steps: the target is infinite."""

    WAITS, COMPUTES = at(state=HERE, samples=8.0, waiting=True), at(state=HERE, samples=4.0, waiting=False)

    def test_a_peer_that_is_due_does_not_wait_for_the_others(self) -> None:
        seen = survey(self.WAITS, [self.COMPUTES, self.COMPUTES])
        assert isinstance(decide(self.WAITS, seen, target=math.inf), WaitForPeers)
        found = decide(self.WAITS, seen, target=math.inf, at_once=True)
        assert isinstance(found, Average)
        assert found.peers == 3, "the others are expected in the group"
        computing = survey(self.COMPUTES, [self.WAITS, self.WAITS])
        assert isinstance(decide(self.COMPUTES, computing, target=math.inf, at_once=True), Compute)

    @pytest.mark.parametrize("at_once", [False, True])
    def test_after_the_grace_period_a_round_is_among_those_that_are_due(self, at_once: bool) -> None:
        seen = survey(self.WAITS, [self.WAITS, self.COMPUTES])
        found = decide(self.WAITS, seen, target=math.inf, least=2, at_once=at_once, hurries=True)
        assert isinstance(found, Average)
        assert found.peers == 2
        assert found.reason == "1 of 3 peers still compute after the grace period"

    def test_fewer_peers_than_the_quorum_wait_on(self) -> None:
        seen = survey(self.WAITS, [self.WAITS, self.COMPUTES])
        assert isinstance(decide(self.WAITS, seen, target=math.inf, least=3, hurries=True), WaitForPeers)
        alone = survey(self.WAITS, [self.COMPUTES])
        assert isinstance(decide(self.WAITS, alone, target=math.inf, least=1, hurries=True), WaitForPeers)
        half = survey(self.WAITS, [self.WAITS, self.COMPUTES, self.COMPUTES])
        assert isinstance(decide(self.WAITS, half, target=math.inf, least=2, hurries=True), WaitForPeers)


class TestFollowing:
    def test_peer_of_the_same_update_counts_as_following(self) -> None:
        mine = at(THERE, 4, 0.5)
        said = at(HERE, 3, 50.0, speed=7.0, waiting=True)
        assert following(said, [HERE], mine) == replace(at(THERE, 4, 0.0, speed=7.0), started=True)

    def test_other_words_are_left_unchanged(self) -> None:
        mine = at(THERE, 4)
        for said in (at(THERE, 4, 8.0, waiting=True), at(ELSEWHERE, 3, 8.0, waiting=True)):
            assert following(said, [HERE], mine) == said
        assert following(at(HERE), [], mine) == at(HERE)
