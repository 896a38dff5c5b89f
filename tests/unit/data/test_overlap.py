"""Samples that several peers share: none before a known point, and as many as the documentation says."""

from __future__ import annotations

import functools
from itertools import combinations, islice
from statistics import fmean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from p2pavg.data import PeerSampler

LENGTH = 400
PEERS = 8
TRIALS = 400


def first_samples(sampler: PeerSampler, count: int) -> set[int]:
    return set(islice(sampler, count))


class TestDisjointness:
    @given(length=st.integers(2, 3000), seed=st.integers(0, 10**6), epoch=st.integers(0, 3), data=st.data())
    def test_two_peers_share_no_sample_until_one_reaches_the_others_first(
        self, length: int, seed: int, epoch: int, data: st.DataObject
    ) -> None:
        names = data.draw(st.tuples(st.text("abc", min_size=1), st.text("xyz", min_size=1)))
        one, other = (PeerSampler(length, peer_id=name, seed=seed, epoch=epoch) for name in names)
        ahead, behind = one.samples_before(names[1]), other.samples_before(names[0])
        assume(ahead > 0)
        assert ahead + behind == length
        of_one, of_other = list(one), list(other)
        assert not set(of_one[:ahead]) & set(of_other[:behind])
        assert of_one[ahead] == of_other[0]
        assert of_other[behind] == of_one[0]

    def test_peers_that_begin_with_the_same_sample_have_none_before(self) -> None:
        assert PeerSampler(1, peer_id="a").samples_before("b") == 0
        assert PeerSampler(1000, peer_id="a").samples_before("a") == 0

    def test_the_point_belongs_to_the_epoch_and_not_to_the_position_in_it(self) -> None:
        sampler = PeerSampler(1000, peer_id="a")
        before = sampler.samples_before("b")
        assert next(iter(sampler)) is not None
        assert sampler.samples_before("b") == before
        later = PeerSampler(1000, peer_id="a", epoch=1).samples_before("b")
        assert later != before
        assert list(sampler)
        assert sampler.samples_before("b") == later


@functools.cache
def trials() -> list[list[list[int]]]:
    """Return the first 80 samples of each peer of each trial."""
    return [
        [list(islice(PeerSampler(LENGTH, peer_id=f"peer {n}", seed=seed), 80)) for n in range(PEERS)]
        for seed in range(TRIALS)
    ]


class TestExpectedOverlap:
    """Formulas of the module's docstring, against peers that take ``count`` samples each. The seeds are fixed."""

    @pytest.mark.parametrize("count", [5, 20, 80])
    def test_different_samples_of_all_peers(self, count: int) -> None:
        measured = fmean(len(set().union(*(samples[:count] for samples in peers))) for peers in trials())
        expected = LENGTH * (1 - (1 - count / LENGTH) ** PEERS)
        assert measured == pytest.approx(expected, rel=0.02)

    @pytest.mark.parametrize("count", [5, 20, 80])
    def test_samples_of_two_peers(self, count: int) -> None:
        shared = [
            len(set(one[:count]) & set(other[:count]))
            for peers in trials()
            for one, other in combinations(peers, 2)
        ]
        assert fmean(shared) == pytest.approx(count**2 / LENGTH, rel=0.1)
        nothing = shared.count(0) / len(shared)
        assert nothing == pytest.approx(1 - (2 * count - 1) / LENGTH, abs=0.01)

    def test_chance_that_no_two_peers_share_a_sample(self) -> None:
        count = 5
        apart = [
            len(set().union(*(samples[:count] for samples in peers))) == PEERS * count for peers in trials()
        ]
        assert fmean(apart) == pytest.approx((1 - PEERS * count / LENGTH) ** (PEERS - 1), abs=0.06)
