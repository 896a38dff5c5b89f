"""A peer that follows its run from behind, against the states of a run that the test plays."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.catching_up import following
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following import Follower, Following
from p2pavg.optim.catching_up.following_news import FOLLOWING_RETRY_SECONDS, UpdatePace
from p2pavg.optim.coordination.attendance import MIN_ABSENCE_SECONDS
from p2pavg.optim.coordination.view import RunView
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.state.average import ProvenAverage
from p2pavg.state.choice import MAX_DONORS, SETTLE_OFFERS_SECONDS, SnapshotOffer, StateNews
from p2pavg.state.joiner.transfers import replayed_success
from p2pavg.state.progress import StateProgress
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import Content, copy_of


def state_at(epoch: int) -> bytes:
    return epoch.to_bytes(32, "big")


def group_at(epoch: int) -> bytes:
    return (1000 + epoch).to_bytes(32, "big")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Common:
    """A state of one number, whose update e adds e."""

    max_bytes = 10_000
    numbers = b""

    def __init__(self) -> None:
        self.lineage = Lineage(3, state_at(3))
        self.value = 6.0

    def prepare(self, content: Content, expected: Lineage) -> Any:
        told = content.values["lineage"]
        if told != {"epoch": expected.epoch, "state": expected.state.hex()}:
            raise StateError("the state is that of another update than its donors say")
        if "value" not in content.tensors:
            raise StateError("the state has no value")

        def take() -> None:
            self.value = float(content.tensors["value"])
            epoch = content.values["lineage"]["epoch"]
            self.lineage = Lineage(epoch, bytes.fromhex(content.values["lineage"]["state"]))

        return take


class Owner:
    def __init__(self, common: Common) -> None:
        self.common = common
        self.adoptions = 0

    def adopted(self) -> None:
        self.adoptions += 1

    def replay(self, averaged: list[torch.Tensor], success: Any) -> None:
        epoch = self.common.lineage.epoch + 1
        assert success.group_id == group_at(epoch).hex()
        self.common.value += float(averaged[0])
        self.common.lineage = Lineage(epoch, state_at(epoch))


class Proven:
    """The content of a certificate, as far as it matters here."""

    sizes = (4,)
    certificate = b""
    robust = False

    def __init__(self, epoch: int, state: bytes, signers: Sequence[str]) -> None:
        self.group_id, self.state = group_at(epoch), state
        self.signers = frozenset(signers)
        self.roster = cast(Any, type("Roster", (), {"contributors": (), "holders": (), "members": ()}))()
        self.roster.total_weight, self.roster.observers = 1.0, ()
        self.roster.metrics_by = lambda **_: {}


class Transfer:
    def __init__(self, what: Any) -> None:
        self.what = what
        self.ended, self.cancelled, self.failure = False, False, ""
        self.stands_still = False
        self.donors: Mapping[str, Any] = {}
        self.told: StateProgress | None = None
        self.averaged = [torch.zeros(1)]
        self.offer = what
        self.group_id = what
        self.content: memoryview = memoryview(b"")
        self.state = b""
        self.decodes = True
        self.signers: Sequence[str] = ()

    def set_donors(self, donors: Mapping[str, Any]) -> None:
        self.donors = donors

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout: float) -> None:
        pass

    def progress(self, about: StateProgress) -> StateProgress:
        return self.told or about

    def data(self) -> Any:
        return memoryview_of(self.content)

    @property
    def before(self) -> bytes | None:
        return self.state if self.ended else None

    def proven(self) -> ProvenAverage:
        epoch = int.from_bytes(self.group_id, "big") - 1000
        return cast(ProvenAverage, Proven(epoch, self.state, self.signers))

    def success(self, averaged: list[torch.Tensor]) -> Any:
        return replayed_success(self.proven(), averaged)

    def decode(self) -> list[torch.Tensor]:
        if not self.decodes:
            raise RemoteProtocolError("an averaged part does not decode")
        return self.averaged


class memoryview_of:  # noqa: N801 - a context manager
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __enter__(self) -> memoryview:
        return self._data

    def __exit__(self, *_: object) -> None:
        pass


class Shelf:
    def __init__(self) -> None:
        self.began: list[int] = []
        self.taken: list[tuple[bytes, int]] = []

    def begin(self, epoch: int) -> None:
        self.began.append(epoch)

    def took(self, average: Any, epoch: int) -> None:
        self.taken.append((average, epoch))


class Sharing:
    average_bytes = 100
    version = 0
    history = None

    def __init__(self) -> None:
        self.others: dict[str, StateNews] = {}
        self.shelf = Shelf()
        self.snapshots: list[Transfer] = []
        self.averages: list[Transfer] = []
        self.said: list[tuple[bool, int]] = []
        self.looks = 0

    def news(self) -> dict[str, StateNews]:
        return self.others

    def deciding(self, news: Mapping[str, StateNews], companions: Collection[str]) -> frozenset[str]:
        return frozenset(name for name, said in news.items() if said.log or said.snapshot)

    def addresses_of(self, news: Mapping[str, StateNews], donors: Any) -> dict[str, tuple[str, ...]]:
        return {name: news[name].addresses for name in donors}

    def publish(self, *, wants: bool, epoch: int) -> None:
        self.said.append((wants, epoch))

    def fetch_snapshot(self, offer: SnapshotOffer) -> Transfer:
        self.snapshots.append(Transfer(offer))
        return self.snapshots[-1]

    def fetch_average(self, group_id: bytes) -> Transfer:
        self.averages.append(Transfer(group_id))
        return self.averages[-1]

    def replayed(self, transfer: Transfer, epoch: int, after: bytes, numbers: bytes) -> None:
        self.shelf.took(transfer.group_id, epoch)

    def poll(self) -> None:
        self.looks += 1

    def wait(self, version: int, timeout: float) -> None:
        pass


def offer_of(epoch: int, root: int = 1) -> SnapshotOffer:
    return SnapshotOffer(epoch=epoch, state=state_at(epoch), root=state_at(root), size=100)


def snapshot_of(epoch: int, value: float, **changes: Any) -> memoryview:
    told: dict[str, Any] = {"lineage": {"epoch": epoch, "state": state_at(epoch).hex()}} | changes
    return copy_of(Content({"value": torch.tensor(value)}, told))


class Run:
    companions: frozenset[str] = frozenset()
    last_members: tuple[str, ...] = ()


class World:
    """One follower, the records of the others, and the transfers that the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(time, "monotonic", self.clock.monotonic)
        self.common, self.sharing = Common(), Sharing()
        self.owner = Owner(self.common)
        self.progress: list[StateProgress] = []
        self.behind = True
        self.few: tuple[str, ...] = ()
        self.run = Run()
        self.follower = Follower(
            cast(StateSharing, self.sharing),
            cast(CommonState, self.common),
            cast(Any, self.owner),
            Ranks(None),
            cast(RunView, self.run),
            self.progress.append,
        )

    def run_is_at(
        self, epoch: int, *, snapshot: SnapshotOffer | None = None, log: int = 8, peers: str = "ab"
    ) -> None:
        names = tuple(group_at(each) for each in range(max(epoch - log, 0) + 1, epoch + 1))
        said = StateNews(wants=False, epoch=epoch, snapshot=snapshot, log=names)
        self.sharing.others = dict.fromkeys(peers, said)

    def advance(self, seconds: float = 0.0) -> Following:
        self.clock.now += seconds
        return self.follower.advance(behind=self.behind, few=self.few)

    def averages_come(self, signers: Sequence[str] = ()) -> None:
        """End all transfers of averages that are on their way, each with the right content.

        Args:
            signers: the members that have signed them.
        """
        for transfer in self.sharing.averages:
            epoch = int.from_bytes(transfer.group_id, "big") - 1000
            transfer.state, transfer.averaged = state_at(epoch - 1), [torch.tensor(float(epoch))]
            transfer.ended, transfer.signers = True, signers

    def snapshot_comes(self, content: memoryview) -> None:
        transfer = self.sharing.snapshots[-1]
        transfer.content, transfer.ended = content, True

    def follow(self) -> Following:
        """Advance until there is nothing on the log to fetch any more."""
        found = self.advance()
        for _ in range(100):
            if found.caught_up:
                break
            self.averages_come()
            found = self.advance()
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_peer_that_missed_few_updates_replays_them(world: World) -> None:
    world.run_is_at(9)
    assert "fetching the average of update 4" in world.advance().reason
    world.behind = False
    assert world.follow().caught_up
    assert (world.common.lineage.epoch, world.common.value) == (9, 45.0)
    assert world.sharing.shelf.taken == [(group_at(epoch), epoch) for epoch in range(4, 10)]
    assert not world.sharing.snapshots
    assert not world.follower.is_active
    assert world.owner.adoptions == 0


def test_a_peer_that_lacks_only_the_news_of_the_next_average_looks_for_it_at_once(world: World) -> None:
    """The others are about to begin the next round."""
    world.run_is_at(4)
    world.advance()
    world.follower.wait(0)
    assert world.sharing.looks == 0, "an average is on its way"
    world.averages_come()
    world.advance()
    world.advance()
    world.follower.wait(0)
    assert world.sharing.looks == 1


def test_a_peer_that_missed_many_updates_takes_a_snapshot_and_replays_the_rest(world: World) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    assert "no peer offers the average of update 4" in world.advance().reason
    assert "fetching the state of update 98" in world.advance().reason
    assert set(world.sharing.snapshots[0].donors) == {"a", "b"}
    world.snapshot_comes(snapshot_of(98, 4851.0))
    assert world.advance().progressed
    assert (world.owner.adoptions, world.sharing.shelf.began, world.sharing.said[-1]) == (1, [98], (True, 98))
    world.behind = False
    assert world.follow().caught_up
    assert (world.common.lineage.epoch, world.common.value) == (100, 5050.0)


def test_a_snapshot_that_no_donor_sends_any_more_is_replaced_by_another(world: World) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    [first] = world.sharing.snapshots
    first.stands_still = True
    world.advance()
    assert not first.cancelled, "no other one is offered"
    world.run_is_at(102, snapshot=offer_of(102))
    assert "fetching the state of update 102" in world.advance().reason
    assert first.cancelled
    first = world.sharing.snapshots[-1]
    world.run_is_at(104, snapshot=offer_of(104))
    assert "fetching the state of update 102" in world.advance().reason, "a donor still sends it"


def test_an_average_that_left_all_logs_while_it_was_fetched_leads_to_a_snapshot(world: World) -> None:
    """Otherwise the peer waits for half a minute until the transfer gives up, and falls further behind."""
    world.run_is_at(9)
    world.advance()
    first = world.sharing.averages[0]
    first.stands_still = True
    assert "fetching the average of update 4" in world.advance().reason, "a peer still offers it"
    first.stands_still = False
    world.run_is_at(12, snapshot=offer_of(12))
    assert "fetching the average of update 4" in world.advance().reason, "a donor still sends it"
    first.stands_still = True
    assert "no peer sends the average of update 4 any more" in world.advance().reason
    assert all(transfer.cancelled for transfer in world.sharing.averages)
    assert "fetching the state of update 12" in world.advance().reason


def test_an_average_of_another_lineage_leads_to_a_snapshot(world: World) -> None:
    world.run_is_at(5, snapshot=offer_of(5))
    world.advance()
    world.averages_come()
    world.sharing.averages[0].state = b"x" * 32
    assert "it needs a snapshot" in world.advance().reason
    assert world.common.value == 6.0
    assert all(transfer.cancelled for transfer in world.sharing.averages[1:])
    assert "fetching the state of update 5" in world.advance().reason


def test_after_a_fork_a_snapshot_of_an_earlier_update_leads_to_the_run(world: World) -> None:
    """The donors keep it: for all other joiners, their logs lead on from it."""
    world.run_is_at(5, snapshot=offer_of(2))
    world.advance()
    world.averages_come()
    world.sharing.averages[0].state = b"x" * 32
    world.advance()
    assert "fetching the state of update 2" in world.advance().reason


def test_late_voters_do_not_take_back_this_peers_updates(world: World) -> None:
    """It is at update 3, and they have not published more than update 2."""
    world.run_is_at(2, snapshot=offer_of(1), log=1)
    world.advance()
    world.advance(MIN_ABSENCE_SECONDS)
    world.advance()
    assert not world.sharing.snapshots


def few_are_ahead(world: World) -> None:
    """Let c go on with a, while this peer, a and b, its last group, slept. a and b are no part of it."""
    world.run.last_members = ("a", "b", "c")
    world.run_is_at(3, peers="ab")
    others = world.sharing.others
    world.run_is_at(5, peers="c", snapshot=offer_of(5))
    world.sharing.others = others | world.sharing.others
    world.few = ("c",)


def test_few_peers_that_are_ahead_are_followed_along_the_averages_that_members_signed(world: World) -> None:
    few_are_ahead(world)
    assert "fetching the average of update 4" in world.advance().reason
    world.averages_come(signers="acx")
    world.advance()
    assert world.common.lineage.epoch == 4


@pytest.mark.parametrize("signers", ["c", "cx", "cxyz", ("me", "c"), ()])
def test_few_peers_that_are_ahead_prove_nothing_without_two_members(
    world: World, signers: Sequence[str]
) -> None:
    """One member that lies can make a group of itself and strangers."""
    few_are_ahead(world)
    world.advance()
    world.averages_come(signers=signers)
    assert "has too few signatures of this peer's last groups" in world.advance(MIN_ABSENCE_SECONDS).reason
    assert (world.common.value, world.common.lineage.epoch) == (6.0, 3)
    world.behind, world.few = False, ()  # it has waited long enough for them
    assert world.advance().caught_up
    assert (world.common.value, world.common.lineage.epoch) == (6.0, 3)


def test_a_snapshot_of_few_peers_is_not_taken(world: World) -> None:
    few_are_ahead(world)
    world.sharing.others["c"] = StateNews(wants=False, epoch=5, snapshot=offer_of(5), log=(group_at(5),))
    for _ in range(100):
        assert not world.advance(1.0).caught_up
    assert not world.sharing.snapshots


def test_a_peer_whose_state_is_useless_takes_the_snapshot_of_most_voters(world: World) -> None:
    world.run_is_at(5, snapshot=offer_of(5))
    world.few = ("c",)
    world.follower.begin(snapshot=True)
    assert "fetching the state of update 5" in world.advance().reason


def test_averages_that_few_peers_have_chosen_are_dropped_when_most_are_ahead(world: World) -> None:
    few_are_ahead(world)
    world.advance()
    first = world.sharing.averages[0]
    world.few = ()
    world.run_is_at(5)
    world.advance()
    assert first.cancelled
    world.behind = False
    assert world.follow().caught_up
    assert world.common.lineage.epoch == 5


@pytest.mark.parametrize("value", [None, torch.nan, torch.inf])
def test_a_signed_average_that_cannot_be_used_leads_to_a_snapshot(world: World, value: float | None) -> None:
    """Any two strangers of an open run can sign it. It is no error of this program."""
    world.run_is_at(5, snapshot=offer_of(5))
    world.advance()
    world.averages_come()
    world.sharing.averages[0].averaged = [torch.tensor(value or 0.0)]
    world.sharing.averages[0].decodes = value is not None
    found = world.advance()
    assert found.failed
    assert "members have signed" in found.reason
    assert world.follower.failures == 1
    assert (world.common.value, world.common.lineage.epoch) == (6.0, 3)


def test_the_run_no_longer_offers_the_log(world: World) -> None:
    world.run_is_at(5)
    world.advance()
    world.sharing.averages[0].failure, world.sharing.averages[0].ended = "no donor has it", True
    assert world.advance().failed
    world.run_is_at(50)
    assert "the next attempt is in" in world.advance().reason
    assert "none offers one yet" in world.advance(FOLLOWING_RETRY_SECONDS).reason


WRONG = {
    "no snapshot": memoryview(b"nonsense"),
    "another update": snapshot_of(97, 1.0),
    "another lineage": snapshot_of(98, 1.0, lineage={"epoch": 98, "state": "00" * 32}),
    "no value": copy_of(Content({}, {"lineage": {}})),
    "an error that no check foresaw": copy_of(Content({}, {})),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_snapshot_keeps_the_old_state_and_is_not_taken_again(world: World, wrong: str) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    world.snapshot_comes(WRONG[wrong])
    found = world.advance()
    assert found.failed
    assert (world.common.value, world.common.lineage.epoch, world.owner.adoptions) == (6.0, 3, 0)
    assert "none offers one yet" in world.advance(RETRY_SECONDS).reason
    assert len(world.sharing.snapshots) == 1
    world.run_is_at(100, snapshot=offer_of(98, root=2))  # of the same update, with other bytes
    world.advance()
    world.snapshot_comes(snapshot_of(98, 4851.0))
    assert world.advance().progressed


def test_a_disk_that_fails_keeps_the_old_state_and_the_same_one_is_fetched_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Transfer) -> None:
        raise StateError("the disk is full")

    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    world.snapshot_comes(snapshot_of(98, 4851.0))
    monkeypatch.setattr(Transfer, "data", fail)
    found = world.advance()
    assert found.failed
    assert "the disk is full" in found.reason
    assert (world.common.value, world.owner.adoptions) == (6.0, 0)
    monkeypatch.undo()
    world.advance(RETRY_SECONDS)
    assert len(world.sharing.snapshots) == 2
    world.snapshot_comes(snapshot_of(98, 4851.0))
    assert world.advance().progressed


def test_a_state_of_another_model_is_not_fetched(world: World) -> None:
    large = SnapshotOffer(epoch=98, state=state_at(98), root=state_at(1), size=Common.max_bytes + 1)
    world.run_is_at(100, snapshot=large)
    world.advance()
    found = world.advance()
    assert found.failed
    assert "it is of another model" in found.reason
    assert not world.sharing.snapshots


def test_pauses_grow_with_each_failure_and_end_with_a_success(world: World) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    pauses = []
    for attempt in range(8):
        world.advance()
        world.sharing.snapshots[attempt].failure, world.sharing.snapshots[attempt].ended = (
            "all are gone",
            True,
        )
        assert world.advance().failed
        pauses.append(0.0)
        while len(world.sharing.snapshots) == attempt + 1:
            assert "all are gone; the next attempt is in" in world.advance().reason
            world.clock.now += 1.0
            pauses[-1] += 1.0
            if world.clock.now >= world.follower._attempts._not_before:
                break
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    world.advance()
    world.snapshot_comes(snapshot_of(98, 4851.0))
    world.advance()
    assert world.follower.failures == 0


def test_drift_leads_to_a_snapshot_of_the_same_update(world: World) -> None:
    world.run_is_at(3, snapshot=offer_of(3))
    world.behind = False
    world.follower.begin(snapshot=True)
    assert "fetching the state of update 3" in world.advance().reason
    world.snapshot_comes(snapshot_of(3, 7.5))
    world.advance()
    assert world.common.value == 7.5
    assert world.advance().caught_up


def test_a_peer_whose_state_is_of_no_use_waits_for_a_snapshot(world: World) -> None:
    world.run_is_at(3)
    world.behind = False
    world.follower.begin(snapshot=True)
    for _ in range(3):
        assert not world.advance(60.0).caught_up


def test_most_peers_hold_another_state_of_this_update(world: World) -> None:
    world.run_is_at(3, snapshot=offer_of(3))
    assert "no peer offers a later state" in world.advance().reason
    world.advance(MIN_ABSENCE_SECONDS)
    assert "fetching the state of update 3" in world.advance().reason


def test_a_peer_goes_on_when_those_that_were_further_are_gone(world: World) -> None:
    """Otherwise it would wait for ever for a snapshot that no peer offers."""
    world.run_is_at(100)
    world.advance()
    assert "none offers one yet" in world.advance(1.0).reason
    world.sharing.others = {}
    assert not world.advance().caught_up  # the run's progress still says that it is behind
    world.behind = False
    assert world.advance().caught_up
    assert (world.common.value, world.follower.is_active) == (6.0, False)


def test_one_lying_peer_does_not_keep_a_peer_from_catching_up(world: World) -> None:
    world.run_is_at(5, peers="abc")
    liar = tuple((5000 + index).to_bytes(32, "big") for index in range(8))
    world.sharing.others["liar"] = StateNews(wants=False, epoch=2**53, log=liar)
    world.behind = False
    assert world.follow().caught_up
    assert world.common.lineage.epoch == 5
    assert {transfer.group_id for transfer in world.sharing.averages} == {group_at(4), group_at(5)}


def test_progress_is_told_about_once_a_second_with_numbers(world: World) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    told = StateProgress(
        reason="half",
        epoch=3,
        target=100,
        bytes_done=1,
        bytes_total=2,
        bytes_per_second=10.0,
        seconds_left=9.0,
        donors=2,
    )
    world.sharing.snapshots[0].told = told
    for _ in range(10):
        world.advance(0.5)
    assert 4 <= len(world.progress) <= 7
    assert world.progress[-1] == told


def test_a_link_that_cannot_keep_up_is_named_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    world.sharing.snapshots[0].told = StateProgress(
        reason="slow", epoch=3, target=100, bytes_per_second=10.0, seconds_left=9.0
    )
    for epoch in range(101, 120):
        world.run_is_at(epoch, snapshot=offer_of(98), log=64)
        world.advance(2.0)
    assert "updates are 50 B/s, this link carries 10 B/s" in caplog.text


def test_a_follower_that_stops_gives_up_its_transfers(world: World) -> None:
    world.run_is_at(9)
    world.advance()
    assert world.follower.is_fetching
    world.follower.stop()
    assert all(transfer.cancelled for transfer in world.sharing.averages)
    assert not world.follower.is_active
    assert not world.follower.is_fetching


def test_small_averages_are_fetched_ahead(world: World) -> None:
    world.run_is_at(9)
    world.advance()
    assert len(world.sharing.averages) == following.MAX_AHEAD


def test_the_pace_of_the_run_is_measured_from_its_updates() -> None:
    pace = UpdatePace()
    assert pace.update_seconds == 0.0
    for update in range(20):
        pace.note(update, 3.0 * update)
        pace.note(update, 3.0 * update + 1.0)
    assert pace.update_seconds == pytest.approx(3.0)
    pace.note(2, 100.0)
    assert pace.update_seconds == 0.0


def test_minority_offers_are_taken_only_after_a_while(world: World) -> None:
    world.run_is_at(100, snapshot=None)
    world.sharing.others["c"] = StateNews(
        wants=False, epoch=100, snapshot=offer_of(99), log=world.sharing.others["a"].log
    )
    world.advance()
    assert "more may follow" in world.advance(SETTLE_OFFERS_SECONDS).reason
    assert not world.sharing.snapshots


def test_strangers_that_repeat_an_offer_are_asked_in_small_numbers(world: World) -> None:
    world.run_is_at(100, snapshot=offer_of(98))
    world.advance()
    world.advance()
    crowd = {f"sybil{index}": said for index, said in enumerate([world.sharing.others["a"]] * 1000)}
    world.sharing.others |= crowd
    world.advance()
    assert len(world.sharing.snapshots[0].donors) == MAX_DONORS
    world.snapshot_comes(snapshot_of(98, 4851.0))
    world.advance()
    world.advance()
    assert all(len(transfer.donors) == MAX_DONORS for transfer in world.sharing.averages)
