"""Audits of a played round: a false average is proved, a true one never, and an answer cannot be forged."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2pavg.allreduce.proofs import inputs_digest, part_digest
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.aggregation import Aggregation, CenteredClip, Median, RobustRule, TrimmedMean
from p2pavg.group.topology import Star
from p2pavg.verification.audit.evidence import FalseAverage, read_false_average, what_is_wrong
from p2pavg.verification.audit.layout import OWN_DOMAIN, read_manifest
from p2pavg.verification.audit.task import Lie
from p2pavg_compression import Blockwise8, Codec, Fp32, Int8
from tests.unit.group.samples import SIGNERS
from tests.unit.verification.audit.played import ALWAYS, IDS, Played

CODECS: list[Codec] = [Fp32(), Int8(block_size=64), Blockwise8(block_size=64)]
RULES = [
    Aggregation(),
    Aggregation(max_norm=1.0),
    Aggregation(TrimmedMean(0.25)),
    Aggregation(Median(), 1.0),
    Aggregation(CenteredClip()),
]

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.text or "mean")
# Each codec and each rule in a first attempt and in a later one.
plays = pytest.mark.parametrize(
    ("codec", "rule", "attempt"),
    [
        (codec, rule, 2 * (number % 2))
        for number, (codec, rule) in enumerate(itertools.product(CODECS, RULES))
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "text", str(value)) or "mean",
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


def judged(played: Played, auditor: int, reducer: int) -> Lie | None:
    """Let one member audit another one, and return what it finds."""
    task, manifest, inputs = played.answered(auditor, reducer)
    return task.judge(manifest, inputs)


@plays
def test_true_averages_pass(codec: Codec, rule: Aggregation, attempt: int) -> None:
    played = Played(codec, rule, attempt=attempt)
    for auditor in range(3):
        for reducer in {0, 1, 2} - {auditor}:
            assert judged(played, auditor, reducer) is None


@plays
def test_a_false_average_is_proved_to_every_peer(codec: Codec, rule: Aggregation, attempt: int) -> None:
    played = Played(codec, rule, liar=1, attempt=attempt)
    lie = judged(played, 0, 1)
    assert lie is not None
    assert re.search(r" of (64|32) values of a part are not the average", lie.reason)
    read = read_false_average(lie.evidence)
    assert read.share.reducer == IDS[1]
    assert read.why() == lie.reason
    assert read.pack() == lie.evidence
    assert judged(played, 0, 2) is None, "the others did not lie"


@codecs
def test_a_lie_of_one_value_is_found(codec: Codec) -> None:
    def falsify(average: torch.Tensor) -> None:
        average[7] += 0.05 * average.abs().max()  # a few of the codec's levels

    assert judged(Played(codec, Aggregation(), liar=1, falsify=falsify), 2, 1) is not None


def test_a_false_average_of_an_auxiliary_is_proved() -> None:
    """A reducer without a contribution shows none of its own."""
    honest = Played(Blockwise8(block_size=64), Aggregation(), size=4, auxiliary=3)
    assert not honest.share(3).contributes
    assert judged(honest, 1, 3) is None
    played = Played(Blockwise8(block_size=64), Aggregation(), size=4, auxiliary=3, liar=3)
    lie = judged(played, 0, 3)
    assert lie is not None
    assert read_false_average(lie.evidence).share.reducer == IDS[3]


@codecs
@pytest.mark.parametrize("attempt", [0, 2])
def test_the_reducer_of_a_star_is_audited_and_its_lie_proved(codec: Codec, attempt: int) -> None:
    rule = Aggregation(Median(), topology=Star())
    honest = Played(codec, rule, attempt=attempt)
    reducer = next(index for index, share in enumerate(honest.members.shares) if share)
    auditors = [index for index in range(3) if index != reducer]
    assert all(judged(honest, auditor, reducer) is None for auditor in auditors)
    lie = judged(Played(codec, rule, liar=reducer, attempt=attempt), auditors[0], reducer)
    assert lie is not None
    read = read_false_average(lie.evidence)
    assert (read.share.reducer, read.why()) == (IDS[reducer], lie.reason)


def test_a_star_is_audited_in_as_many_stretches_as_it_has_members() -> None:
    played = Played(Fp32(), Aggregation(topology=Star()), size=4)
    reducer = next(index for index, share in enumerate(played.members.shares) if share)
    # 18 parts: stretches of 4, 5, 4 and 5 parts, of each of which a third is audited.
    assert len(played.tasks((reducer + 1) % 4)[IDS[reducer]].indices) == 8


def test_an_average_of_what_does_not_decode_is_proved() -> None:
    """A reducer of honest members would have excluded that contributor."""
    played = Played(Int8(block_size=64), Aggregation())
    task, manifest, inputs = played.answered()
    read = read_manifest(task.share, task.indices, manifest)
    index = task.indices[0]
    broken = b"\xff" * len(inputs[0][0])  # the scales are NaN
    share = task.share
    digests = list(read.inputs[0][1])
    digests[index] = part_digest(broken)
    signature = SIGNERS[0].sign(share.subject.input_bytes(share.position, digests))
    values = played.values[1]
    assert values.proofs is not None
    values.proofs._came[IDS[0]][index] = digests[index]
    values.proofs._signatures[IDS[0]] = signature
    values.proofs._shares.clear()
    signed = values.proofs.sign_output(task.signed.digests)
    values.inputs(index)[IDS[0]] = broken
    lie = replace(task, signed=signed).judge(*played.answered()[1:])
    assert lie is not None
    assert f"a contribution of {IDS[0]} that counts in no round" in lie.reason
    assert read_false_average(lie.evidence).why() == lie.reason


@codecs
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_reducer_that_shows_values_of_no_round_is_proved_to_lie(codec: Codec, value: float) -> None:
    """It signs what it shows of its own contribution, so only the values tell. They ended the auditor's program."""
    played = Played(codec, Aggregation())
    task, manifest, inputs = played.answered()
    read, share = read_manifest(task.share, task.indices, manifest), task.share
    own = dict(read.own)
    for place, index in enumerate(task.indices):
        shown = torch.full((len(inputs[place][-1]) // 4,), value).numpy().tobytes()
        inputs[place][-1] = shown
        digest = part_digest(shown)
        message = share.subject.own_bytes(OWN_DOMAIN, share.position, index, digest)
        own[index] = (digest, SIGNERS[1].sign(message))
    lie = task.judge(replace(read, own=own).pack(), inputs)
    assert lie is not None
    assert f"a contribution of {IDS[1]} that counts in no round" in lie.reason
    assert read_false_average(lie.evidence).why() == lie.reason


def shown_by(played: Played) -> tuple[Any, Any]:
    """Return what the second member shows the first one in an audit: the contributions to a part, and their values."""
    task, _, inputs = played.answered()
    return inputs[0], task.share.values(inputs[0])


def test_a_reducer_cannot_explain_an_average_by_a_contribution_longer_than_it_signed() -> None:
    """It chooses its own contribution when it is audited. The norm that it has signed bounds it."""
    played = Played(Fp32(), Aggregation(max_norm=1e6))
    inputs, values = shown_by(played)
    for scale, wrong in ((1.0, False), (100.0, True)):
        values[1] = scale * torch.frombuffer(bytearray(inputs[-1]), dtype=torch.float32)
        average = _exact(played, values).numpy().tobytes()
        why = what_is_wrong(Fp32(), played.members, played.aggregation, values, 64, average)
        assert ("counts in no round" in why) is wrong


@codecs
@pytest.mark.parametrize("rule", [TrimmedMean(0.45), Median(), CenteredClip()], ids=lambda rule: rule.text)
def test_a_reducer_cannot_explain_an_average_by_values_that_the_rule_does_not_keep(
    codec: Codec, rule: RobustRule
) -> None:
    """An audit allows no more for rounding because of values that the reducer shows and the rule cuts off."""
    played = Played(codec, Aggregation(rule))
    _, values = shown_by(played)
    values[1] = torch.full((64,), 1e30)
    exact = _exact(played, values)
    for lie in (0.0, 0.5):
        false = exact + lie
        average = false.numpy().tobytes() if codec.is_identity else bytes(codec.encode(false))
        why = what_is_wrong(codec, played.members, played.aggregation, values, 64, average)
        assert ("are not the average" in why) is bool(lie)


# ---------------------------------------------------------------------- rounding


@codecs
@rules
def test_rounding_errors_are_no_lies(codec: Codec, rule: Aggregation) -> None:
    """Another processor may round sums differently. A few units in the last place are changed before encoding."""

    def round_otherwise(values: torch.Tensor) -> None:
        values *= 1 + 3e-7 * torch.randn(len(values), generator=torch.Generator().manual_seed(1))

    played = Played(codec, rule)
    for auditor, reducer in ((0, 1), (1, 2), (2, 0)):
        task, manifest, inputs = played.answered(auditor, reducer)
        averages = dict(task.averages)
        for index, buffers in zip(task.indices, inputs, strict=True):
            exact = _exact(played, task.share.values(buffers))
            round_otherwise(exact)
            encoded = exact.numpy().tobytes() if codec.is_identity else bytes(codec.encode(exact))
            averages[index] = encoded
        assert replace(task, averages=averages).judge(manifest, inputs) is None


def _exact(played: Played, values: object) -> torch.Tensor:
    from p2pavg.allreduce.reduction import PartContribution, reduce_part
    from p2pavg.group.roster import norm_factors

    factors = norm_factors(played.members, played.aggregation.max_norm)
    contributions = [
        PartContribution(member.peer_id, member.weight, value, factors.get(member.peer_id, 1.0))
        for member, value in zip(played.members.contributors, values, strict=True)  # type: ignore[call-overload]
    ]
    out = torch.empty(64)
    reduce_part(
        played.codec, contributions, played.members.total_weight, out, robust=played.aggregation.robust
    )
    return out


# ---------------------------------------------------------------------- forged answers


@pytest.mark.parametrize("what", ["input", "own", "manifest"])
def test_an_answer_with_other_bytes_proves_nothing(what: str) -> None:
    played = Played(Fp32(), Aggregation(), liar=1)
    task, manifest, inputs = played.answered()
    changed = [[bytearray(each) for each in buffers] for buffers in inputs]
    forged = bytearray(manifest)
    if what == "manifest":
        forged[100] ^= 1
    else:
        changed[0][0 if what == "input" else -1][0] ^= 1
    with pytest.raises(RemoteProtocolError):
        task.judge(bytes(forged), changed)


def test_a_reducer_cannot_show_contributions_that_it_has_invented() -> None:
    """It signs the digests of its inputs with its averages, and the contributor has signed other bytes."""
    played = Played(Fp32(), Aggregation())
    values = played.values[1]
    assert values.proofs is not None
    values.proofs._came[IDS[0]] = [bytes(32)] * len(values.proofs._came[IDS[0]])
    task, manifest, inputs = played.answered()
    with pytest.raises(RemoteProtocolError, match="other contributions than it signed"):
        task.judge(manifest, inputs)
    values.proofs._shares.clear()
    forged = replace(task, signed=values.proofs.sign_output(task.signed.digests))
    with pytest.raises(RemoteProtocolError, match="has not signed"):
        forged.judge(manifest, inputs)


def test_two_members_cannot_frame_an_honest_reducer() -> None:
    """One signs another contribution afterwards; the reducer has signed the first one with its averages."""
    played = Played(Fp32(), Aggregation())
    task, manifest, inputs = played.answered()
    read = read_manifest(task.share, task.indices, manifest)
    other = bytes(len(inputs[0][0]))
    digests = list(read.inputs[1][1])
    digests[task.indices[0]] = part_digest(other)
    signature = SIGNERS[2].sign(task.share.subject.input_bytes(task.share.position, digests))
    forged = replace(read, inputs=(read.inputs[0], (signature, tuple(digests))))
    inputs[0][1] = other
    with pytest.raises(RemoteProtocolError, match="other contributions than it signed"):
        task.judge(forged.pack(), inputs)
    evidence = FalseAverage(
        roster=task.roster,
        share=task.share,
        signed=replace(task.signed, inputs=inputs_digest(digests for _, digests in forged.inputs)),
        manifest=forged,
        index=task.indices[0],
        inputs=inputs[0],
        average=task.averages[task.indices[0]],
    )
    assert evidence.why() != ""
    with pytest.raises(RemoteProtocolError, match="averages that the accused has not signed"):
        read_false_average(evidence.pack())


# ---------------------------------------------------------------------- answering


def test_a_reducer_answers_each_auditor_once() -> None:
    played = Played(Fp32(), Aggregation())
    kept, request = played.kept(1), played.request(0)
    assert kept.admit(IDS[0], 0, request) == ""
    assert kept.admit(IDS[0], 0, request) == "it was answered before"
    assert kept.admit(IDS[2], 0, played.request(2)) == ""


@pytest.mark.parametrize(
    ("auditor", "reason"),
    [
        (5, "it is no member that holds the result"),
        (3, "it is no member that holds the result"),
        (1, "it is no member that holds the result"),
        (2, "its signature does not verify"),
    ],
    ids=["stranger", "auxiliary", "itself", "another one's signature"],
)
def test_other_peers_are_not_answered(auditor: int, reason: str) -> None:
    played = Played(Fp32(), Aggregation(), size=4, auxiliary=3)
    assert played.kept(1).admit(IDS[auditor], 0, played.request(0)) == reason


def test_requests_about_other_results_are_not_answered() -> None:
    played = Played(Fp32(), Aggregation())
    assert played.kept(1).admit(IDS[0], 1, played.request(0)) == "it is about another attempt"
    assert played.kept(1, digest=bytes(32)).admit(IDS[0], 0, played.request(0)) == "it holds another result"


def test_a_member_that_was_not_drawn_is_not_answered() -> None:
    played = Played(Fp32(), Aggregation())
    seldom = replace(ALWAYS, probability=1e-9)
    assert played.tasks(0, seldom) == {}
    assert played.kept(1, seldom).admit(IDS[0], 0, played.request(0, seldom)) == "it was not drawn"


def test_an_auditor_that_asks_before_the_averages_are_there_is_refused() -> None:
    played = Played(Fp32(), Aggregation())
    kept = played.kept(1)
    played.values[1]._ready[0] = False
    assert kept.admit(IDS[0], 0, played.request(0)) == "the averages are not there yet"


def test_an_answer_does_not_need_the_attempt_any_more() -> None:
    """An attempt may end while the answer is being made in another thread."""
    played = Played(Fp32(), Aggregation())
    task, kept = played.tasks(0)[IDS[1]], played.kept(1)
    assert kept.admit(IDS[0], 0, task.request) == ""
    for values in played.values:
        values.let_go()
    assert task.judge(*kept.answer(task.request)) is None


def test_an_audit_outlives_the_attempt() -> None:
    """The caller of a round may change the averaged tensors, and the next round reuses the memory."""
    played = Played(Fp32(), Aggregation())
    task, kept = played.tasks(0)[IDS[1]], played.kept(1)
    drawn = kept.drawn({IDS[0]: task.request.ticket})
    assert drawn == set(task.indices)
    kept.keep_only(drawn)
    for values in played.values:
        values.averages.values.fill_(7.0)
        own = values._vector
        assert own is not None
        own.fill_(7.0)
    assert kept.admit(IDS[0], 0, task.request) == ""
    assert task.judge(*kept.answer(task.request)) is None
