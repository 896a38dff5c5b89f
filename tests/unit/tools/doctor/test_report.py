"""The two forms of a report, and what a finding must have."""

from __future__ import annotations

import json

import pytest

from p2pavg.tools.doctor.findings import (
    ORDER,
    Finding,
    Level,
    as_json,
    as_table,
    fault,
    in_order,
    not_known,
    ok,
    warning,
)

FINDINGS = [
    ok("key file", "peer.key: 12D3"),
    warning("bootstrap", "/ip4/203.0.113.7/tcp/4001 is not reached", "it refuses", "start it"),
    fault("clock", "this machine's clock is wrong", "it is 600 s behind 2 peers", "set the clock"),
]


def test_table() -> None:
    assert as_table(FINDINGS, 70) == [
        "key file      ok      peer.key: 12D3",
        "bootstrap     WARNING /ip4/203.0.113.7/tcp/4001 is not reached",
        "                      cause: it refuses",
        "                      remedy: start it",
        "clock         FAULT   this machine's clock is wrong",
        "                      cause: it is 600 s behind 2 peers",
        "                      remedy: set the clock",
        "",
        "1 fault and 1 warning",
    ]


def test_long_sentences_are_wrapped_and_addresses_are_not() -> None:
    address = "/ip4/203.0.113.7/tcp/4001/p2p/" + "x" * 60
    lines = as_table([ok("bootstrap", f"{address} answered in 0.01 s, which is {'very ' * 10}fast")], 60)
    assert any(address in line for line in lines)
    assert all(len(line) <= 60 for line in lines if address not in line)


def test_a_strangers_text_moves_no_cursor() -> None:
    (line, _, _) = as_table([ok("run", "a\x1b[2Jb\r\nc")], 80)
    assert line.endswith("a?[2Jb??c")


def test_json() -> None:
    read = json.loads(as_json(FINDINGS, 1.234))
    assert read == {
        "version": 1,
        "faults": 1,
        "seconds": 1.23,
        "findings": [
            {
                "name": each.name,
                "level": each.level,
                "what": each.what,
                "cause": each.cause,
                "remedy": each.remedy,
            }
            for each in FINDINGS
        ],
    }


def test_findings_are_listed_in_one_order() -> None:
    found = [not_known(name, name) for name in reversed(ORDER)] + [ok("key file", "again")]
    assert [each.name for each in in_order(found)] == ["key file", *ORDER]
    assert [each.level for each in in_order(found)][:2] == [Level.NOTE, Level.OK]


@pytest.mark.parametrize("level", [Level.WARNING, Level.FAULT])
def test_a_fault_has_a_cause_and_a_remedy(level: Level) -> None:
    for cause, remedy in (("", "do"), ("so", "")):
        with pytest.raises(ValueError, match="needs a cause and a remedy"):
            Finding("clock", level, "wrong", cause, remedy)


def test_a_name_that_no_check_has() -> None:
    with pytest.raises(ValueError, match="no check has the name"):
        ok("clocks", "right")
