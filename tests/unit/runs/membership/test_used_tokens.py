"""Used tokens: each admits one peer, which is remembered as long as the link could be used, and bounded."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import DAY_SECONDS
from p2pavg.runs.membership.certificate import MAX_TIME, Role
from p2pavg.runs.membership.tokens import MAX_USED, MAX_USED_BYTES, Token, Use, UsedTokens, parse_used_tokens
from tests.unit.runs.membership.runs import NOW, signer

ALICE, BOB = signer(1).peer_id, signer(2).peer_id


def token(number: int = 0, expires: float = NOW + 100.0) -> Token:
    return Token(
        serial=number.to_bytes(16, "big"),
        roles=frozenset([Role.CONTRIBUTOR]),
        max_weight=1.0,
        begins=NOW,
        expires=expires,
        certificate_expires=expires,
    )


def test_a_token_admits_one_peer_again_and_no_other() -> None:
    used = UsedTokens()
    assert used.refusal(token(), ALICE, NOW) is None
    assert used.use(token(), ALICE, NOW)
    assert used.refusal(token(), ALICE, NOW) is None
    assert not used.use(token(), ALICE, NOW), "nothing is to be written"
    assert used.refusal(token(), BOB, NOW) == "this link was used already by another peer"
    assert used.refusal(token(1), BOB, NOW) is None


def test_an_expired_token_admits_no_peer_not_even_the_one_that_used_it() -> None:
    used = UsedTokens()
    used.use(token(), ALICE, NOW)
    for peer_id in (ALICE, BOB):
        assert used.refusal(token(), peer_id, NOW + 100.0) == "this link expired on 2027-01-15 08:01:40 UTC"


def test_what_is_written_remembers_the_peer() -> None:
    used = UsedTokens()
    used.use(token(), ALICE, NOW)
    again = parse_used_tokens(used.text)
    assert again.refusal(token(), ALICE, NOW) is None
    assert again.refusal(token(), BOB, NOW) == "this link was used already by another peer"


def test_memory_is_bounded_and_expired_links_make_room() -> None:
    most = {number.to_bytes(16, "big"): Use(ALICE, NOW + 100.0) for number in range(MAX_USED - 1)}
    used, last = UsedTokens(most), token(MAX_USED - 1)
    assert used.refusal(last, ALICE, NOW) is None
    used.use(last, ALICE, NOW)
    more = token(MAX_USED, expires=NOW + 1e6)
    assert "try again later" in (used.refusal(more, BOB, NOW) or "")
    assert used.refusal(token(), ALICE, NOW) is None, "a peer that was admitted is not locked out"
    assert len(used.text) <= MAX_USED_BYTES
    later = NOW + 100.0 + DAY_SECONDS
    assert used.refusal(more, BOB, later) is None
    used.use(more, BOB, later)
    assert len(used.text.splitlines()) == 2


uses = st.dictionaries(
    st.binary(min_size=16, max_size=16),
    st.builds(
        Use,
        peer_id=st.integers(1, 9).map(lambda number: signer(number).peer_id),
        expires=st.floats(0, MAX_TIME),
    ),
    max_size=5,
)


@given(uses)
def test_the_text_is_read_back(given_uses: dict[bytes, Use]) -> None:
    text = UsedTokens(given_uses).text
    assert parse_used_tokens(text).text == text


@pytest.mark.parametrize(
    "line", ["x", f"{'0' * 32} 5", f"{'0' * 31} 5 {ALICE}", f"{'0' * 32} nan {ALICE}", f"{'0' * 32} 5 nobody"]
)
def test_a_damaged_line_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        parse_used_tokens(f"# comment\n{line}\n")


def test_a_file_with_too_many_lines_is_refused() -> None:
    lines = (f"{number:032x} 5.0 {ALICE}" for number in range(MAX_USED + 1))
    with pytest.raises(ConfigError, match="4097 links; a delegate keeps 4096"):
        parse_used_tokens("\n".join(lines))


@given(st.text(max_size=200))
@example(f"{'0' * 32} {'9' * 12}.{'9' * 20} {ALICE}")
def test_no_text_raises_another_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_used_tokens(text)
