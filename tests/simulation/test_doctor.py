"""The doctor's time is bounded, and one check that hangs or fails does not cost the others."""

from __future__ import annotations

import logging

import pytest
import trio

from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.tools.doctor import examination
from p2pavg.tools.doctor.examination import (
    BANDWIDTH_SECONDS,
    CLOCK_SECONDS,
    JOIN_SECONDS,
    LEARN_REACH_SECONDS,
    PEERS_SECONDS,
    RUN_SECONDS,
    TOTAL_SECONDS,
    ExaminedPeer,
    examine,
)
from p2pavg.tools.doctor.findings import OPTIONAL, ORDER, Finding, Level


async def _hang() -> list[Finding]:
    await trio.sleep_forever()
    raise AssertionError


async def _fail() -> list[Finding]:
    raise ZeroDivisionError("a bug")


async def test_everything_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination._Examination, "_judge_network", lambda _: _hang())
    began = trio.current_time()
    found = await examine(ExaminedPeer(listen=["/ip4/127.0.0.1/tcp/0"]))
    assert trio.current_time() - began == TOTAL_SECONDS
    assert {each.name for each in found} >= set(ORDER) - OPTIONAL
    assert {each.what for each in found if each.name in ("firewall", "bandwidth")} == {"not known"}
    assert {each.cause for each in found if each.name == "key file"} == {"the identity is new at every start"}


def test_the_parts_fit_into_the_total() -> None:
    longest = max(LEARN_REACH_SECONDS + 1.0, CLOCK_SECONDS + RUN_SECONDS + PEERS_SECONDS + BANDWIDTH_SECONDS)
    assert QUICK_REPLY_SECONDS + JOIN_SECONDS + longest <= TOTAL_SECONDS
    assert TOTAL_SECONDS <= 25.0  # the program's start and end are the rest of 30 s


async def test_checks_that_hang_or_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def network(self: examination._Examination) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "run", 5.0, _hang)
            nursery.start_soon(self._check, "bandwidth", 5.0, _fail)

    monkeypatch.setattr(examination._Examination, "_judge_network", network)
    with caplog.at_level(logging.ERROR):
        began = trio.current_time()
        found = await examine(ExaminedPeer())
        assert trio.current_time() - began == 5.0
    causes = {each.name: each.cause for each in found if each.level is Level.NOTE}
    assert causes["run"] == "no answer within 5 s"
    assert len([each for each in found if each.name == "run"]) == 1
    assert causes["bandwidth"] == "the check itself failed: ZeroDivisionError('a bug')"
    assert "Traceback" in caplog.text
