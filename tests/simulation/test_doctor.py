"""The doctor's time is bounded, and one check that hangs or fails does not cost the others."""

from __future__ import annotations

import logging

import pytest
import trio

from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.net.transport import Stream
from p2pavg.runs.records.hello import PROTOCOL
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import EPOCH
from p2pavg.tools.doctor import examination
from p2pavg.tools.doctor.examination import (
    CLOCK_SECONDS,
    LEARN_REACH_SECONDS,
    SPARE_SECONDS,
    TOTAL_SECONDS,
    ExaminedPeer,
    examine,
)
from p2pavg.tools.doctor.findings import OPTIONAL, ORDER, Level
from p2pavg.tools.doctor.probes.addresses import LONG_PROBE_SECONDS, QUICK_PROBE_SECONDS


async def test_everything_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination._Examination, "_judge_network", lambda _: trio.Event().wait())
    began = trio.current_time()
    found = await examine(ExaminedPeer(listen=["/ip4/127.0.0.1/tcp/0"]))
    assert trio.current_time() - began == TOTAL_SECONDS
    assert {each.name for each in found} >= set(ORDER) - OPTIONAL
    assert {each.what for each in found if each.name in ("firewall", "bandwidth")} == {"not known"}
    assert {each.cause for each in found if each.name == "key file"} == {"the identity is new at every start"}


def test_the_parts_fit_into_the_total() -> None:
    of_the_run = 2 * LONG_PROBE_SECONDS + QUICK_PROBE_SECONDS + 2 * SPARE_SECONDS
    longest = max(LEARN_REACH_SECONDS + SPARE_SECONDS, CLOCK_SECONDS + of_the_run)
    assert QUICK_REPLY_SECONDS + LONG_PROBE_SECONDS + longest <= TOTAL_SECONDS
    assert TOTAL_SECONDS <= 25.0  # the program's start and end are the rest of 30 s


async def test_a_silent_contact_costs_the_clocks_of_no_other_one() -> None:
    async def keep_silent(_stream: Stream) -> None:
        await trio.sleep_forever()

    async with simulated_peers(MemoryNetwork(), 4) as (doctor, *others):
        others[0].context.transport.serve(PROTOCOL, keep_silent)
        while len(doctor.records.contacts) < len(others):
            await doctor.records.find(bytes(32))
            await trio.sleep(1.0)
        await trio.sleep(10.0)  # the doctor's own peer has asked for clocks, and would be refused
        asking = examination._Examination(ExaminedPeer(wall_clock=lambda: EPOCH + trio.current_time()))
        with trio.move_on_after(CLOCK_SECONDS):
            await asking._ask_clocks(doctor)
    assert len(asking._heard) == 2


async def test_checks_that_hang_or_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def network(self: examination._Examination) -> None:
        with self._checking("run", 5.0):
            await trio.sleep_forever()
        with self._checking("bandwidth", 5.0):
            raise ZeroDivisionError("a bug")

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
