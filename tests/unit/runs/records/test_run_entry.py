"""Entries of the peers of one run, and the sentence for peers that cannot meet."""

from __future__ import annotations

import pytest
from msgspec import structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key, why_apart
from tests.unit.group.samples import SIGNERS, signed

MINE = RunEntry(
    schema_hash=b"\1" * 32,
    tensors=97,
    elements=1000,
    codec="blockwise8:64",
    group_size=4,
    rule="",
    aggregation="",
)


def entry(**changes: object) -> RunEntry:
    return structs.replace(MINE, **changes)


def test_the_bytes_never_change() -> None:
    assert run_key("albert-base").hex() == "be12e0964f7bbf7d681ac421132d1bd018bd1b90e834506b8a7c9b9920396900"
    assert MINE.encode().hex() == "9803c420" + "01" * 32 + "61cd03e8ad" + b"blockwise8:64".hex() + "04a0a0"
    assert RunEntry.decode(MINE.encode()) == MINE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((2, b"\1" * 32, 97, 1000, "fp32", 4, "", ""), "Invalid value 2"),
        ((3, b"\1" * 31, 97, 1000, "fp32", 4, "", ""), "length >= 32"),
        ((3, b"\1" * 32, 97, 1000, "", 4, "", ""), "without a codec"),
        ((3, b"\1" * 32, 97, 1000, "x" * 65, 4, "", ""), "without a codec"),
        ((3, b"\1" * 32, 97, 1000, "fp32\n\x1b[2J", 4, "", ""), "without a codec"),
        ((3, b"\1" * 32, 0, 1000, "fp32", 4, "", ""), ">= 1"),
        ((3, b"\1" * 32, 97, -1, "fp32", 4, "", ""), ">= 0"),
        ((3, b"\1" * 32, 97, 2**34 + 1, "fp32", 4, "", ""), "<= 17179869184"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 1, "", ""), ">= 2"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 65, "", ""), "<= 64"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, ""), "length 8"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, "x" * 513, ""), "rule is too long"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, "a\x1b[2J", ""), "rule is too long, or not printable"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, b"rule", ""), "got `bytes`"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, "", "x" * 513), "rule is too long"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, "", "a\x1b[2J"), "rule is too long, or not printable"),
        ((3, b"\1" * 32, 97, 1000, "fp32", 4, "", b"median"), "got `bytes`"),
        ((3, b"\1" * 32, 97.0, 1000, "fp32", 4, "", ""), "got `float`"),
    ],
)
def test_malformed_entry_is_refused(fields: tuple[object, ...], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        RunEntry.decode(pack(*fields))


@pytest.mark.parametrize("rule", ["", "x" * 512, "tags ['gpu'] bandwidth 0x0.0p+0", "Übung"])
def test_rule_survives_encoding(rule: str) -> None:
    assert RunEntry.decode(entry(rule=rule).encode()) == entry(rule=rule)


def test_malformed_entry_hides_no_other() -> None:
    records = [signed(0, MINE.encode()), signed(1, b"nonsense"), signed(2, b""), signed(3, MINE.encode())]
    assert read_entries(records) == {SIGNERS[0].peer_id: MINE, SIGNERS[3].peer_id: MINE}


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ([], ""),
        ([MINE, MINE], ""),
        ([entry(group_size=8)], ""),
        ([entry(schema_hash=b"\2" * 32, tensors=98)], "1 peer of this run averages 98 tensors, you have 97"),
        (
            [entry(schema_hash=b"\2" * 32, tensors=98)] * 12,
            "12 peers of this run average 98 tensors, you have 97",
        ),
        (
            [entry(schema_hash=b"\2" * 32, elements=999), MINE],
            "1 peer of this run averages 999 elements, you have 1000",
        ),
        (
            [entry(schema_hash=b"\2" * 32)] * 2,
            "2 peers of this run average tensors of other names, shapes or dtypes than yours",
        ),
        ([entry(codec="fp32")], "1 peer of this run averages with the codec fp32, you with blockwise8:64"),
        ([entry(rule="fraction")], "1 peer of this run averages with another participation rule than yours"),
        (
            [entry(codec="fp32", rule="fraction")],
            "1 peer of this run averages with another participation rule than yours",
        ),
        (
            [entry(aggregation="median")] * 2,
            "2 peers of this run average by median, you by the weighted mean",
        ),
        (
            [entry(aggregation="median topology:star")],
            "1 peer of this run averages with the topology star, you with butterfly",
        ),
        (
            [entry(codec="fp32")] + [entry(schema_hash=b"\2" * 32, tensors=1)] * 2,
            "2 peers of this run average 1 tensors, you have 97; "
            "1 peer of this run averages with the codec fp32, you with blockwise8:64",
        ),
    ],
)
def test_why_peers_of_one_run_do_not_meet(others: list[RunEntry], sentence: str) -> None:
    assert why_apart(MINE, others) == sentence


def test_three_most_common_kinds_are_named() -> None:
    others = [entry(codec=f"int8:{size}") for size in (64, 128, 256, 512) for _ in range(size)]
    sentence = why_apart(MINE, others)
    assert sentence.count(";") == 2
    assert "int8:64," not in sentence
    assert sentence.startswith("512 peers")
