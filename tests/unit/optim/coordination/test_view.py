"""One peer's view of its run over time: no word of one liar holds it up for long, however often it begins anew."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from p2pavg.optim.base.state import Lineage
from p2pavg.optim.coordination import view
from p2pavg.optim.coordination.attendance import WOKEN_SECONDS
from p2pavg.optim.coordination.progress import LeftBehind, PeerProgress
from p2pavg.optim.coordination.view import NOTE, RunView
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.run_file import PeerFiles
from p2pavg.runs.records.board import Entry
from p2pavg.testing.simulation import simulated_signer
from tests.unit.runs.membership.runs import Authority

STEP = 0.25
"""Seconds between two looks."""
LAST = 300.0


class Board:
    """The words of the others, as a test sets them."""

    def __init__(self) -> None:
        self.words: dict[str, PeerProgress] = {}
        self.version = 0

    @property
    def entries(self) -> dict[str, Entry]:
        return {peer: Entry(word.encode(), 0, 1e18) for peer, word in self.words.items()}

    def publish(self, value: bytes, *, now: bool = False) -> None:
        """Nobody reads it."""


def state_of(epoch: int) -> bytes:
    return hashlib.sha256(b"%d" % epoch).digest()


def word(epoch: int, age: float, every: float) -> PeerProgress:
    """Return the word of a peer that trains, at some seconds after the update."""
    return PeerProgress(
        epoch=epoch,
        state=state_of(epoch),
        samples=8.0 * int(age) + 1.0,
        samples_per_second=8.0,
        waiting=age > every - 1.0,
        batch_seconds=1.0,
        started=True,
    )


class Run:
    """Peers that take an update every few seconds, a liar, and the view of one more peer."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        every: float,
        honest: int,
        member: bool,
        config: AveragingConfig | None = None,
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.every = every
        self.honest = {f"honest {index}" for index in range(honest)}
        self.group = self.honest | ({"liar"} if member else set())
        self.board = Board()
        averager = SimpleNamespace(
            board=lambda *_: self.board,
            events=SimpleNamespace(emit=lambda _event: None),
            config=config or AveragingConfig(run_id="run"),
            peer_id="me",
        )
        lineage = Lineage(5, state_of(5))
        self.view = RunView(cast(Any, averager), lineage, target=float("inf"), peers_to_start=1, least=2)
        self.view.comes_back = True
        self.began = self.now
        self.held = 0.0

    def look(self, lie: PeerProgress | None) -> None:
        """Hear the others, and follow the log if they have gone on."""
        age = (self.now - self.began) % self.every
        epoch = 5 + int((self.now - self.began) // self.every)
        self.board.words = {peer: word(epoch, age, self.every) for peer in self.honest}
        if lie is not None:
            self.board.words["liar"] = lie
        if self.view.lineage.epoch < epoch and age > 0.5:
            behind, few = self.view.is_behind_few()
            if behind and not few:
                self.follow(epoch)
        if isinstance(self.view.decide(), LeftBehind) and self.view.lineage.epoch == epoch:
            self.held += STEP
        self.now += STEP

    def follow(self, epoch: int) -> None:
        self.view.is_at(Lineage(epoch, state_of(epoch)))
        self.view.was_in(self.group)
        self.view.publish(0.0, waiting=False)


LIE = PeerProgress(
    epoch=2**53, state=b"L" * 32, samples=0.0, samples_per_second=0.0, waiting=False, started=True
)


@pytest.mark.parametrize(("every", "honest"), [(2.0, 2), (10.0, 20), (25.0, 2)])
@pytest.mark.parametrize("member", [True, False], ids=["a member", "a stranger"])
def test_one_liar_holds_up_a_peer_that_follows_the_log_for_a_bounded_time_in_all(
    monkeypatch: pytest.MonkeyPatch, every: float, honest: int, member: bool
) -> None:
    """Each replayed update begins its trust in others anew, and used to begin the time anew, too."""
    run = Run(monkeypatch, every=every, honest=honest, member=member)
    run.follow(5)
    while run.now < run.began + LAST:
        run.look(LIE)
    # Time in which it hears of an update of the others counts for none of them.
    assert run.held <= (1.5 * WOKEN_SECONDS if member else every)


def test_a_liar_with_a_new_word_for_each_update_is_no_better_off(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, every=10.0, honest=3, member=True)
    run.follow(5)
    while run.now < run.began + LAST:
        ahead = run.view.lineage.epoch + 1
        run.look(structs.replace(LIE, epoch=ahead, state=bytes([ahead % 256]) * 32))
    assert run.held <= 1.5 * WOKEN_SECONDS


def test_a_round_with_a_peer_gives_its_claims_their_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest peers are ahead for a moment again and again, and the moments must not add up over a run."""
    run = Run(monkeypatch, every=10.0, honest=3, member=True)
    run.follow(5)
    while run.now < run.began + 100.0:
        run.look(LIE)
    held = run.held
    run.view.took(run.group, Lineage(run.view.lineage.epoch, run.view.lineage.state))
    run.follow(run.view.lineage.epoch)
    while run.now < run.began + 200.0:
        run.look(LIE)
    assert run.held > held + WOKEN_SECONDS / 2


def test_peers_with_another_version_of_the_program_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(
        monkeypatch, every=10.0, honest=3, member=False, config=AveragingConfig(run_id="run", version=2)
    )
    # Three peers at the same update, which would all be ahead, and one that is far ahead.
    run.board.words = {f"old {index}": word(6, 1.0, 10.0) for index in range(3)}
    run.board.words["older"] = structs.replace(word(90, 1.0, 10.0), version=1)
    seen = run.view.survey()
    assert (seen.peers, seen.others, seen.ahead) == (1, 0, None)
    run.board.words["same"] = structs.replace(word(5, 1.0, 10.0), version=2)
    assert run.view.survey().peers == 2


@pytest.mark.parametrize(
    ("note", "epoch", "words", "changes"),
    [
        (None, 9, [], False),
        ("2 7", 6, [], False),
        ("2 7", 7, [], True),
        ("2 7", 9, [], True),
        ("2 7", 3, [(2, 6), (2, 6), (1, 3)], False),
        ("2 7", 3, [(2, 7), (2, 8), (1, 3)], True),  # most others have changed already
        ("2 7", 3, [(2, 7), (1, 3), (1, 3)], False),  # one that says so, and may lie
        ("2 7", 3, [(2, 90), (2, 6), (2, 5)], False),
        ("3 7", 3, [(2, 90), (2, 90)], False),
        ("", 9, [], False),
        ("7", 9, [], False),
        ("2 -7", 9, [], False),
        ("two seven", 9, [], False),
    ],
)
def test_a_program_makes_room_for_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    note: str | None,
    epoch: int,
    words: list[tuple[int, int]],
    changes: bool,
) -> None:
    files = PeerFiles(tmp_path, tmp_path / "run", tmp_path / "cert", tmp_path / "key", tmp_path / "gate")
    config = AveragingConfig(
        run_id="run", version=1, access=Authority().access(simulated_signer(0)), files=files
    )
    run = Run(monkeypatch, every=10.0, honest=0, member=False, config=config)
    if note is not None:
        (tmp_path / NOTE).write_text(note)
    run.view.is_at(Lineage(epoch, state_of(epoch)))
    run.view.publish(0.0, waiting=False)
    for index, (version, at) in enumerate(words):
        run.board.words[str(index)] = structs.replace(word(at, 1.0, 10.0), version=version)
    assert bool(run.view.other_job) == changes


def test_a_program_of_no_job_hears_of_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, every=10.0, honest=0, member=False)
    assert (run.view.change, run.view.other_job) == (None, "")
