"""States of the processes of one peer: what the peer says for all, and its log for them."""

from __future__ import annotations

import torch

from p2pavg.attached.standing import (
    LOCAL_SECONDS,
    LocalAverage,
    LocalLog,
    Stand,
    giver,
    joint_stand,
    shown,
)
from p2pavg.attached.updates import Updates
from p2pavg.state.news import MAX_LOG, SnapshotOffer
from p2pavg.telemetry.events import UpdateTaken

HERE = Stand(epoch=7)


def group(number: int) -> bytes:
    return number.to_bytes(32, "big")


def average(size: int = 1) -> LocalAverage:
    return LocalAverage(bytes(32), b"", torch.zeros(size))


def log_of(*epochs: int, certified: bool = True) -> LocalLog:
    log = LocalLog()
    for epoch in epochs:
        if not certified:
            log.committed(group(epoch), average())
        log.took(group(epoch), epoch, certified=certified)
    return log


class TestJointStand:
    def test_a_late_process_is_first_served_by_the_others(self) -> None:
        stands = {"a": HERE, "b": Stand(wants=True, since=100.0)}
        assert joint_stand(stands, 100.0 + LOCAL_SECONDS - 0.1) == (False, 7)

    def test_other_peers_are_asked_after_a_while(self) -> None:
        stands = {"a": HERE, "b": Stand(wants=True, since=100.0)}
        assert joint_stand(stands, 100.0 + LOCAL_SECONDS) == (True, 7)

    def test_other_peers_are_asked_at_once_if_all_processes_are_late(self) -> None:
        assert joint_stand({"a": Stand(wants=True, epoch=3, since=100.0)}, 100.0) == (True, 3)

    def test_no_process(self) -> None:
        assert joint_stand({}, 0.0) == (False, 0)


class TestGiver:
    def test_the_first_by_name_of_those_that_are_furthest(self) -> None:
        assert giver({"c": HERE, "b": HERE, "a": Stand(epoch=6)}) == "b"

    def test_no_late_process(self) -> None:
        assert giver({"a": Stand(wants=True, epoch=9), "b": HERE}) == "b"
        assert giver({"a": Stand(wants=True)}) is None


class TestShown:
    OFFER = SnapshotOffer(epoch=5, state=bytes(32), root=bytes(32), size=1)

    def test_a_process_that_is_up_to_date_offers_what_the_peer_holds(self) -> None:
        news = shown(HERE, self.OFFER, log_of(6, 7))
        assert (news.snapshot, news.log, news.wants) == (self.OFFER, (group(6), group(7)), False)

    def test_a_late_process_offers_nothing(self) -> None:
        news = shown(Stand(wants=True, epoch=7), self.OFFER, log_of(6, 7))
        assert (news.snapshot, news.log, news.wants) == (None, (), True)

    def test_a_process_between_two_updates_offers_no_snapshot_ahead_of_it(self) -> None:
        news = shown(Stand(epoch=4), self.OFFER, log_of(6, 7))
        assert (news.snapshot, news.log) == (None, ())


class TestLocalLog:
    def test_an_average_without_a_certificate_is_kept_once_it_was_taken(self) -> None:
        log = log_of(1, 2, certified=False)
        assert log.group_ids == (group(1), group(2))
        assert (log.epoch, log.first) == (2, 0)
        assert log.get(group(2)) is not None

    def test_an_unknown_average_begins_the_log_anew(self) -> None:
        log = log_of(1, 2)
        log.took(group(3), 3, certified=False)
        assert (log.group_ids, log.epoch) == ((), 3)

    def test_a_gap_begins_the_log_anew_with_the_average(self) -> None:
        log = log_of(1, 2)
        log.took(group(9), 9, certified=True)
        assert (log.group_ids, log.epoch, log.first) == ((group(9),), 9, 8)

    def test_the_number_of_averages_is_bounded(self) -> None:
        log = log_of(*range(1, MAX_LOG + 10))
        assert (len(log.group_ids), log.first) == (MAX_LOG, 9)

    def test_the_memory_is_bounded_but_the_last_average_is_kept(self) -> None:
        log = log_of(1, 2, 3, certified=False)
        log.shorten(4, ())
        assert log.group_ids == (group(3),)
        log.shorten(0, ())
        assert log.group_ids == (group(3),)

    def test_an_average_that_the_peers_own_log_has_dropped_is_dropped(self) -> None:
        log = log_of(1, 2, 3)
        log.shorten(2**20, {group(2), group(3)})
        assert (log.group_ids, log.first) == ((group(2), group(3)), 1)

    def test_averages_that_are_never_taken_are_bounded(self) -> None:
        log = LocalLog()
        for number in range(10):
            log.committed(group(number), average())
        log.took(group(0), 1, certified=False)
        assert log.group_ids == ()


def update(epoch: int, lineage: bytes = b"a", replayed: bool = False) -> UpdateTaken:
    return UpdateTaken(
        time=0.0,
        run_id="run",
        epoch=epoch,
        lineage=lineage,
        group_id="",
        peers=(),
        samples=1.0,
        replayed=replayed,
    )


class TestUpdates:
    def test_an_update_of_several_processes_is_told_once(self) -> None:
        updates = Updates()
        assert [updates.is_new(update(1)), updates.is_new(update(1)), updates.is_new(update(2))] == [
            True,
            False,
            True,
        ]

    def test_a_process_that_catches_up_tells_of_no_earlier_update(self) -> None:
        updates = Updates()
        updates.is_new(update(9))
        assert not updates.is_new(update(5, b"b", replayed=True))
