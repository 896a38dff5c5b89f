"""The order of the samples: complete, the same in every version, and as good as random."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import chisquare

from p2pavg.data import PeerSampler

WORD = 2**64
ROUNDS = 24

texts = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
seeds = st.integers(1 - 2**63, 2**63 - 1)
epochs = st.integers(0, 2**63 - 1)


def taken(sampler: PeerSampler, count: int) -> list[int]:
    return list(islice(sampler, count))


def fair(counts: Iterable[int], cells: int) -> bool:
    """Return whether equally likely cells would be hit like this in all but one of a thousand trials."""
    found = list(counts)
    return bool(chisquare(found + [0] * (cells - len(found))).pvalue > 1e-3)


class TestCompleteness:
    @given(length=st.integers(1, 5000), peer_id=texts, seed=seeds, epoch=epochs)
    def test_an_epoch_of_any_length_peer_seed_and_number_has_every_sample_once(
        self, length: int, peer_id: str, seed: int, epoch: int
    ) -> None:
        sampler = PeerSampler(length, peer_id=peer_id, seed=seed, epoch=epoch)
        assert sorted(sampler) == list(range(length))
        assert sampler.epoch == epoch + 1

    @given(length=st.integers(10_000, 2**62), seed=seeds)
    @example(length=2**62, seed=0)
    @example(length=10**10, seed=0)
    def test_no_sample_of_a_large_epoch_comes_twice(self, length: int, seed: int) -> None:
        samples = taken(PeerSampler(length, peer_id="a", seed=seed), 2000)
        assert len(set(samples)) == 2000
        assert 0 <= min(samples) <= max(samples) < length

    def test_the_largest_words_do_not_map_two_cells_to_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def largest(key: np.uint64, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            return np.full_like(counters, WORD - 1)

        monkeypatch.setattr("p2pavg.data.order._split_mix", largest)
        for length in (9, 1000):
            assert sorted(PeerSampler(length, peer_id="a")) == list(range(length))


class TestStability:
    """Peers of two versions share one order, and a saved position stays true. A new order needs a new scheme number."""

    @pytest.mark.parametrize(
        ("length", "peer_id", "seed", "epoch", "samples"),
        [
            (1, "a", 0, 0, [0]),
            (7, "a", 0, 0, [0, 3, 4, 2, 1]),
            (7, "b", 0, 0, [2, 1, 6, 5, 0]),
            (1000, "a", 0, 0, [928, 657, 126, 721, 584]),
            (1000, "a", 1, 0, [887, 49, 474, 403, 681]),
            (1000, "a", 0, 1, [885, 685, 627, 721, 598]),
            (1000, "Prüfling 1", -5, 3, [169, 452, 246, 447, 197]),
            (10000000000, "12D3KooW", 7, 2, [8492209385, 5875281994, 198967905, 3889652000, 3489648703]),
        ],
    )
    def test_the_first_samples(
        self, length: int, peer_id: str, seed: int, epoch: int, samples: list[int]
    ) -> None:
        assert taken(PeerSampler(length, peer_id=peer_id, seed=seed, epoch=epoch), 5) == samples

    @given(length=st.integers(1, 2**62), peer_id=texts, seed=seeds, epoch=epochs)
    @example(length=2**62, peer_id="a", seed=0, epoch=0)
    def test_the_order_is_the_documented_one(self, length: int, peer_id: str, seed: int, epoch: int) -> None:
        """This computes one sample at a time, with plain integers."""
        sampler = PeerSampler(length, peer_id=peer_id, seed=seed, epoch=epoch)
        count = min(3, length)
        expected = [plain_sample(length, peer_id, seed, epoch, number) for number in range(count)]
        assert taken(sampler, count) == expected


def plain_sample(length: int, peer_id: str, seed: int, epoch: int, number: int) -> int:
    first = bits(f"first place\n{seed}\n{epoch}\n{length}\n{peer_id}", 16)
    keys = bits(f"keys\n{seed}\n{epoch}\n{length}\n", 8 * ROUNDS)
    rows = math.isqrt(length - 1) + 1
    rows += rows % 2
    columns = (length + rows - 1) // rows
    cell = (first + number) % length
    while True:
        row, column = divmod(cell, columns)
        for index in range(ROUNDS):
            key = keys >> (64 * index) & (WORD - 1)
            if index % 2 == 0:
                row = (row + split_mix(key, column)) % rows
            else:
                column = (column + split_mix(key, row)) % columns
        cell = row * columns + column
        if cell < length:
            return cell


def bits(text: str, size: int) -> int:
    return int.from_bytes(hashlib.shake_256(f"p2pavg/data/1\n{text}".encode()).digest(size), "little")


def split_mix(key: int, counter: int) -> int:
    mixed = (key + counter * 0x9E3779B97F4A7C15) % WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % WORD
    return mixed ^ mixed >> 31


class TestRandomness:
    """The seeds are fixed, so these tests give the same answer each time."""

    @pytest.mark.parametrize(("length", "seeds"), [(2, 400), (3, 600), (4, 1200), (5, 3600)])
    def test_all_orders_of_few_samples_are_equally_likely(self, length: int, seeds: int) -> None:
        orders = Counter(tuple(PeerSampler(length, peer_id="a", seed=seed)) for seed in range(seeds))
        assert fair(orders.values(), math.factorial(length))

    @pytest.mark.parametrize("length", [9, 25])
    def test_even_and_odd_orders_are_equally_likely(self, length: int) -> None:
        """An odd square is where a grid of that many cells would give even orders only."""
        orders = (list(PeerSampler(length, peer_id="a", seed=seed)) for seed in range(400))
        signs = Counter(sum(one > other for one, other in combinations(order, 2)) % 2 for order in orders)
        assert fair(signs.values(), 2)
