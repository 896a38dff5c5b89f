"""A status is read back as it was, and bytes of strangers are a harmless status or an error."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Message, pack
from p2pavg.telemetry.events import RoundKind
from p2pavg.telemetry.status import (
    MAX_STATUS_BYTES,
    PeerStatus,
    RoundClaim,
    encode_status,
    harmless,
    key_of,
    read_status,
)
from tests.unit.telemetry.statuses import FULL, statuses

GOLDEN = "4c638cd8131ce19b289732b137ccbdd402775771f73352d436f64846e06b4139"


def with_fields(message: Message, **wrong: Any) -> list[Any]:
    """Return the fields of a message as a hostile peer writes them."""
    fields: list[Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    tagged = len(fields) - len(message.__struct_fields__)
    for name, value in wrong.items():
        fields[tagged + message.__struct_fields__.index(name)] = value
    return fields


def written(status: PeerStatus, **wrong: Any) -> bytes:
    return msgspec.msgpack.encode(with_fields(status, **wrong))


def test_golden_bytes() -> None:
    """A change of the format needs another version, since peers of the old one would not read it."""
    assert sha256(encode_status(FULL)).hexdigest() == GOLDEN
    assert encode_status(PeerStatus())[:4].hex() == "dc002202"
    for status in (FULL, PeerStatus()):
        assert read_status(encode_status(status)) == status


@settings(max_examples=75, deadline=None)
@given(statuses)
def test_any_status_fits_and_is_read_back_but_for_its_oldest_rounds_and_points(status: PeerStatus) -> None:
    packed = encode_status(status)
    assert len(packed) <= MAX_STATUS_BYTES
    read = read_status(packed)
    assert status.rounds[: len(read.rounds)] == read.rounds
    assert status.history[len(status.history) - len(read.history) :] == read.history
    shortened = ("rounds", "history", "lanes", "streams", "relayed")
    same = {name: getattr(status, name) for name in shortened}
    assert replace(read, **same) == status


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=4)))
def test_bytes_of_strangers_are_a_status_or_an_error(given_: bytes | tuple[int, bytes]) -> None:
    packed = encode_status(FULL)
    if isinstance(given_, tuple):
        at, changed = given_
        value = packed[:at] + changed + packed[at + len(changed) :]
    else:
        value = given_
    try:
        read = read_status(value)
    except RemoteProtocolError:
        return
    texts = [read.name, read.software, read.role, read.reach, read.reach_sentence, read.drift, *read.roles]
    texts += [name for name, _ in read.metrics] + [claim.reason for claim in read.rounds]
    assert all(text.isprintable() for text in texts)


WRONG: list[tuple[str, object]] = [
    # Texts that are too long, or that a terminal would obey.
    *[("name", "x" * 41), ("name", "\x1b[2J"), ("name", "right-to-left \u202e"), ("name", "two\nlines")],
    *[("reach_sentence", "\x07"), ("drift", "y" * 201), ("software", "z" * 33), ("roles", ("a",) * 9)],
    # Numbers and keys that cannot be.
    *[("epoch", -1), ("epoch", 2**53 + 1), ("lineage", b"123"), ("uptime", math.inf), ("total_sent", -1)],
    *[("samples_per_second", math.nan), ("samples_per_second", -1.0), ("lanes", (b"short",))],
    # Metrics without a name or a value, a history out of order, and too many of anything.
    *[
        ("metrics", (("loss", math.inf),)),
        ("metrics", (("lo\x00ss", 1.0),)),
        ("metrics", (("loss", 1.0),) * 17),
    ],
    *[("history", ((2, 1.0), (1, 1.0))), ("history", tuple((at, 1.0) for at in range(33)))],
    *[("rounds", FULL.rounds[:1] * 7), ("excluded", (bytes(8),) * 9)],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_statuses_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        read_status(written(FULL, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("group", b"123"), ("duration", -1.0), ("sent", -1), ("members", 129), ("contributors", 65)],
        *[("reason", "\x9b31m"), ("lost", (b"short",))],
    ],
)
def test_rounds_out_of_range_are_refused(name: str, value: object) -> None:
    good = RoundClaim(result=RoundKind.FAILED, ended=1.0, duration=1.0)
    assert read_status(PeerStatus(rounds=(good,)).encode()).rounds == (good,)
    with pytest.raises(RemoteProtocolError):
        read_status(written(PeerStatus(), rounds=(with_fields(good, **{name: value}),)))


def test_own_numbers_out_of_range_are_not_published() -> None:
    with pytest.raises(RemoteProtocolError, match="<= "):
        encode_status(replace(FULL, epoch=2**53 + 1))
    with pytest.raises(ValueError, match="not printable"):
        replace(FULL, name="two\nlines")
    assert read_status(encode_status(replace(FULL, uptime=3))).uptime == 3.0


def test_status_of_another_version_or_longer_than_allowed_is_refused() -> None:
    packed = encode_status(FULL)
    with pytest.raises(RemoteProtocolError, match="Invalid value 1"):
        read_status(packed[:3] + b"\x01" + packed[4:])
    with pytest.raises(RemoteProtocolError, match="5000 bytes"):
        read_status(bytes(5000))
    with pytest.raises(RemoteProtocolError):
        read_status(pack(1))


def test_text_for_others_has_no_control_characters() -> None:
    assert harmless("a\x1b[31m\nb" + "c" * 50, 10) == "a [31m bcc"
    assert key_of("one") != key_of("two")
    assert len(key_of("one")) == 8
