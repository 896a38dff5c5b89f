"""Samples that several peers share: none before a known point, and as many as the documentation says."""

from __future__ import annotations

from itertools import combinations, islice
from statistics import fmean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from p2pavg.data import PeerSampler


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


def test_two_peers_share_as_many_samples_as_the_documentation_says() -> None:
    """Of the first samples of each; the seeds are fixed."""
    length, count, peers, trials = 400, 20, 8, 400
    shared = []
    for seed in range(trials):
        taken = [
            set(islice(PeerSampler(length, peer_id=f"peer {n}", seed=seed), count)) for n in range(peers)
        ]
        shared += [len(one & other) for one, other in combinations(taken, 2)]
    assert fmean(shared) == pytest.approx(count**2 / length, rel=0.1)
    assert shared.count(0) / len(shared) == pytest.approx(1 - (2 * count - 1) / length, abs=0.01)
