"""Sets of integers as numbers: each set has one number, and each number below the count one set."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pavg_compression.combinations import MOST_BITS, Combinations, combinations, count_of_sets, number_bytes


def padded(sets: list[tuple[int, ...]], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = [(*each, *(0,) * (most - len(each))) for each in sets]
    return np.array(rows, dtype=np.int64).reshape(len(sets), most), np.array([len(each) for each in sets])


def as_bytes(numbers: list[int], nbytes: int) -> NDArray[np.uint8]:
    raw = b"".join(number.to_bytes(nbytes, "little") for number in numbers)
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(numbers), nbytes)


def as_numbers(raw: NDArray[np.uint8]) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in raw]


@pytest.mark.parametrize(("universe", "most"), [(1, 1), (5, 5), (7, 3), (10, 1), (8, 0)])
def test_all_sets_of_a_small_universe(universe: int, most: int) -> None:
    coder = combinations(universe, most, universe, most)
    sets = [each for size in range(most + 1) for each in itertools.combinations(range(universe), size)]
    numbers = as_numbers(coder.numbers(*padded(sets, most)))
    assert sorted(numbers) == list(range(count_of_sets(universe, most)))
    assert [number for number, each in zip(numbers, sets, strict=True) if len(each) == most] == sorted(
        numbers[-math.comb(universe, most) :]
    ) or universe > most
    found, sizes = coder.sets(as_bytes(numbers, coder.nbytes))
    expected, expected_sizes = padded(sets, most)
    assert np.array_equal(found, expected)
    assert np.array_equal(sizes, expected_sizes)


def by_definition(places: NDArray[np.int64], universe: int, most: int) -> int:
    """Return the number of a set, in integers of Python."""
    before = sum(math.comb(universe, size) for size in range(len(places) + 1, most + 1))
    return before + sum(math.comb(int(place), index + 1) for index, place in enumerate(places))


@pytest.mark.parametrize(("universe", "most"), [(4096, 64), (4096, 164), (1000, 16), (64, 12), (4096, 1)])
def test_random_sets_have_the_number_of_the_definition_and_come_back(universe: int, most: int) -> None:
    random = np.random.default_rng(universe + most)
    coder = combinations(universe, most, universe, most)
    sets = [
        tuple(sorted(random.choice(universe, size=size, replace=False).tolist()))
        for size in [most] * 20 + [most - 1, most // 2, 1, 0]
    ]
    # The first and the last ones: binomials with the smallest and the largest places.
    sets += [tuple(range(most)), tuple(range(universe - most, universe)), (universe - 1,)]
    expected, sizes = padded(sets, most)
    raw = coder.numbers(expected, sizes)
    assert as_numbers(raw) == [by_definition(np.array(each), universe, most) for each in sets]
    found, found_sizes = coder.sets(raw)
    assert np.array_equal(found, expected)
    assert np.array_equal(found_sizes, sizes)
    assert np.array_equal(coder.sizes(raw), sizes)


@pytest.mark.parametrize(("universe", "most"), [(4096, 64), (100, 7), (64, 12)])
def test_numbers_beside_the_steps_of_binomials(universe: int, most: int) -> None:
    """float64 cannot tell these numbers from the binomials beside them."""
    coder = combinations(universe, most, universe, most)
    steps = [math.comb(place, most) for place in range(most, universe, 17)]
    numbers = [
        each + away for each in steps for away in (-1, 0, 1) if each + away < math.comb(universe, most)
    ]
    found, sizes = coder.sets(as_bytes(numbers, coder.nbytes))
    assert as_numbers(coder.numbers(found, sizes)) == numbers
    assert (np.diff(found, axis=1) > 0).all()
    assert found.max() < universe


def test_only_numbers_below_the_count_are_numbers() -> None:
    coder = combinations(4096, 64, 4096, 64)
    count = count_of_sets(4096, 64)
    assert coder.are_numbers(as_bytes([0, count - 1], coder.nbytes))
    for wrong in (count, count + 1, 256**coder.nbytes - 1):
        assert not coder.are_numbers(as_bytes([0, wrong, 5], coder.nbytes))


def test_numbers_of_sets_of_one_size() -> None:
    coder = combinations(20, 3, 20, 3)
    ends = np.cumsum([math.comb(20, size) for size in (3, 2, 1, 0)]).tolist()
    for size, first, end in zip((3, 2, 1, 0), [0, *ends], ends, strict=False):
        sizes = np.array([size])
        for number in (first, end - 1):
            assert coder.are_numbers(as_bytes([number], coder.nbytes), sizes)
        for number in {first - 1, end} & set(range(ends[-1])):
            assert not coder.are_numbers(as_bytes([number], coder.nbytes), sizes)


def test_smaller_sets_use_the_table_of_larger_ones() -> None:
    def numbers(coder: Combinations) -> list[int]:
        found = coder.numbers(np.array([[3, 9, 0], [0, 1, 2], [97, 98, 99]]), np.array([2, 3, 3]))
        return as_numbers(found)

    small, shared = combinations(100, 3, 100, 3), combinations(100, 3, 4096, 64)
    assert numbers(small) == numbers(shared)
    raw = as_bytes(numbers(shared), shared.nbytes)
    assert np.array_equal(small.sets(raw)[0], shared.sets(raw)[0])


def test_a_number_with_too_many_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=f"need more than {MOST_BITS} bits; the most are"):
        number_bytes(4096, 170)


@pytest.mark.parametrize(("universe", "most"), [(4096, 1000), (2**62, 2**60)])
def test_sizes_that_are_refused_are_not_added_up_first(universe: int, most: int) -> None:
    """The sizes come from other peers' texts. All terms of the second sum would take thousands of years."""
    with pytest.raises(ValueError, match=f"more than {MOST_BITS} bits"):
        count_of_sets(universe, most)
