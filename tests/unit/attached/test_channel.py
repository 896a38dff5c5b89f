"""An attached averager whose peer ends in each moment of a round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import p2pavg
from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.attached.channel import AttachedRound, Channel
from p2pavg.attached.group import Begin
from p2pavg.attached.link import Link
from p2pavg.attached.results import alone_success, encode_success
from p2pavg.attached.segments import ContributionSegment, ResultWriter
from p2pavg.base.codes import FailedCode
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import Failed, InProgress, NoPeers, Success
from p2pavg.peer.step_plan import StepPlan

SERIAL = 77
PLAN = Begin(members=("me",), contributors=("me",), state=b"", remote=0, remote_contributors=0, target=1)


class FakeLink(Link):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__("/nowhere", "me")
        self.peer_id = "P"
        self.sent: list[tuple[Any, ...]] = []
        self.up = True

    @property
    def is_up(self) -> bool:
        return self.up

    def send(self, *fields: Any, descriptors: Sequence[int] = ()) -> None:
        self.sent.append(fields)


class Stage:
    """A channel, and the peer's end of its memory."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.accumulation = Accumulation(None)
        self.channel = Channel(self.link, 0, p2pavg.AveragingConfig(run_id="x"), self.accumulation)
        self.peer = ResultWriter(3)
        self.contribution = ContributionSegment(3)
        self.accumulation.add([torch.tensor([1.0, 2.0, 3.0])], 4.0)
        assert self.accumulation.schema is not None
        self.channel.describe(self.accumulation.schema)
        self.connect()

    def connect(self) -> None:
        self.link.up = True
        self.channel.attached()
        self.channel.take("opened", (), lambda: -1)
        self.declare(self.contribution, self.peer)

    def declare(self, contribution: ContributionSegment, result: ResultWriter) -> None:
        descriptors = [os.dup(contribution.descriptor), os.dup(result.descriptor)]
        self.channel.take("declared", (), lambda: descriptors.pop(0))

    def begin(self) -> AttachedRound:
        plan = StepPlan(state=b"", observes=False, target=None, contributors=0)
        progress = InProgress(ready_peers=1, target_size=2)
        self.channel.begin(AttachedRound(1, plan, self.accumulation.take(), None, progress, 0.0))
        assert self.channel.round is not None
        return self.channel.round

    def tell(self, kind: str, *fields: object) -> None:
        self.channel.take(kind, fields, lambda: -1)

    def lose(self) -> None:
        self.link.up = False
        self.channel.lost("the peer is gone")

    def commit(self) -> None:
        success = alone_success("P", PLAN, {"me": 4.0}, {"me": {}}, serial=SERIAL, elements=3, seconds=0.0)
        self.peer.values.fill_(9.0)
        self.peer.commit(SERIAL, encode_success(success))


def test_a_round_that_had_not_begun_goes_to_the_next_peer() -> None:
    stage = Stage()
    round_ = stage.begin()
    assert torch.equal(stage.contribution.values, torch.tensor([1.0, 2.0, 3.0]))
    stage.lose()
    assert round_.result is None
    assert "start it again" in round_.progress.reason
    stage.contribution = ContributionSegment(3)
    stage.link.sent.clear()
    stage.connect()
    assert [fields[0] for fields in stage.link.sent] == ["open", "declare", "step"]
    assert torch.equal(stage.contribution.values, torch.tensor([1.0, 2.0, 3.0])), "the same contribution"


def test_a_round_that_was_not_committed_goes_to_the_next_peer() -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.tell("begun", 1, SERIAL)
    stage.peer.open()
    stage.peer.values.fill_(9.0)  # killed before the serial is stored
    stage.lose()
    assert (round_.result, round_.sent, round_.serial) == (None, False, 0)


def test_a_committed_round_counts_although_the_process_was_not_told() -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.tell("begun", 1, SERIAL)
    stage.commit()
    stage.lose()
    assert isinstance(round_.result, Success)
    assert round_.vector is not None
    assert round_.vector.tolist() == [9.0] * 3
    assert stage.accumulation.weight == 0.0


def test_a_round_that_others_may_have_used_fails_and_its_contribution_is_kept() -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.tell("begun", 1, SERIAL)
    stage.tell("progress", 1, 2, 2, "the group exchanges", True)
    stage.lose()
    assert isinstance(round_.result, Failed)
    assert (round_.result.contribution_used, round_.result.code) == (None, FailedCode.PEER_ENDED)
    assert stage.accumulation.weight == 4.0


def test_a_committed_result_is_copied_and_confirmed() -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.commit()
    stage.tell("committed", 1, SERIAL)
    assert isinstance(round_.result, Success)
    assert stage.link.sent[-1] == ("taken", 0, SERIAL)


@pytest.mark.parametrize(("used", "kept"), [(0, 4.0), (1, 0.0), (-1, 4.0)])
def test_a_failed_round_gives_back_what_was_not_used(used: int, kept: float) -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.tell("ended", 1, "Failed", "a reason", "timed_out", "R", used)
    assert isinstance(round_.result, Failed)
    assert (round_.result.code, round_.result.peer) == (FailedCode.TIMED_OUT, "R")
    assert stage.accumulation.weight == kept


def test_a_code_of_a_later_version_is_another_reason() -> None:
    stage = Stage()
    round_ = stage.begin()
    stage.tell("ended", 1, "NoPeers", "a reason", "a code of tomorrow", "", 0)
    assert isinstance(round_.result, NoPeers)
    assert round_.result.code == "no_group"


def test_what_is_said_of_an_earlier_round_changes_nothing() -> None:
    stage = Stage()
    stage.begin()
    stage.tell("ended", 7, "NoPeers", "of another round", "", "", 0)
    assert stage.channel.round is not None
    assert stage.channel.round.result is None


def test_entries_of_siblings_expire_after_their_peer_has_ended() -> None:
    stage = Stage()
    topic = stage.channel.topic("progress", 1.0)
    stage.tell("entry", "progress", "P/b", b"word", 1, 0.0)
    assert topic.entries["P/b"].value == b"word"
    stage.lose()
    expires = topic.entries["P/b"].expiration_time
    assert expires > 1e9, "like the entry of a peer that died"


def test_the_next_peer_hears_the_boards_and_the_word() -> None:
    stage = Stage()
    stage.channel.topic("progress", 1.0).publish(b"word")
    stage.lose()
    stage.link.sent.clear()
    stage.connect()
    assert ("board", 0, "progress", 1.0) in stage.link.sent
    assert ("say", 0, "progress", b"word", True) in stage.link.sent


def test_a_result_that_is_not_there_ends_the_connection() -> None:
    stage = Stage()
    stage.begin()
    with pytest.raises(RemoteProtocolError):
        stage.tell("committed", 1, SERIAL)
