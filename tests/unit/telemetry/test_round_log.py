"""The one line of a round in the log."""

from __future__ import annotations

import logging

import pytest

from p2pavg.base.formats import in_bytes
from p2pavg.telemetry.events import Progressed, RoundEnded, RoundKind, Way
from p2pavg.telemetry.round_log import log_round, round_sentence

PEERS = tuple(f"12D3KooWpeer{number:06}" for number in range(5))


def ended(result: RoundKind = RoundKind.SUCCESS, **changes: object) -> RoundEnded:
    given: dict[str, object] = {
        "time": 1.0,
        "run_id": "lab",
        "result": result,
        "duration": 2.345,
        "group_id": "0a1b2c3d" * 8,
        "members": PEERS,
        "contributors": PEERS[:4],
        "sent": {Way.LANE: 12_000_000, Way.STREAM: 345_000},
        "received": {Way.LANE: 999},
        **changes,
    }
    return RoundEnded(**given)  # type: ignore[arg-type]


def test_a_round_is_one_sentence_with_size_duration_and_bytes() -> None:
    assert round_sentence(ended()) == (
        "averaged 4 contributions of 5 members in 2.3 s; 12.3 MB sent, 999 B received"
    )


def test_lost_and_clipped_members_are_named_with_reasons() -> None:
    sentence = round_sentence(
        ended(lost={PEERS[4]: f"{PEERS[4]} was lost: connection refused"}, clipped=PEERS[:1])
    )
    assert sentence.endswith("; lost …000004 (connection refused); clipped …000000")


def test_many_lost_members_are_counted() -> None:
    sentence = round_sentence(ended(lost=dict.fromkeys(PEERS, "x" * 500)))
    assert sentence.endswith(" and 2 more")
    assert len(sentence) < 600


def test_rounds_without_a_result_say_why() -> None:
    failed = ended(RoundKind.FAILED, code="timed_out", reason="too slow")
    assert round_sentence(failed) == "the round of 5 members failed after 2.3 s (timed_out): too slow"
    alone = ended(RoundKind.NO_PEERS, reason="no other peer is there")
    assert round_sentence(alone) == "no round after 2.3 s: no other peer is there"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e6, "2.5 MB"), (3e13, "30.0 TB")]
)
def test_bytes_in_sensible_units(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_one_line_a_round_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    other = Progressed(
        time=1.0,
        run_id="lab",
        epoch=1,
        lineage=b"",
        samples=1.0,
        samples_per_second=1.0,
        waiting=False,
        follows=False,
    )
    with caplog.at_level(logging.INFO, "p2pavg.rounds"):
        log_round(ended())
        log_round(other)
    [line] = caplog.records
    assert (line.levelno, line.run, line.round, line.result) == (20, "lab", "0a1b2c3d", "success")  # type: ignore[attr-defined]
    assert line.bytes_sent == 12_345_000  # type: ignore[attr-defined]
