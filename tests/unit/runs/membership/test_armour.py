"""Certificates and lists as text: read back after a mail has wrapped it; every other text is refused."""

from __future__ import annotations

import contextlib
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.armour import (
    MAX_TEXT_CHARS,
    certificate_text,
    parse_certificate,
    parse_revocations,
    read_armour,
    revocations_text,
)
from p2pavg.runs.membership.revocation import MAX_REVOKED, revoke
from tests.unit.runs.membership.runs import Authority, signer

RUN = Authority()
CERTIFICATE = RUN.certify(signer(1).peer_id)
LIST = revoke(
    RUN.sign,
    authority=RUN.public,
    number=2**53,
    identifiers=[number.to_bytes(16, "big") for number in range(MAX_REVOKED)],
)


def test_a_certificate_is_a_comment_and_a_line() -> None:
    text = certificate_text(CERTIFICATE)
    comment, _ = text.splitlines()
    assert comment == f"# p2pavg certificate of {signer(1).peer_id}"
    assert len(comment) <= 78, "a program for mail would break the line"
    assert parse_certificate(text) == CERTIFICATE


def test_the_longest_list_is_read_back() -> None:
    text = revocations_text(LIST)
    assert text.startswith("# p2pavg list of revoked certificates, number 9007199254740992, entries: 200\n")
    assert parse_revocations(text, RUN.public) == LIST


def test_a_text_that_a_mail_has_wrapped_is_read() -> None:
    comment, line = certificate_text(CERTIFICATE).splitlines()
    wrapped = "\r\n".join([comment, "", *(f"  {part} " for part in textwrap.wrap(line, 72)), ""])
    assert parse_certificate(wrapped) == CERTIFICATE
    assert parse_certificate(line) == CERTIFICATE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no line of base64"),
        ("# only a comment", "no line of base64"),
        ("Dear colleague, here it is", "no line of base64"),
        ("ä", "no line of base64"),
        ("QUJD", "it is no certificate"),
        (revocations_text(LIST), "it is no certificate"),
        (certificate_text(CERTIFICATE)[:-20], "it is no certificate|no line of base64"),
        ("A" * (MAX_TEXT_CHARS + 1), "8193 characters; 8192 are allowed"),
    ],
)
def test_another_text_is_no_certificate(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_certificate(text)


def test_a_list_of_another_authority_is_refused() -> None:
    with pytest.raises(ConfigError, match="of another run"):
        parse_revocations(revocations_text(LIST), Authority(b"b" * 32).public)


@given(st.text(max_size=200) | st.text("QUJD+/=# \n", max_size=200))
def test_no_text_raises_another_error(text: str) -> None:
    for read in (read_armour, parse_certificate, lambda text: parse_revocations(text, RUN.public)):
        with contextlib.suppress(ConfigError):
            read(text)
