"""Cuts that every version has to make alike: members compute them each for itself."""

from __future__ import annotations

import pytest

from p2pavg.allreduce.partition import PART_ELEMENTS, Part, cut_into_parts, fp32_bytes, shares_by_bandwidth


@pytest.mark.parametrize(
    ("elements", "bandwidths", "granularity", "shares"),
    [
        (1000, [1.0, 1.0], 1, (500, 500)),
        (1000, [1.0, 1.0, 1.0], 1, (333, 334, 333)),
        (1000, [300.0, 100.0], 64, (768, 232)),
        (1000, [100.0, 300.0], 64, (256, 744)),
        (4096, [1e6, 1e-3], 64, (4096, 0)),
        (4096, [1e-3, 1e6], 64, (0, 4096)),
        (100, [1.0] * 4, 64, (0, 64, 36, 0)),
        (3, [1.0] * 4, 1, (1, 1, 0, 1)),
        # With sum() the first cut would be 0 or 1, depending on the version of Python.
        (5, [0.1] * 10, 1, (0, 1, 1, 0, 0, 1, 1, 0, 0, 1)),
        (0, [1.0, 2.0], 64, (0, 0)),
        (1, [5.0], 64, (1,)),
        (2**34, [1.0, 2.0, 1.0], 4096, (2**32, 2**33, 2**32)),
        (10**9, [0.1] * 10, 64, (10**8,) * 10),
    ],
)
def test_shares(elements: int, bandwidths: list[float], granularity: int, shares: tuple[int, ...]) -> None:
    assert shares_by_bandwidth(elements, bandwidths, granularity) == shares


def test_parts_never_change() -> None:
    assert PART_ELEMENTS == 262_144
    assert cut_into_parts(64, 64 + 2 * PART_ELEMENTS + 5, 64) == (
        Part(0, 64, 64 + PART_ELEMENTS),
        Part(1, 64 + PART_ELEMENTS, 64 + 2 * PART_ELEMENTS),
        Part(2, 64 + 2 * PART_ELEMENTS, 64 + 2 * PART_ELEMENTS + 5),
    )
    assert cut_into_parts(10, 10, 64) == ()


def test_a_granularity_that_does_not_divide_a_part() -> None:
    assert [part.elements for part in cut_into_parts(0, 250, 30, part_elements=100)] == [90, 90, 70]
    assert [part.elements for part in cut_into_parts(0, 250, 200, part_elements=100)] == [200, 50]


def test_bytes_without_a_codec() -> None:
    """Two peers with half of a thousand floats each: 500 out and in, 500 averaged out and in, for either."""
    assert fp32_bytes([500, 500], 0, [True, True]) == 4 * 4 * 500
    # An auxiliary that reduces everything: each of two sends it 1000 and gets 1000 back.
    assert fp32_bytes([0, 0, 1000], 2, [True, True, False]) == 4 * 4 * 1000
    assert fp32_bytes([0, 0, 1000], 0, [True, True, False]) == 4 * 2 * 1000
