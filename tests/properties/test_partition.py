"""How the vector is cut: for any group and any length, every element has one owner and one part."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.partition import (
    PART_ELEMENTS,
    cut_into_parts,
    fp32_bytes,
    share_bounds,
    shares_by_bandwidth,
)

bandwidths = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=64)
lengths = st.integers(0, 200) | st.integers(0, 2**34)
granularities = st.sampled_from([1, 3, 64, 256, 4096])


@settings(deadline=None)
@given(lengths, bandwidths, granularities)
def test_shares(elements: int, bandwidths: list[float], granularity: int) -> None:
    shares = shares_by_bandwidth(elements, bandwidths, granularity)
    assert sum(shares) == elements
    assert len(shares) == len(bandwidths)
    assert min(shares) >= 0
    total = sum(bandwidths)
    for share, bandwidth in zip(shares, bandwidths, strict=True):
        # Half a block at either cut, the last of which may be of a block that is not full; and float64's rounding.
        assert abs(share - elements * bandwidth / total) <= 2 * granularity + elements * 1e-12
    assert shares == shares_by_bandwidth(elements, list(bandwidths), granularity)


@settings(deadline=None)
@given(lengths, bandwidths, granularities)
def test_no_block_is_split(elements: int, bandwidths: list[float], granularity: int) -> None:
    shares = shares_by_bandwidth(elements, bandwidths, granularity)
    for position in range(len(shares)):
        start, stop = share_bounds(shares, position)
        assert stop - start == shares[position]
        if stop > start:
            assert start % granularity == 0
            assert stop % granularity == 0 or stop == elements


@settings(deadline=None)
@given(st.integers(1, 64), lengths, granularities)
def test_equals_share_equally(members: int, elements: int, granularity: int) -> None:
    shares = shares_by_bandwidth(elements, [7.3] * members, granularity)
    assert max(shares) - min(shares) <= 2 * granularity


@settings(deadline=None)
@given(bandwidths)
def test_a_vector_of_one_element_has_one_owner(bandwidths: list[float]) -> None:
    shares = shares_by_bandwidth(1, bandwidths, 64)
    assert sorted(shares) == [0] * (len(bandwidths) - 1) + [1]


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 3000), granularities, st.integers(1, 300))
def test_parts_cover_a_share_in_order(
    start: int, elements: int, granularity: int, part_elements: int
) -> None:
    parts = cut_into_parts(start, start + elements, granularity, part_elements)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert [part.start for part in parts] == [start, *(part.stop for part in parts)][: len(parts)]
    assert (parts[-1].stop if parts else start) == start + elements
    assert all(0 < part.elements <= max(part_elements, granularity) for part in parts)
    assert all(part.elements % granularity == 0 for part in parts[:-1])


@settings(deadline=None)
@given(st.integers(0, 5 * PART_ELEMENTS), granularities)
def test_parts_are_as_large_as_they_may_be(elements: int, granularity: int) -> None:
    parts = cut_into_parts(0, elements, granularity)
    assert all(PART_ELEMENTS - granularity < part.elements <= PART_ELEMENTS for part in parts[:-1])


def counted_one_by_one(shares: list[int], position: int, contributes: list[bool]) -> int:
    """Who sends what to whom, element by element."""
    floats = 0
    for reducer, share in enumerate(shares):
        for member, contributor in enumerate(contributes):
            if member == reducer or not contributor:
                continue
            contribution_there_and_average_back = 2 * share
            if position in (member, reducer):
                floats += contribution_there_and_average_back
    return 4 * floats


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=2, max_size=10), st.integers(0, 9))
def test_bytes_without_a_codec(members: list[tuple[int, bool]], position: int) -> None:
    shares, contributes = [share for share, _ in members], [contributor for _, contributor in members]
    position %= len(members)
    assert fp32_bytes(shares, position, contributes) == counted_one_by_one(shares, position, contributes)
