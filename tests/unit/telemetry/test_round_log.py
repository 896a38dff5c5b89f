"""The one line of a round in the log."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from p2pavg.telemetry.events import RoundKind, Way
from p2pavg.telemetry.round_log import log_round, round_sentence
from tests.unit.metrics.fakes import PEERS, ended, progressed

ROUND = ended(duration=2.345, sent={Way.LANE: 12_000_000, Way.STREAM: 345_000}, received={Way.LANE: 999})


def test_a_round_is_one_sentence_with_size_duration_and_bytes() -> None:
    assert round_sentence(ROUND) == (
        "averaged 4 contributions of 5 members in 2.3 s; 12.3 MB sent, 999 B received"
    )


def test_lost_and_clipped_members_are_named_with_reasons() -> None:
    lost = {PEERS[4]: f"{PEERS[4]} was lost: connection refused"}
    sentence = round_sentence(replace(ROUND, lost=lost, clipped=PEERS[:1]))
    assert sentence.endswith("; lost …000004 (connection refused); clipped …000000")


def test_many_lost_members_are_counted() -> None:
    sentence = round_sentence(replace(ROUND, lost=dict.fromkeys(PEERS, "x" * 500)))
    assert sentence.endswith(" and 2 more")
    assert len(sentence) < 600


def test_rounds_without_a_result_say_why() -> None:
    failed = ended(RoundKind.FAILED, duration=2.345, code="timed_out", reason="too slow")
    assert round_sentence(failed) == "the round of 5 members failed after 2.3 s (timed_out): too slow"
    alone = ended(RoundKind.NO_PEERS, duration=2.345, reason="no other peer is there")
    assert round_sentence(alone) == "no round after 2.3 s: no other peer is there"


def test_one_line_a_round_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "p2pavg.rounds"):
        log_round(ROUND)
        log_round(progressed())
    [line] = caplog.records
    assert (line.levelno, line.run, line.round, line.result) == (20, "lab", "0a1b2c3d", "success")  # type: ignore[attr-defined]
    assert line.bytes_sent == 12_345_000  # type: ignore[attr-defined]
