"""Statuses for tests, and strategies that make them."""

from __future__ import annotations

from hypothesis import strategies as st

from p2pavg.telemetry.events import RoundKind
from p2pavg.telemetry.status import (
    MAX_BYTES,
    MAX_EPOCH,
    MAX_HISTORY,
    MAX_SENTENCE_CHARS,
    Activity,
    PeerStatus,
    RoundClaim,
    TransferClaim,
    key_of,
)

FULL = PeerStatus(
    name="garage, 3090",
    software="0.2.0",
    role="contributor",
    roles=("auxiliary", "contributor"),
    expires=1_900_000_000.0,
    uptime=61.5,
    reach="mapped",
    reach_sentence="port 4001 is mapped by UPnP",
    upload_mbps=40.0,
    download_mbps=250.0,
    activity=Activity.WAITING,
    epoch=7,
    lineage=bytes(range(8)),
    marks=((4, bytes(8)),),
    samples=32.0,
    samples_per_second=410.5,
    grad_norm=1.25,
    learning_rate=3e-4,
    metrics=(("loss", 2.5), ("samples_per_second", 400.0)),
    history_of="loss",
    history=((1, 4.0), (7, 2.5)),
    rounds=(
        RoundClaim(
            group=b"\x01" * 8,
            result=RoundKind.SUCCESS,
            ended=1_800_000_000.0,
            duration=3.5,
            exchange_duration=1.5,
            sent=10_000,
            received=12_000,
            members=4,
            contributors=3,
            clipped=1,
            lost=(key_of("lost"),),
        ),
        RoundClaim(
            result=RoundKind.NO_PEERS, ended=1_799_999_990.0, duration=30.0, reason="no other peer is ready"
        ),
    ),
    lanes=(key_of("one"), key_of("two")),
    streams=(key_of("three"),),
    transfers=(TransferClaim(is_upload=False, done=5, total=10, bytes_per_second=2.5, peers=2),),
    drift="1 peer says that it holds other parameters",
    excluded=(key_of("liar"),),
    total_rounds=12,
    total_failures=2,
    total_sent=123_456,
    total_received=234_567,
    total_samples=99.0,
)

HOSTILE_TEXTS = (
    "[/b] no",
    "[link=file:///x]no",
    ":skull:",
    "<script>alert(1)</script>",
    '"} 1',
    '{run="x"} 1',
    "\\n",
    "# HELP x y",
    "%s {0}",
    "../epoch",
)
"""Texts that a peer may send: they are printable, and words of a language that some place speaks which shows them."""

printable = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
keys = st.binary(min_size=8, max_size=8)
amounts = st.floats(0, 1e9)
numbers = st.floats(-1e99, 1e99)
names = st.text(printable, min_size=1, max_size=8)
counts = st.integers(0, MAX_BYTES)
rounds = st.builds(
    RoundClaim,
    group=st.sampled_from([b""]) | keys,
    result=st.sampled_from(RoundKind),
    ended=amounts,
    duration=amounts,
    exchange_duration=amounts,
    sent=counts,
    received=counts,
    members=st.integers(0, 128),
    contributors=st.integers(0, 64),
    clipped=st.integers(0, 64),
    lost=st.lists(keys, max_size=8).map(tuple),
    reason=st.text(printable, max_size=120),
)
statuses = st.builds(
    PeerStatus,
    name=st.text(printable, max_size=40),
    software=st.text(printable, max_size=32),
    role=st.text(printable, max_size=32),
    roles=st.lists(st.text(printable, max_size=32), max_size=8).map(tuple),
    reach_sentence=st.text(printable, max_size=MAX_SENTENCE_CHARS),
    drift=st.text(printable, max_size=MAX_SENTENCE_CHARS),
    uptime=amounts,
    activity=st.sampled_from(Activity),
    epoch=st.integers(0, MAX_EPOCH),
    lineage=st.sampled_from([b""]) | keys,
    marks=st.lists(st.tuples(st.integers(0, MAX_EPOCH), keys), max_size=4).map(tuple),
    metrics=st.lists(st.tuples(names, numbers), max_size=16).map(tuple),
    history_of=st.sampled_from([""]) | names,
    history=st.dictionaries(st.integers(0, MAX_EPOCH), numbers, max_size=MAX_HISTORY).map(
        lambda points: tuple(sorted(points.items()))
    ),
    rounds=st.lists(rounds, max_size=6).map(tuple),
    lanes=st.lists(keys, max_size=128).map(tuple),
    streams=st.lists(keys, max_size=128).map(tuple),
    relayed=st.lists(keys, max_size=128).map(tuple),
    excluded=st.lists(keys, max_size=8).map(tuple),
    total_sent=counts,
)
