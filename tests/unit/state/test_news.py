"""The records of states: they survive encoding, and hostile bytes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack, unpack
from p2pavg.runs.records.board import MAX_ENTRY_BYTES
from p2pavg.state.news import (
    MAX_ADDRESSES,
    MAX_EPOCH,
    MAX_LOG,
    MAX_SNAPSHOT_BYTES,
    SnapshotOffer,
    StateNews,
    encode_news,
    read_all,
    read_news,
)

OFFER = SnapshotOffer(epoch=7, state=b"s" * 32, root=b"r" * 32, size=123)
NEWS = StateNews(
    wants=False,
    epoch=9,
    snapshot=OFFER,
    log=(b"a" * 32, b"b" * 32),
    addresses=("/ip4/203.0.113.7/tcp/40001",),
)

digests = st.binary(min_size=32, max_size=32)


@st.composite
def every_news(draw: st.DrawFn) -> StateNews:
    epoch = draw(st.integers(0, MAX_EPOCH))
    log = draw(st.lists(digests, max_size=min(epoch, 4)))
    offer = None
    if draw(st.booleans()):
        offer = SnapshotOffer(
            epoch=draw(st.integers(0, epoch)),
            state=draw(digests),
            root=draw(digests),
            size=draw(st.integers(1, MAX_SNAPSHOT_BYTES)),
        )
    return StateNews(wants=draw(st.booleans()), epoch=epoch, snapshot=offer, log=tuple(log))


@given(every_news())
@example(NEWS)
def test_news_survive_encoding(news: StateNews) -> None:
    assert read_news(encode_news(news)) == news


def test_the_longest_news_fit_into_a_record() -> None:
    addresses = tuple(f"/ip4/203.0.113.{index}/tcp/40001/{'x' * 230}"[:255] for index in range(MAX_ADDRESSES))
    log = tuple(index.to_bytes(32, "big") for index in range(MAX_LOG))
    offer = replace(OFFER, epoch=MAX_EPOCH, size=MAX_SNAPSHOT_BYTES)
    news = StateNews(wants=True, epoch=MAX_EPOCH, snapshot=offer, log=log, addresses=addresses)
    assert len(encode_news(news)) <= MAX_ENTRY_BYTES - 500  # the rest of a record


@given(st.binary(max_size=200))
@example(b"")
@example(encode_news(NEWS) + b"\0")
@example(encode_news(NEWS)[:-1])
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    try:
        news = read_news(value)
    except RemoteProtocolError:
        return
    assert encode_news(news) == value


@given(st.integers(0, len(encode_news(NEWS)) - 1), st.integers(1, 255))
def test_damaged_news_are_read_or_refused(position: int, change: int) -> None:
    damaged = bytearray(encode_news(NEWS))
    damaged[position] ^= change
    try:
        news = read_news(bytes(damaged))
    except RemoteProtocolError:
        return
    assert news != NEWS


FIELDS = unpack(encode_news(NEWS), int, bool, int, tuple, tuple, tuple)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        *[(0, version) for version in (0, 2, -1, True, 1.0, None)],
        *[(1, wants) for wants in (0, 1, "", None)],
        *[(2, epoch) for epoch in (-1, MAX_EPOCH + 1, 1, True, 9.0, "9", None)],
        (2, 6),  # before its snapshot
        *[(3, packed) for packed in ((7,), (7, b"s" * 32, b"r" * 32), b"", None, (7, "s", "r", 1))],
        *[(3, (epoch, b"s" * 32, b"r" * 32, 1)) for epoch in (-1, 10, 2**63, 7.0, True)],
        *[(3, (7, b"s" * 32, b"r" * 32, size)) for size in (0, -1, MAX_SNAPSHOT_BYTES + 1, 1.0)],
        *[(3, (7, b"s" * length, b"r" * 32, 1)) for length in (0, 31, 33)],
        *[(3, (7, b"s" * 32, b"r" * length, 1)) for length in (0, 31, 33)],
        *[(4, log) for log in ((b"a" * 31,), ("a" * 32,), (1,), ((b"a",),), b"a" * 32)],
        (4, (b"a" * 32,) * 10),  # more than it has taken
        *[
            (5, addresses)
            for addresses in ((b"a",), (1,), ("nonsense",), ("/ip4/203.0.113.7/tcp/1",) * 5, "a")
        ],
    ],
)
def test_field_out_of_range_is_refused(position: int, value: Any) -> None:
    fields = list(FIELDS)
    fields[position] = value
    with pytest.raises(RemoteProtocolError):
        read_news(pack(*fields))


def test_a_long_log_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        StateNews(wants=False, epoch=1000, log=(b"a" * 32,) * (MAX_LOG + 1))


def test_malformed_news_of_one_peer_hide_only_that_peer() -> None:
    assert read_all({"a": encode_news(NEWS), "b": b"", "c": b"nonsense"}) == {"a": NEWS}


@pytest.mark.parametrize(
    ("epoch", "expected"), [(7, None), (8, b"a" * 32), (9, b"b" * 32), (10, None), (-1, None), (0, None)]
)
def test_averages_are_found_by_the_update_that_they_led_to(epoch: int, expected: bytes | None) -> None:
    assert NEWS.average(epoch) == expected


def test_a_log_follows_on_a_snapshot_only_without_a_gap() -> None:
    assert NEWS.follows
    assert not replace(NEWS, log=NEWS.log[1:]).follows
    assert not replace(NEWS, snapshot=None).follows
    assert replace(NEWS, epoch=7, log=()).follows
