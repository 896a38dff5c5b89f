"""The rule that says which contributions a later attempt does not send again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.allreduce.movers.reuse import START, Received, ResumeMark, goes_on_at, has_come
from p2pavg.group.shares import SharePart, cut_into_parts
from p2pavg_compression import Fp16

BEFORE = cut_into_parts(0, 40, 1, 10)
LONGER = (*BEFORE, SharePart(4, 90, 97))
OTHER = (*BEFORE[:2], SharePart(2, 50, 60))


def came(parts: int, begun: int = 0) -> Received:
    return Received([bytes(20)] * parts, bytes(begun), [bytes(32)] * parts)


@pytest.mark.parametrize(
    ("told", "sent", "now", "expected"),
    [
        (START, 4, LONGER, START),
        (ResumeMark(1, 7), 4, LONGER, ResumeMark(1, 7)),
        (ResumeMark(4, 0), 4, LONGER, ResumeMark(4, 0)),
        # A signature of the new attempt has to follow a part.
        (ResumeMark(4, 0), 4, BEFORE, ResumeMark(3, 20)),
        # What is another part now is sent from its beginning.
        (ResumeMark(2, 7), 4, OTHER, ResumeMark(2, 0)),
        (ResumeMark(3, 7), 4, OTHER, ResumeMark(2, 0)),
        # A reducer that claims more than was sent is not believed.
        (ResumeMark(3, 7), 2, LONGER, ResumeMark(2, 0)),
        (ResumeMark(2, 7), 2, LONGER, ResumeMark(2, 0)),
        (ResumeMark(9, 7), 0, LONGER, START),
        (ResumeMark(1, 21), 4, LONGER, ResumeMark(1, 0)),
        (ResumeMark(1, 7), 4, (), START),
    ],
)
def test_a_contributor_goes_on_where_the_reducer_says(
    told: ResumeMark, sent: int, now: tuple[SharePart, ...], expected: ResumeMark
) -> None:
    assert goes_on_at(told, sent, BEFORE, now, Fp16()) == expected


@given(
    st.integers(0, 4),
    st.integers(0, 20),
    st.sampled_from([BEFORE, LONGER, OTHER, ()]),
    st.integers(0, 4),
    st.integers(0, 20),
)
def test_a_reducer_keeps_whatever_it_has_told(
    parts: int, begun: int, now: tuple[SharePart, ...], more: int, further: int
) -> None:
    """More may come between its word and the new attempt. An honest contributor never goes on later than that."""
    begun = begun if parts < 4 else 0
    told = ResumeMark(parts, begun)
    kept = max(told, ResumeMark(more, further if more < 4 else 0))
    mark = has_come(came(*kept), BEFORE, now, Fp16())
    assert goes_on_at(told, 4, BEFORE, now, Fp16()) <= mark
    assert not now or mark.parts < len(now), "a signature has to follow a part"
