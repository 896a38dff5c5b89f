"""The pace of an answer to an auditor."""

from __future__ import annotations

import pytest

from p2pavg.audit.requests import ANSWER_PART, ANSWER_SECONDS, seconds_a_byte


@pytest.mark.parametrize("mbps", [0.1, 5.0, 1000.0])
def test_an_answer_takes_a_small_part_of_the_link(mbps: float) -> None:
    total = int(ANSWER_PART * mbps * 1e6 / 8)
    assert total * seconds_a_byte(total, mbps) == pytest.approx(1.0, rel=1e-3)


def test_an_answer_never_takes_longer_than_the_inputs_are_kept() -> None:
    assert 10**9 * seconds_a_byte(10**9, 0.1) == pytest.approx(ANSWER_SECONDS)


def test_an_empty_answer_takes_no_time() -> None:
    assert 0 * seconds_a_byte(0, 5.0) == 0.0
