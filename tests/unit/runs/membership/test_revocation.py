"""Lists of revoked certificates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.runs.membership.revocation import DOMAIN, MAX_REVOKED, no_revocations, read_revocations, revoke
from p2pavg_dht import MAX_VALUE_BYTES
from tests.unit.runs.membership.runs import Authority

RUN = Authority()
IDENTIFIERS = [number.to_bytes(16, "big") for number in range(MAX_REVOKED + 1)]


def test_a_list_is_read_back() -> None:
    revocations = revoke(RUN.sign, authority=RUN.public, number=3, identifiers=IDENTIFIERS[:2])
    assert read_revocations(revocations.encode(), RUN.public) == revocations


def test_the_longest_list_fits_into_a_record_with_its_envelope() -> None:
    revocations = revoke(RUN.sign, authority=RUN.public, number=2**53, identifiers=IDENTIFIERS[:MAX_REVOKED])
    assert len(revocations.encode()) <= MAX_VALUE_BYTES - 768
    assert read_revocations(revocations.encode(), RUN.public) == revocations


def test_a_list_of_an_earlier_version_is_refused() -> None:
    """Lists of version 1 held serials, which delegates choose."""
    joined = b"".join(IDENTIFIERS[:2])
    with pytest.raises(RemoteProtocolError, match="no RevocationList"):
        read_revocations(pack(2, pack(RUN.public, 3, joined), bytes(64)), RUN.public)


@pytest.mark.parametrize("joined", [IDENTIFIERS[1] + IDENTIFIERS[0], 2 * IDENTIFIERS[1], IDENTIFIERS[1][:15]])
def test_identifiers_out_of_order_are_refused_although_they_are_signed(joined: bytes) -> None:
    """A list has one encoding."""
    unsigned = pack(3, RUN.public, 1, joined, b"")
    signature = RUN.sign(DOMAIN + unsigned)
    with pytest.raises(RemoteProtocolError, match="out of order, or of another length"):
        read_revocations(pack(3, RUN.public, 1, joined, signature), RUN.public)


def test_no_list_can_have_the_number_of_none() -> None:
    assert no_revocations(RUN.public).number == 0
    with pytest.raises(ValueError, match="number must be from 1"):
        revoke(RUN.sign, authority=RUN.public, number=0, identifiers=[])


def test_a_list_that_is_too_long_is_not_signed() -> None:
    with pytest.raises(ValueError, match="at most 200 identifiers, not 201"):
        revoke(RUN.sign, authority=RUN.public, number=1, identifiers=IDENTIFIERS)


def test_a_list_of_another_run_or_signer_is_refused() -> None:
    other = Authority(b"b" * 32)
    theirs = revoke(other.sign, authority=other.public, number=1, identifiers=IDENTIFIERS[:1])
    with pytest.raises(RemoteProtocolError, match="another run"):
        read_revocations(theirs.encode(), RUN.public)
    forged = revoke(other.sign, authority=RUN.public, number=1, identifiers=IDENTIFIERS[:1])
    with pytest.raises(RemoteProtocolError, match="has not signed"):
        read_revocations(forged.encode(), RUN.public)


GENUINE = revoke(RUN.sign, authority=RUN.public, number=7, identifiers=IDENTIFIERS[:3]).encode()


@given(st.integers(0, len(GENUINE) - 1), st.integers(1, 255))
def test_a_list_with_any_changed_byte_is_refused(position: int, change: int) -> None:
    changed = bytearray(GENUINE)
    changed[position] ^= change
    with pytest.raises(RemoteProtocolError):
        read_revocations(bytes(changed), RUN.public)


@given(st.binary(max_size=4000))
def test_any_bytes_are_refused_without_another_exception(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_revocations(data, RUN.public)
