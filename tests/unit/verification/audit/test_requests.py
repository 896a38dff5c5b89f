"""The pace of an answer to an auditor, and its pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.libp2p.stream import LONG_PIECE_BYTES
from p2pavg.verification.audit.keeping import (
    ANSWER_PART,
    ANSWER_PIECE_SECONDS,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    UNKNOWN_PIECE_BYTES,
    answer_pieces,
    seconds_a_byte,
)


@pytest.mark.parametrize("mbps", [0.1, 5.0, 1000.0])
def test_an_answer_takes_a_small_part_of_the_link(mbps: float) -> None:
    total = int(ANSWER_PART * mbps * 1e6 / 8)
    assert total * seconds_a_byte(total, mbps) == pytest.approx(1.0, rel=1e-3)


def test_an_answer_never_takes_longer_than_the_inputs_are_kept() -> None:
    assert 10**9 * seconds_a_byte(10**9, 0.1) == pytest.approx(REPLY_SECONDS)


def test_an_empty_answer_takes_no_time() -> None:
    assert 0 * seconds_a_byte(0, 5.0) == 0.0


@given(st.integers(0, 10**7), st.floats(0.01, 1e5))
def test_pieces_of_an_answer_are_all_of_its_bytes_and_keep_the_link_for_a_moment(
    nbytes: int, mbps: float
) -> None:
    pieces = answer_pieces(nbytes, mbps)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
    sizes = list(map(len, pieces))
    assert sum(sizes) == nbytes
    assert all(sizes)
    for size in sizes:
        assert size <= MAX_PIECE_BYTES
        assert size <= MIN_PIECE_BYTES or size * 8 / (mbps * 1e6) <= ANSWER_PIECE_SECONDS
    assert all(abs(one - other) <= 1 for one, other in itertools.pairwise(sizes)), "none is a short rest"


def test_a_fast_link_carries_an_answer_in_few_pieces() -> None:
    assert [len(answer_pieces(2**19, mbps)) for mbps in (1.0, 50.0, 1000.0)] == [32, 17, 9]


def test_pieces_for_an_unknown_link_are_those_of_a_slow_one() -> None:
    assert {len(piece) for piece in answer_pieces(2**19, 0.0)} == {UNKNOWN_PIECE_BYTES}


def test_a_frame_of_the_connection_holds_the_longest_piece() -> None:
    assert MAX_PIECE_BYTES <= LONG_PIECE_BYTES
