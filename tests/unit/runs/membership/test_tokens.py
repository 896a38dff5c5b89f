"""Tokens and links: what a delegate made is read back, and everything else is refused."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.runs.membership.certificate import MemberCertificateError, Role, refusal
from p2pavg.runs.membership.tokens import (
    MAC_BYTES,
    MAX_LINK_CHARS,
    MAX_TOKEN_BYTES,
    InvitationLink,
    Token,
    certify,
    make_token,
    parse_link,
    read_token,
    token_key,
)
from tests.unit.runs.membership.runs import NOW, Authority, signer

RUN = Authority()
DELEGATE, NEWCOMER = signer(3), signer(4)
OWN = RUN.certify(DELEGATE.peer_id, roles=[*Role], max_weight=50.0, expires=NOW + 1000.0)
KEY = token_key(bytes([3]) * 32, RUN.public)
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{DELEGATE.peer_id}"


def token(**changed: Any) -> Token:
    fields: dict[str, Any] = {
        "serial": bytes(16),
        "roles": frozenset([Role.CONTRIBUTOR]),
        "max_weight": 10.0,
        "begins": NOW,
        "expires": NOW + 100.0,
        "certificate_expires": NOW + 500.0,
    }
    return Token(**(fields | changed))


times = st.floats(0.0, 2e9)
tokens = st.builds(
    Token,
    serial=st.binary(min_size=16, max_size=16),
    roles=st.frozensets(st.sampled_from(Role)),
    max_weight=st.floats(0.0, 1e15),
    begins=times,
    expires=times,
    certificate_expires=times,
)


@given(tokens)
@example(token(roles=frozenset(Role)))
def test_a_token_is_read_back(given_token: Token) -> None:
    data = make_token(KEY, given_token)
    assert read_token(KEY, data) == given_token
    assert len(data) <= MAX_TOKEN_BYTES


@given(st.integers(0, len(make_token(KEY, token())) * 8 - 1))
def test_a_token_with_one_changed_bit_is_refused(bit: int) -> None:
    data = bytearray(make_token(KEY, token()))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        read_token(KEY, bytes(data))


def test_a_token_is_of_one_delegate_and_one_run() -> None:
    data = make_token(KEY, token())
    for seed, authority in ((bytes([4]) * 32, RUN.public), (bytes([3]) * 32, bytes(32))):
        with pytest.raises(RemoteProtocolError, match="no token of this delegate"):
            read_token(token_key(seed, authority), data)


@given(st.binary(max_size=200))
def test_no_bytes_raise_another_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_token(KEY, data)


scalars = st.integers(-5, 5) | st.text(max_size=9) | st.floats() | st.binary(max_size=16)
bodies = st.lists(scalars | st.lists(scalars, max_size=3), max_size=8).map(lambda fields: pack(*fields))


@given(bodies | st.binary(max_size=100))
@example(pack(1, bytes(16), (5,), 1.0, 1.0, 1.0, 1.0))
@example(pack(1, bytes(16), ("king",), 1.0, 1.0, 1.0, 1.0))
def test_no_body_of_the_delegate_itself_raises_another_error(body: bytes) -> None:
    """A later version of p2pavg may have made it with the same key."""
    mac = hmac.new(KEY, body, hashlib.sha256).digest()[:MAC_BYTES]
    with contextlib.suppress(RemoteProtocolError):
        read_token(KEY, mac + body)


class TestCertify:
    def test_the_certificate_is_valid_and_always_the_same(self) -> None:
        first, second = (certify(token(), NEWCOMER.peer_id, OWN, DELEGATE.sign) for _ in range(2))
        assert first.data == second.data
        assert (first.serial, first.expires) == (bytes(16), NOW + 500.0)
        assert refusal(first.data, authority=RUN.public, peer_id=NEWCOMER.peer_id, now=NOW + 1.0) is None

    def test_it_ends_with_the_delegates_own_certificate(self) -> None:
        long = certify(token(certificate_expires=NOW + 1e6), NEWCOMER.peer_id, OWN, DELEGATE.sign)
        assert long.expires == OWN.expires

    def test_it_begins_with_the_delegates_own_certificate(self) -> None:
        renewed = RUN.certify(DELEGATE.peer_id, roles=[*Role], not_before=NOW + 50.0, expires=NOW + 2000.0)
        assert certify(token(), NEWCOMER.peer_id, renewed, DELEGATE.sign).not_before == NOW + 50.0

    @pytest.mark.parametrize(
        "changed", [{"max_weight": 51.0}, {"roles": frozenset([Role.DELEGATE])}, {"roles": frozenset()}]
    )
    def test_it_grants_no_more_than_the_delegate_may(self, changed: dict[str, Any]) -> None:
        with pytest.raises(MemberCertificateError):
            certify(token(**changed), NEWCOMER.peer_id, OWN, DELEGATE.sign)


def test_a_link_is_read_back() -> None:
    link = InvitationLink(ADDRESS, make_token(KEY, token()))
    assert parse_link(link.text) == link
    assert link.delegate == DELEGATE.peer_id
    assert not set(link.text[7:]) & set("+/= ")


def test_the_longest_link_is_within_the_limit() -> None:
    end = f"/tcp/1/p2p/{DELEGATE.peer_id}"
    longest = InvitationLink(f"/dns4/{'a' * (256 - 6 - len(end))}{end}", bytes(MAX_TOKEN_BYTES))
    assert len(longest.address) == 256
    assert len(longest.text) <= MAX_LINK_CHARS
    assert parse_link(longest.text) == longest


def as_link(*fields: Any) -> str:
    return "p2pavg:" + base64.urlsafe_b64encode(pack(*fields)).decode().rstrip("=")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with p2pavg:"),
        ("https://example.org", "begins with p2pavg:"),
        ("p2pavg:" + "A" * MAX_LINK_CHARS, "at most 640 characters"),
        ("p2pavg:", "the link is damaged"),
        ("p2pavg:ä", "the link is damaged"),
        ("p2pavg:A", "the link is damaged"),
        (InvitationLink(ADDRESS, b"t").text[:-4], "the link is damaged"),
        (as_link(2, ADDRESS, b""), "of another version of p2pavg"),
        (as_link(1, "/ip4/203.0.113.7/tcp/4001", b""), "the link is damaged"),
        (as_link(1, "/a" * 128 + ADDRESS, b""), "the link is damaged"),
        (as_link(1, ADDRESS, bytes(MAX_TOKEN_BYTES + 1)), "the link is damaged"),
        (as_link(1, 5, b""), "the link is damaged"),
    ],
)
def test_another_text_is_no_link(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_link(text)


@given(st.text(max_size=100) | st.text("ABCabc012-_=+/", max_size=100))
def test_no_text_raises_another_error(text: str) -> None:
    for given_text in (text, f"p2pavg:{text}"):
        with pytest.raises(ConfigError):
            parse_link(given_text)


def test_a_token_is_in_no_repr_of_a_link() -> None:
    assert "token" not in repr(InvitationLink(ADDRESS, b"secret"))
    assert replace(InvitationLink(ADDRESS, b"secret"), token=b"") != InvitationLink(ADDRESS, b"secret")


def test_a_token_of_whole_numbers_is_read() -> None:
    roles = frozenset({Role.CONTRIBUTOR})
    token = Token(serial=bytes(16), roles=roles, max_weight=5, begins=1, expires=2, certificate_expires=3)
    assert read_token(KEY, make_token(KEY, token)) == token
