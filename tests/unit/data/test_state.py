"""Positions, saved states, and arguments that are refused."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.data import PeerSampler

LENGTH = 1500  # more than one block, and no multiple of it


def sampler() -> PeerSampler:
    return PeerSampler(LENGTH, peer_id="a", seed=3)


def from_now_on(of: PeerSampler, epochs: int) -> list[int]:
    return [sample for _ in range(epochs) for sample in of]


class TestPositions:
    def test_a_sampler_counts_what_it_gives(self) -> None:
        counted = sampler()
        assert (counted.position, counted.epoch, len(counted)) == (0, 0, LENGTH)
        first = list(islice(counted, 100))
        assert (counted.position, counted.epoch, len(counted)) == (100, 0, LENGTH - 100)
        rest = list(counted)
        assert sorted(first + rest) == list(range(LENGTH))
        assert (counted.position, counted.epoch, len(counted)) == (LENGTH, 1, LENGTH)

    def test_the_next_iteration_gives_the_next_epoch(self) -> None:
        both = sampler()
        assert from_now_on(both, 2) == [
            *PeerSampler(LENGTH, peer_id="a", seed=3),
            *PeerSampler(LENGTH, peer_id="a", seed=3, epoch=1),
        ]

    def test_two_iterators_repeat_nothing(self) -> None:
        shared = sampler()
        one, other = iter(shared), iter(shared)
        samples = [next(each) for _ in range(LENGTH // 2) for each in (one, other)]
        assert sorted(samples) == list(range(LENGTH))
        assert next(one, None) is next(other, None) is None


class TestSavedStates:
    @given(used=st.integers(0, 3 * LENGTH))
    def test_a_state_goes_on_with_the_next_sample(self, used: int) -> None:
        whole = sampler()
        expected = from_now_on(whole, 4)
        file = io.BytesIO()
        torch.save(whole.state_dict(position=used), file)
        file.seek(0)
        resumed = sampler()
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.position == used
        assert from_now_on(resumed, 4 - resumed.epoch) == expected[used:]

    def test_a_state_is_of_all_that_was_given_out_unless_told_otherwise(self) -> None:
        saved = sampler()
        list(islice(saved, 7))
        expected = {"scheme": 1, "length": LENGTH, "seed": 3, "peer_id": "a"}
        assert saved.state_dict() == {**expected, "position": 7}
        assert saved.state_dict(position=4) == {**expected, "position": 4}
        assert saved.position == 7

    @pytest.mark.parametrize("position", [-1, 8, 1.0, "1", True])
    def test_a_position_that_the_sampler_has_not_reached_is_refused(self, position: Any) -> None:
        saved = sampler()
        list(islice(saved, 7))
        with pytest.raises(ValueError, match=r"^position must be a whole number from 0 to 7"):
            saved.state_dict(position=position)

    @pytest.mark.parametrize("position", [0, 5, 1100, 1200])
    def test_a_running_iteration_goes_on_at_a_loaded_position(self, position: int) -> None:
        order = list(sampler())
        running = sampler()
        iterator = iter(running)
        assert [next(iterator) for _ in range(1200)] == order[:1200]
        running.load_state_dict(running.state_dict(position=position))
        assert list(iterator) == order[position:]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"length": LENGTH + 1}, rf"^state has length {LENGTH + 1}, this sampler has {LENGTH}"),
            ({"seed": 4}, "^state has seed 4, this sampler has 3"),
            ({"peer_id": "b"}, "^state has peer_id 'b', this sampler has 'a'"),
            ({"scheme": 2}, "^state has scheme 2, this sampler has 1"),
            ({"position": -1}, "^position must be"),
            ({"position": 1.5}, "^position must be"),
            ({"position": True}, "^position must be"),
            ({"position": 2**63 * LENGTH + 1}, "^position must be"),
            ({"more": 1}, "^state is not what"),
        ],
    )
    def test_a_state_of_another_order_or_peer_is_refused(self, change: dict[str, Any], message: str) -> None:
        loading = sampler()
        list(islice(loading, 7))
        with pytest.raises(ValueError, match=message):
            loading.load_state_dict({**sampler().state_dict(), **change})
        assert loading.position == 7

    @pytest.mark.parametrize("state", [None, [], {}, {"position": 1}, "state"])
    def test_what_is_no_state_is_refused(self, state: Any) -> None:
        with pytest.raises(ValueError, match=r"^state is not what"):
            sampler().load_state_dict(state)


REFUSED: list[tuple[str, object]] = [
    *[("dataset_or_length", value) for value in (0, -1, 2**62 + 1, 1.5, True, None, (), 1j)],
    *[("seed", value) for value in (2**63, -(2**63), 0.0, "0", None, True)],
    *[("epoch", value) for value in (-1, 2**63, 0.0, None, False)],
    *[("peer_id", value) for value in ("", None, 5, b"a", "half a \ud800 character", "a\nb")],
]


class TestArguments:
    @pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
    def test_what_is_out_of_range_is_named(self, name: str, value: Any) -> None:
        arguments: dict[str, Any] = {"dataset_or_length": 10, "peer_id": "a", name: value}
        with pytest.raises(ValueError, match=rf"^{name} must"):
            PeerSampler(**arguments)

    def test_the_ends_of_the_ranges_are_allowed(self) -> None:
        for seed in (2**63 - 1, 1 - 2**63):
            largest = PeerSampler(2**62, peer_id="x" * 500, seed=seed, epoch=2**63 - 1)
            assert 0 <= next(iter(largest)) < 2**62
            largest.load_state_dict(largest.state_dict())

    def test_another_peers_id_is_checked_too(self) -> None:
        with pytest.raises(ValueError, match=r"^peer_id must"):
            sampler().samples_before("")
