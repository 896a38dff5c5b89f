"""A donor's duties, checkpoints, and the start of a run that begins again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2pavg.base.errors import StateError
from p2pavg.base.limits import GLANCE_SECONDS, WARN_WAIT_SECONDS
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim import RunState
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.catching_up import states
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.states import (
    IN_USE_SECONDS,
    LATER_FAILURES,
    LATER_STATE_SECONDS,
    REST,
    UNWANTED_SECONDS,
    States,
)
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.state.choice import SnapshotOffer, StateNews
from p2pavg.state.donor.shelf import HeldSnapshot, Shelf
from p2pavg.state.snapshot import Content
from p2pavg.state.tree import chunk_digests, root_of
from tests.unit.optim.loops import small

SIZE = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Common:
    max_bytes = 10**9
    numbers = b""
    labels = ()
    buffers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.lineage = Lineage(10, b"s" * 32)
        self.copies = 0
        self.wrong: Exception | None = None

    def check_saves(self) -> None:
        if self.wrong is not None:
            raise self.wrong

    def content(self, *, named: bool = False) -> Content:
        self.copies += 1
        if self.wrong is not None:
            raise self.wrong
        lineage = {"epoch": self.lineage.epoch, "state": self.lineage.state.hex()}
        return Content({"value": torch.zeros(SIZE // 4)}, {"lineage": lineage})

    def prepare(self, content: Content, expected: Lineage | None = None) -> Callable[[], None]:
        def take() -> None:
            told = content.values["lineage"]
            self.lineage = Lineage(told["epoch"], bytes.fromhex(told["state"]))

        return take


class Sharing:
    """Offers of a donor, with work that is done at once or when the test wants."""

    average_bytes = 100
    version = 0
    history = None

    def __init__(self) -> None:
        self.shelf = Shelf(2**24)
        self.others: dict[str, StateNews] = {}
        self.said: list[tuple[bool, int]] = []
        self.is_working = False
        self.works: list[Callable[[], None]] = []
        self.at_once = True

    def news(self) -> dict[str, StateNews]:
        return self.others

    def deciding(self, news: Mapping[str, StateNews], companions: Collection[str]) -> frozenset[str]:
        return frozenset(name for name, said in news.items() if said.epoch > 0 and not said.wants)

    def addresses_of(self, news: Mapping[str, StateNews], donors: Any) -> dict[str, tuple[str, ...]]:
        return {}

    def publish(self, *, wants: bool, epoch: int) -> None:
        self.said.append((wants, epoch))

    def took(self, group_id: bytes, epoch: int, after: bytes, numbers: bytes) -> None:
        self.shelf.begin(epoch)

    def offer(self, data: memoryview, epoch: int, state: bytes) -> None:
        digests = chunk_digests(data)
        offer = SnapshotOffer(epoch=epoch, state=state, root=root_of(digests, len(data)), size=len(data))
        self.in_background(lambda: self.shelf.put(HeldSnapshot(offer, data, digests)))

    def in_background(self, work: Callable[[], None]) -> None:
        if self.at_once:
            work()
        else:
            self.is_working = True
            self.works.append(work)

    def wait(self, version: int, timeout: float) -> None:
        raise AssertionError("nothing is to be waited for")


class Run:
    has_started = False
    is_start = True
    companions: frozenset[str] = frozenset({"friend"})
    behind = False

    def __init__(self) -> None:
        self.followed: list[bool] = []
        self.remembered: frozenset[str] = frozenset()

    last_members: frozenset[str] = frozenset()

    def is_behind(self) -> bool:
        return self.behind

    def is_behind_few(self) -> tuple[bool, frozenset[str]]:
        return self.behind, frozenset()

    def are_asleep(self, peers: Collection[str]) -> bool:
        return False

    def follow(self, follows: bool) -> None:
        self.followed.append(follows)

    def remember(self, companions: frozenset[str]) -> None:
        self.remembered = companions

    def run_end(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"inner": 7}
        self.loaded: Any = None

    def adopted(self) -> None: ...

    def own_state(self) -> dict[str, Any]:
        return self.kept

    def load_own(self, saved: Mapping[str, Any]) -> None:
        self.loaded = dict(saved)


class World:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, directory: Path | None = None, **settings: Any
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(time, "monotonic", self.clock.monotonic)
        self.sharing, self.common, self.owner, self.run = Sharing(), Common(), Owner(), Run()
        self.run_state = RunState(small(), directory, **settings)
        sharing = self.sharing
        averager = type("Averager", (), {"share_states": lambda _self, _settings: sharing})()
        together = type(
            "RoundCoordinator",
            (),
            {"run": self.run, "waits": lambda *_: None, "waits_no_more": lambda *_: None},
        )()
        self.states = States(
            self.run_state,
            cast(Averager, averager),
            cast(CommonState, self.common),
            cast(Any, self.owner),
            cast(RoundCoordinator, together),
            Ranks(None),
        )

    def poll(self, seconds: float = GLANCE_SECONDS) -> None:
        self.clock.now += seconds
        self.states.poll()

    def wants(self, *peers: str) -> None:
        self.sharing.others = dict.fromkeys(peers, StateNews(wants=True, epoch=0))

    def took(self, epoch: int) -> None:
        self.common.lineage = Lineage(epoch, epoch.to_bytes(32, "big"))
        success = type(
            "Success", (), {"group_id": "00" * 32, "peers": ("a", "b"), "certificate": b"signed"}
        )()
        self.states.took(cast(Success, success))

    @property
    def held(self) -> int | None:
        found = self.sharing.shelf.snapshot
        return None if found is None else found.offer.epoch


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class TestDonors:
    def test_a_snapshot_is_taken_only_when_one_is_wanted(self, world: World) -> None:
        world.poll()
        assert (world.held, world.common.copies) == (None, 0)
        world.wants("joiner")
        world.poll()
        assert world.held == 10
        assert world.sharing.said[-1] == (False, 10)

    def test_at_most_one_copy_is_held(self, world: World) -> None:
        world.wants("joiner")
        for _ in range(50):
            world.poll()
        assert world.common.copies == 1
        world.sharing.shelf.begin(12)  # the log leads no longer from the snapshot to the present
        world.took(12)
        world.sharing.at_once = False
        world.poll(60.0)
        assert (world.held, world.common.copies, len(world.sharing.works)) == (None, 2 + 1, 1)
        for _ in range(5):
            world.poll(60.0)
        assert len(world.sharing.works) == 1  # one copy at a time, also while it is hashed

    def test_an_unwanted_snapshot_is_dropped(self, world: World) -> None:
        world.wants("joiner")
        world.poll()
        world.wants()
        world.poll(UNWANTED_SECONDS - 1.0)
        assert world.held == 10
        world.poll(1.0)
        assert world.held is None

    def test_a_snapshot_that_is_read_is_kept(self, world: World) -> None:
        world.wants("joiner")
        world.poll()
        world.wants()
        snapshot = world.sharing.shelf.snapshot
        assert snapshot is not None
        for _ in range(5):
            world.poll(UNWANTED_SECONDS - 1.0)
            world.sharing.shelf.piece(0, snapshot.offer.root, 0)
        assert world.held == 10

    def test_a_stranger_that_wants_for_ever_costs_a_bounded_part_of_the_time(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow_copy(content: Content) -> memoryview:
            world.clock.now += 1.0
            return memoryview(bytes(100))

        monkeypatch.setattr(states, "copy_of", slow_copy)
        world.wants("stranger")
        copies, began = [], world.clock.now
        for epoch in range(11, 1011):
            world.sharing.shelf.begin(epoch)  # as if the log held one average
            world.common.lineage = Lineage(epoch, epoch.to_bytes(32, "big"))
            before = world.common.copies
            world.poll(0.5)
            copies.append(world.common.copies - before)
        assert sum(copies) <= 1 + (world.clock.now - began) / (1.0 + REST)
        assert sum(copies) > 10

    @pytest.mark.parametrize("wrong", [StateError("the value 'x' is a set"), MemoryError()], ids=repr)
    def test_a_peer_that_asks_for_a_state_never_ends_a_donor(
        self, world: World, wrong: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.wants("joiner")
        world.common.wrong = wrong
        for _ in range(300):
            world.poll()
        assert (world.held, len(caplog.records)) == (None, 1)
        assert "cannot offer its state" in caplog.text
        assert world.common.copies <= 1 + 300 * GLANCE_SECONDS / IN_USE_SECONDS
        world.common.wrong = None
        world.poll(IN_USE_SECONDS)
        assert world.held == 10

    def test_a_value_that_cannot_be_saved_ends_the_step_of_the_peer_that_has_it(self, world: World) -> None:
        world.took(11)
        world.common.wrong = StateError("the value 'x' is a set")
        with pytest.raises(StateError, match="is a set"):
            world.took(12)

    def test_a_peer_that_follows_offers_nothing_and_says_so(self, world: World) -> None:
        world.wants("joiner")
        world.states.follower.begin()
        world.poll()
        assert (world.held, world.sharing.said[-1]) == (None, (True, 10))


class TestStart:
    """All peers begin again, each with the checkpoint that it has."""

    def others_are_at(self, world: World, *epochs: int) -> None:
        offer = SnapshotOffer(epoch=1, state=bytes(32), root=bytes(32), size=1)
        world.sharing.others = {
            f"peer{index}": StateNews(wants=False, epoch=epoch, snapshot=offer)
            for index, epoch in enumerate(epochs)
        }

    def follows(self, world: World) -> bool:
        return world.states.must_follow(None, outnumbered=False)

    @pytest.mark.parametrize(
        ("epochs", "expected"),
        [
            ((), False),
            ((10,), False),
            ((11,), True),
            ((9, 11), True),
            ((10, 10, 11), True),
            ((11, 11, 9), True),
        ],
    )
    def test_a_peer_follows_the_latest_checkpoint(
        self, world: World, epochs: tuple[int, ...], expected: bool
    ) -> None:
        self.others_are_at(world, *epochs)
        assert self.follows(world) is expected

    def test_peers_that_give_no_state_hold_up_a_start_for_a_limited_time(self, world: World) -> None:
        self.others_are_at(world, 2**53)
        assert self.follows(world)
        world.clock.now += LATER_STATE_SECONDS - 1.0
        assert self.follows(world)
        world.clock.now += 1.0
        assert not self.follows(world)
        world.clock.now += 1e6
        assert not self.follows(world)

    def test_a_step_does_not_wait_longer_than_that(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wait(version: int, timeout: float) -> None:
            world.clock.now += timeout

        monkeypatch.setattr(world.sharing, "wait", wait)
        self.others_are_at(world, 2**53)
        began = world.clock.now
        assert self.follows(world)
        following = world.states.catch_up(began + 1e6)
        assert following.over
        assert world.clock.now - began <= LATER_STATE_SECONDS + 2.0
        assert not self.follows(world)

    def test_transfers_that_fail_hold_up_a_start_a_few_times(self, world: World) -> None:
        self.others_are_at(world, 2**53)
        assert self.follows(world)
        for _ in range(LATER_FAILURES):
            world.states.follower._attempts.failed("gone", 0.0)
        assert not self.follows(world)

    def test_a_start_waits_for_a_transfer_that_runs(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.others_are_at(world, 11)
        monkeypatch.setattr(type(world.states.follower), "is_fetching", True)
        for _ in range(5):
            assert self.follows(world)
            world.clock.now += LATER_STATE_SECONDS - 1.0

    def test_a_run_that_goes_on_has_no_start(self, world: World) -> None:
        self.others_are_at(world, 11)
        world.run.has_started = True
        assert not self.follows(world)
        world.run.has_started, world.run.is_start = False, False
        assert not self.follows(world)

    def test_a_peer_that_is_behind_follows_without_a_limit(self, world: World) -> None:
        for _ in range(5):
            assert world.states.must_follow("it is behind", outnumbered=False)
            world.clock.now += LATER_STATE_SECONDS


class TestUseless:
    """The last update of this peer was interrupted, and no other peer offers a state."""

    @pytest.fixture
    def alone(self, world: World, monkeypatch: pytest.MonkeyPatch) -> World:
        def wait(version: int, timeout: float) -> None:
            world.clock.now += timeout

        monkeypatch.setattr(world.sharing, "wait", wait)
        world.states.fetch_state()
        assert world.states.must_follow(None, outnumbered=False)
        return world

    def test_it_goes_on_after_a_while(self, alone: World) -> None:
        began = alone.clock.now
        assert alone.states.catch_up(began + 1e6).over
        assert alone.clock.now - began <= WARN_WAIT_SECONDS + 2.0
        assert not alone.states.must_follow(None, outnumbered=False)
        alone.poll()
        assert alone.sharing.said[-1] == (False, 10), "peers that join may have its state"

    def test_it_goes_on_although_each_call_is_short(self, alone: World) -> None:
        calls = 0
        while alone.states.must_follow(None, outnumbered=False):
            alone.states.catch_up(alone.clock.now)
            alone.clock.now += 1.0
            calls += 1
            assert calls < 30
        assert calls > 5

    def test_it_waits_for_peers_that_have_a_state(self, alone: World) -> None:
        alone.sharing.others = {"other": StateNews(wants=False, epoch=11)}
        for _ in range(30):
            alone.states.catch_up(alone.clock.now)
            alone.clock.now += 1.0
        assert alone.states.must_follow(None, outnumbered=False)

    def test_its_state_is_not_mended_by_a_log_later(self, alone: World) -> None:
        alone.states.catch_up(alone.clock.now + 1e6)
        assert alone.states.must_follow("it is behind", outnumbered=False)
        assert not alone.states.follower.is_on_the_log


def test_a_peer_that_is_outnumbered_fetches_the_others_state_more_and_more_rarely(world: World) -> None:
    begun = 0
    for _ in range(600):
        world.states.follower.stop()
        begun += world.states.must_follow(None, outnumbered=True)
        world.clock.now += 1.0
    assert 1 < begun < 10


class TestCheckpoints:
    def at(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> World:
        return World(monkeypatch, path, every=5, keep=2)

    def test_they_are_written_every_few_updates_and_the_oldest_are_removed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        world = self.at(monkeypatch, tmp_path)
        for epoch in range(1, 18):
            world.took(epoch)
        names = sorted(path.name for path in tmp_path.glob("update-*"))
        assert names == ["update-000000000010.safetensors", "update-000000000015.safetensors"]

    def test_a_checkpoint_that_is_due_while_another_one_is_written_comes_after_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        world = self.at(monkeypatch, tmp_path)
        world.sharing.at_once = False
        world.took(5)
        world.took(10)
        assert len(world.sharing.works) == 1  # one copy of the state at a time
        world.sharing.works.pop()()
        world.sharing.is_working, world.sharing.at_once = False, True
        world.took(11)
        names = sorted(path.name for path in tmp_path.glob("update-*"))
        assert names == ["update-000000000005.safetensors", "update-000000000011.safetensors"]

    def test_a_full_disk_costs_a_checkpoint_and_not_the_training(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def is_full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        world = self.at(monkeypatch, tmp_path)
        world.took(5)
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", is_full)
            world.took(10)
        assert "no checkpoint of update 10: cannot write the checkpoint" in caplog.text
        assert "No space left on device" in caplog.text
        assert [path.name for path in tmp_path.glob("*")] == ["update-000000000005.safetensors"]
        world.took(15)
        assert len(list(tmp_path.glob("update-*"))) == 2

    def test_extras_that_cannot_be_saved_cost_a_checkpoint_and_not_the_update(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = self.at(monkeypatch, tmp_path)
        world.run_state.extras["hook"] = print
        world.took(5)
        assert "no checkpoint of update 5" in caplog.text
        assert "extras/hook" in caplog.text

    def test_a_new_process_continues_from_the_newest(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        world = self.at(monkeypatch, tmp_path)
        world.run_state.extras["data_position"] = 3
        world.took(5)
        again = self.at(monkeypatch, tmp_path)
        again.states.load_newest()
        assert again.common.lineage == Lineage(5, (5).to_bytes(32, "big"))
        assert again.owner.loaded == {"inner": 7}
        assert again.run_state.extras == {"data_position": 3}
        assert again.run.remembered == {"friend"}
        assert again.sharing.shelf.epoch == 5

    def test_without_a_directory_nothing_is_loaded(self, world: World) -> None:
        world.states.load_newest()
        assert world.owner.loaded is None


def test_the_log_has_twice_the_size_of_a_snapshot_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(states, "MIN_LOG_BYTES", 1)
    asked: list[int] = []
    monkeypatch.setattr(world.sharing.shelf, "set_log_bytes", asked.append)
    world.took(11)
    world.took(12)
    assert asked == [2 * SIZE]


# ---------------------------------------------------------------------- a peer that cannot join its run


@pytest.mark.parametrize(
    ("members_only", "ahead", "ends"),
    [(False, "named", True), (False, "stranger", False), (True, "stranger", True)],
)
def test_only_members_and_peers_that_were_named_end_a_program(
    monkeypatch: pytest.MonkeyPatch, members_only: bool, ahead: str, ends: bool
) -> None:
    """The record of a stranger in an open run may say anything."""
    world = World(monkeypatch)
    world.common.lineage = Lineage(0, b"s" * 32)
    states, sharing, run = world.states, cast(Any, world.sharing), cast(Any, world.run)
    sharing.members_only, sharing.bootstrap = members_only, frozenset({"named"})
    run.peers_ahead = lambda: (ahead,)
    together = cast(Any, states._together)
    together.watch = SimpleNamespace(
        keeps_apart=lambda peers: f"{', '.join(sorted(peers))} trains another architecture" if peers else ""
    )
    if not ends:
        states.check_company()
        return
    with pytest.raises(StateError, match=f"cannot join its run: {ahead} trains another architecture"):
        states.check_company()
