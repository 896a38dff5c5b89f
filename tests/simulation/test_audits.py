"""Audits among real peers on a simulated network: a reducer that lies is found, and honest peers go on without it."""

from __future__ import annotations

import logging
import statistics

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.values import AttemptData
from p2pavg.group.aggregation import Audits
from p2pavg.round.audits import RoundAudits
from p2pavg.round.rounds import MAX_TELLING
from p2pavg.round.signing import Signing
from p2pavg.verification.audit import layout
from p2pavg.verification.audit.keeping import KeptShare
from p2pavg.verification.audit.task import AuditTask
from tests.simulation.false_averages import Rounds, lie, nudge
from tests.simulation.liars import name
from tests.simulation.swarm import mean, tensors_of


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


@pytest.mark.parametrize(
    ("compression", "robust"),
    [("int8:64", "trimmed_mean:0.25"), ("blockwise8:64", "centered_clip:1.0:3"), ("topk:64:8", None)],
)
async def test_honest_peers_are_never_accused(
    caplog: pytest.LogCaptureFixture, compression: str | None, robust: str | None
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.round")
    rounds = Rounds(4, 2, audit="after:1.0", compression=compression, robust=robust, max_norm=2.0)
    await rounds.run()
    assert all(len(peers) == 4 for index in range(4) for peers in rounds.partners(index))
    assert "audit" not in caplog.text, "each audit was answered, and found nothing"


async def test_a_reducer_that_lies_is_met_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, 2)
    rounds = Rounds(4, 3, audit="after:1.0", compression="blockwise8:64")
    await rounds.run()
    for index in (0, 1, 3):
        assert rounds.rounds_with(index, 2) == 1, "the audit is after the round"
        assert [len(peers) for peers in rounds.partners(index)] == [4, 3, 3]


async def test_one_finding_excludes_the_liar_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member audits; the others verify its evidence."""
    lie(monkeypatch, 2)
    found = RoundAudits._audit

    async def only_the_first(self: RoundAudits, *arguments: object) -> None:
        if self._me == name(0):
            await found(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundAudits, "_audit", only_the_first)
    rounds = Rounds(4, 6, audit="after:1.0")
    await rounds.run()
    for index in (0, 1, 3):
        assert rounds.rounds_with(index, 2) < 6
        assert "it sent a false average" in rounds.excluded[index][name(2)]
        assert rounds.excluded[index].keys() == {name(2)}


async def test_an_audit_before_the_end_keeps_a_false_average_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, 2)
    rounds = Rounds(4, 2, audit="before:1.0")
    await rounds.run()
    for index in (0, 1, 3):
        assert rounds.rounds_with(index, 2) == 0
        first = rounds.results[index][0]
        torch.testing.assert_close(tensors_of(first)[0], mean([0, 1, 3], 700).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("auditor", [0, 3], ids=["leads", "follows"])
async def test_one_audit_before_the_end_is_enough(monkeypatch: pytest.MonkeyPatch, auditor: int) -> None:
    """The one member that was drawn does not say that it holds the false result, so no member takes it."""
    lied: list[bool] = []

    def once(average: torch.Tensor) -> None:
        """Lie about the first part of the first attempt."""
        if not lied:
            lied.append(True)
            average += 0.5

    lie(monkeypatch, 2, once)
    tasks_of = RoundAudits._tasks_of

    def only_one(self: RoundAudits, *arguments: object) -> list[AuditTask]:
        return tasks_of(self, *arguments) if self._me == name(auditor) else []  # type: ignore[arg-type]

    def every_part(
        _audits: Audits, _ticket: bytes, _reducer: int, parts: int, _auditors: int, stretches: int
    ) -> tuple[int, ...]:
        return tuple(range(parts))

    monkeypatch.setattr(RoundAudits, "_tasks_of", only_one)
    sign, signed = Signing.sign, []

    def note(self: Signing, attempt: int, *rest: object) -> bytes:
        signed.append((self._signer.peer_id, attempt))
        return sign(self, attempt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Signing, "sign", note)
    monkeypatch.setattr(layout, "drawn_parts", every_part)
    rounds = Rounds(4, 1, audit="before:1.0")
    await rounds.run()
    found = [results[0] for results in rounds.results.values() if isinstance(results[0], p2pavg.Success)]
    assert found
    assert (name(1), 0) in signed
    assert (name(auditor), 0) not in signed, "a leader that lies could show its signature to the others"
    for result in found:
        members = [index for index in range(4) if name(index) in result.peers]
        assert len(members) == 3, "the auditor or the reducer is left out"
        torch.testing.assert_close(tensors_of(result)[0], mean(members, 700).float(), rtol=0, atol=1e-5)


async def test_a_leader_that_lies_is_found_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, 0)
    rounds = Rounds(4, 2, audit="before:1.0")
    await rounds.run()
    assert [rounds.rounds_with(index, 0) for index in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("when", ["after", "before"])
async def test_a_reducer_that_answers_no_audit_is_avoided(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A peer that has just left does not answer either, so after a round the first time does not count."""
    lie(monkeypatch, 2)
    admit = KeptShare.admit

    def refuse(self: KeptShare, *arguments: object) -> str:
        return "no" if self.share.reducer == name(2) else admit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(KeptShare, "admit", refuse)
    rounds = Rounds(4, 4, audit=f"{when}:1.0")
    await rounds.run()
    assert [rounds.rounds_with(index, 2) for index in (0, 1, 3)] == ([2] * 3 if when == "after" else [0] * 3)


async def test_a_silent_reducer_is_avoided_although_rounds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds than are kept end within the time of one audit."""
    monkeypatch.setattr("tests.simulation.false_averages.PAUSE", 2.5)
    serve = RoundAudits._serve

    async def keep_silent(self: RoundAudits, *arguments: object) -> None:
        if self._me == name(2):
            await trio.sleep_forever()
        await serve(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundAudits, "_serve", keep_silent)
    rounds = Rounds(3, 20, audit="after:1.0", elements=100, until=lambda each: not each.is_met(0, 2))
    await rounds.run()
    assert MAX_TELLING + 1 < rounds.rounds_with(0, 2) < 20


async def test_an_answer_over_which_an_auditor_raises_is_its_reducers_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of the auditor that a reducer has found: it must not end the auditor's program."""
    judge = AuditTask.judge

    def stumble(self: AuditTask, *answer: object) -> object:
        if self.reducer.peer_id == name(2):
            raise ValueError("nothing here expects this")
        return judge(self, *answer)  # type: ignore[arg-type]

    monkeypatch.setattr(AuditTask, "judge", stumble)
    rounds = Rounds(4, 4, audit="after:1.0")
    await rounds.run()
    assert [rounds.rounds_with(index, 2) for index in (0, 1, 3)] == [2] * 3, (
        "after the second time, it is avoided"
    )
    assert "handling the answer to an audit" in caplog.text


@pytest.mark.parametrize("kind", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
async def test_a_member_that_does_not_sign_its_parts_is_left_out(
    monkeypatch: pytest.MonkeyPatch, kind: Lane
) -> None:
    trailer = AttemptData.trailer

    def forge(self: AttemptData, *arguments: object) -> bytes:
        made = trailer(self, *arguments)  # type: ignore[arg-type]
        return bytes(len(made)) if self._ledger.me == name(2) and arguments[0] is kind else made

    monkeypatch.setattr(AttemptData, "trailer", forge)
    rounds = Rounds(4, 2)
    await rounds.run()
    assert [rounds.rounds_with(index, 2) for index in (0, 1, 3)] == [0, 0, 0]
    assert all(isinstance(result, p2pavg.Success) for result in rounds.results[0])


async def test_a_liar_is_found_within_twenty_rounds_in_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """``scripts/faults audits`` does the same with 20 seeds. A hundredth of the liar's share is false."""
    lie(monkeypatch, 2, nudge)
    found = []
    for seed in range(3):
        rounds = Rounds(4, 40, elements=400 + seed, until=lambda each: not each.is_met(0, 2))
        await rounds.run()
        found.append(rounds.rounds_with(0, 2))
    assert statistics.median(found) <= 20, found
