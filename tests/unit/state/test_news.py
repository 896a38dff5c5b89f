"""The records of states: they survive encoding, and hostile bytes are refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.runs.records.board import MAX_ENTRY_BYTES
from p2pavg.state.choice import (
    MAX_ADDRESSES,
    MAX_EPOCH,
    MAX_LOG,
    MAX_SNAPSHOT_BYTES,
    SnapshotOffer,
    StateNews,
)

OFFER = SnapshotOffer(epoch=7, state=b"s" * 32, root=b"r" * 32, size=123)
NEWS = StateNews(
    wants=False,
    epoch=9,
    snapshot=OFFER,
    log=(b"a" * 32, b"b" * 32),
    addresses=("/ip4/203.0.113.7/tcp/40001",),
)


def test_the_longest_news_fit_into_a_record() -> None:
    addresses = tuple(f"/ip4/203.0.113.{index}/tcp/40001/{'x' * 230}"[:255] for index in range(MAX_ADDRESSES))
    log = tuple(index.to_bytes(32, "big") for index in range(MAX_LOG))
    offer = replace(OFFER, epoch=MAX_EPOCH, size=MAX_SNAPSHOT_BYTES)
    news = StateNews(wants=True, epoch=MAX_EPOCH, snapshot=offer, log=log, addresses=addresses)
    assert len(news.encode()) <= MAX_ENTRY_BYTES - 500  # the rest of a record


LOG = (b"a" * 32, b"b" * 32)
FIELDS = (2, False, 9, (7, b"s" * 32, b"r" * 32, 123), LOG, ("/ip4/203.0.113.7/tcp/40001",))


def test_the_bytes_never_change() -> None:
    assert NEWS.encode() == pack(*FIELDS)
    assert StateNews.decode(pack(*FIELDS)) == NEWS


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 1),
        *[(2, epoch) for epoch in (-1, MAX_EPOCH + 1, 1)],
        (2, 6),  # before its snapshot
        *[(3, (epoch, b"s" * 32, b"r" * 32, 1)) for epoch in (-1, 10, 2**63)],
        *[(3, (7, b"s" * 32, b"r" * 32, size)) for size in (0, -1, MAX_SNAPSHOT_BYTES + 1)],
        (3, (7, b"s" * 31, b"r" * 32, 1)),
        (3, (7, b"s" * 32, b"r" * 33, 1)),
        (4, (b"a" * 31,)),
        (4, (b"a" * 32,) * 10),  # more than it has taken
        *[(5, addresses) for addresses in (("nonsense",), ("/ip4/203.0.113.7/tcp/1",) * 5)],
    ],
)
def test_a_field_out_of_range_is_refused(position: int, value: Any) -> None:
    fields = list(FIELDS)
    fields[position] = value
    with pytest.raises(RemoteProtocolError):
        StateNews.decode(pack(*fields))


def test_a_long_log_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        StateNews.decode(pack(2, False, 1000, None, (b"a" * 32,) * (MAX_LOG + 1), ()))


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
