"""A peer learns from exchanges and audits with whom it has finished a round, and whom it meets no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from p2pavg.allreduce.reduction import RoundFault
from p2pavg.round.exchange import Exchange
from p2pavg.round.rounds import MAX_STRUCK, Rounds, RoundSettings, Strikes
from p2pavg.verification.audit.evidence import MAX_EVIDENCE_BYTES
from p2pavg.verification.audit.task import Lie
from tests.unit.allreduce.attempts import A, B, C, three


class Ended:
    """An exchange that has ended, in which one member was lost after it had contributed."""

    async def run(self, *, task_status: Any) -> None:
        task_status.started()

    def take_outcome(self) -> SimpleNamespace:
        return SimpleNamespace(verdict=None, roster=three(), lost=(RoundFault("it closed its stream", C),))


async def test_a_member_that_was_lost_has_not_finished_the_round() -> None:
    finished = list[str]()
    matchmaker = SimpleNamespace(
        finished_with=lambda members: finished.extend(member.peer_id for member in members)
    )
    settings = RoundSettings(run_id="run", target=3, minimum=2, exchange_timeout=10.0)
    async with trio.open_nursery() as tails:
        rounds = Rounds(cast(Any, None), cast(Any, matchmaker), settings, tails, cast(Any, None))
        await rounds.hold(cast(Exchange, Ended()))
    assert finished == [A, B]


@pytest.mark.parametrize(("size", "told"), [(MAX_EVIDENCE_BYTES, 1), (MAX_EVIDENCE_BYTES + 1, 0)])
async def test_a_liar_is_met_no_more_also_if_its_evidence_is_too_long_to_tell(size: int, told: int) -> None:
    banned, accused = list[tuple[str, str]](), list[bytes]()
    matchmaker = SimpleNamespace(ban=lambda peer_id, reason, _seconds: banned.append((peer_id, reason)))
    settings = RoundSettings(run_id="run", target=3, minimum=2, exchange_timeout=10.0)
    async with trio.open_nursery() as tails:
        rounds = Rounds(
            cast(Any, None),
            cast(Any, matchmaker),
            settings,
            tails,
            cast(Any, SimpleNamespace(accuse=accused.append)),
        )
        rounds.audited(C, Lie("a false average", bytes(size)))
    assert banned == [(C, "a false average")]
    assert len(accused) == told


def test_the_oldest_strikes_are_forgotten() -> None:
    strikes = Strikes()
    for index in range(MAX_STRUCK + 1):
        assert strikes.add(f"peer {index}") == 1
    assert strikes.add("peer 2") == 2, "it is now the latest"
    assert strikes.add("peer 0") == 1, "more peers have had strikes since"
    assert strikes.add("peer 2") == 3
