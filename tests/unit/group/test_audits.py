"""The setting of audits, and the draw of who audits which parts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import Audits, drawn_parts, resolve_audits


def ticket(number: int) -> bytes:
    """Return 64 bytes that look like a signature."""
    return hashlib.sha512(number.to_bytes(8, "big")).digest()


@pytest.mark.parametrize(
    ("text", "audits"),
    [
        ("after", Audits(0.125, before=False)),
        ("before", Audits(0.125, before=True)),
        ("after:1", Audits(1.0)),
        ("before:0.5", Audits(0.5, before=True)),
        ("off", None),
    ],
)
def test_texts_of_audits(text: str, audits: Audits | None) -> None:
    assert resolve_audits(text) == audits
    if audits is not None:
        assert resolve_audits(audits.text) == resolve_audits(audits) == audits


@pytest.mark.parametrize(
    "wrong",
    ["", "during", "after:", "after:0", "after:1.1", "after:nan", "after:x", "off:1", 0.5, None, "a" * 65],
)
def test_other_texts_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        resolve_audits(wrong)


@pytest.mark.parametrize("probability", [0, -1, 1.5, float("nan"), True, "1"])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="probability of an audit"):
        Audits(probability)


def test_a_share_is_audited_as_often_as_is_set() -> None:
    for auditors in (1, 3, 15, 63):
        rounds = 20_000
        audited = sum(
            any(
                drawn_parts(Audits(0.125), ticket(64 * number + auditor), 5, 8, auditors)
                for auditor in range(auditors)
            )
            for number in range(rounds // auditors)
        )
        assert audited / (rounds // auditors) == pytest.approx(0.125, abs=0.05)


@pytest.mark.parametrize(("parts", "auditors"), [(0, 3), (8, 0)])
def test_without_parts_or_auditors_no_member_is_drawn(parts: int, auditors: int) -> None:
    assert drawn_parts(Audits(1.0), ticket(0), 0, parts, auditors) == ()


@given(st.binary(min_size=64, max_size=64), st.integers(0, 127), st.integers(1, 500), st.integers(1, 64))
def test_an_audit_covers_a_third_of_each_stretch_of_a_share(
    signature: bytes, reducer: int, parts: int, stretches: int
) -> None:
    drawn = drawn_parts(Audits(1.0), signature, reducer, parts, 1, stretches)
    assert sorted(set(drawn)) == list(drawn)
    pieces = min(stretches, parts)
    for piece in range(pieces):
        start, stop = piece * parts // pieces, (piece + 1) * parts // pieces
        assert sum(start <= index < stop for index in drawn) == -(-(stop - start) // 3)


def test_the_stretches_of_a_share_are_drawn_independently_of_each_other() -> None:
    found = [drawn_parts(Audits(0.5), ticket(number), 0, 16, 1, 2) for number in range(4_000)]
    both = sum(any(index < 8 for index in each) and any(index >= 8 for index in each) for each in found)
    assert both / 4_000 == pytest.approx(0.25, abs=0.03)


def test_golden_draws() -> None:
    """All versions of one protocol draw alike; another draw would look like a refused audit."""
    drawn = [drawn_parts(Audits(0.5), ticket(number), 3, 8, 3) for number in range(8)]
    assert drawn == GOLDEN


GOLDEN: list[tuple[int, ...]] = [(), (3, 4, 5), (), (), (), (), (0, 6, 7), ()]
