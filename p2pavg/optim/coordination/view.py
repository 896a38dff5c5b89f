"""One peer's view of its run: publishes its progress, and surveys that of the other peers."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from p2pavg.base.limits import CALM_LOOK_SECONDS, LOOK_SECONDS
from p2pavg.base.messages import DecodedWords, decoded_all
from p2pavg.blocking import Averager
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.coordination.attendance import (
    KNOWN_UPDATES,
    MIN_ABSENCE_SECONDS,
    PAUSE_BATCHES,
    PeerTrust,
    VainClaims,
)
from p2pavg.optim.coordination.ending import LastWord, RunEnd, run_end
from p2pavg.optim.coordination.progress import (
    MAX_BATCH_SECONDS,
    MAX_SAMPLES,
    Average,
    Decision,
    LeftBehind,
    PeerProgress,
    Survey,
    WaitForPeers,
    decide,
    survey,
)
from p2pavg.optim.coordination.watch import tell_progress
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.board import Topic

# The change from one version of a run's job to the next, as a program hears of it that `p2pavg join` has started.

NOTE = "next"
"""Name of the file, in the folder that is handed to a job's program, with the next version and the update after which
it takes over. The process that has the network writes it when it has verified the authority's signature."""
_MAX_CHARS = 64


@dataclass(frozen=True, slots=True)
class JobNote:
    """The content of the file."""

    version: int
    since: int

    @property
    def text(self) -> str:
        """The file's text."""
        return f"{self.version} {self.since}\n"


class JobChange:
    """The note of a program's folder.

    Args:
        note: its file, which is there once the authority has released another version.
    """

    def __init__(self, note: Path) -> None:
        self._note = note

    @classmethod
    def of(cls, config: AveragingConfig) -> JobChange | None:
        """Return the change of a program behind a gate; ``None`` for any other, whose user starts the next version."""
        behind_gate = config.files is not None and config.files.gate is not None
        return cls(config.files.folder / NOTE) if behind_gate and config.files is not None else None

    def reason(self, mine: PeerProgress, others: Collection[PeerProgress]) -> str:
        """Return the reason why the next version takes over now; empty if it does not, or not yet.

        Args:
            others: the words of the other peers, of all versions.
        """
        try:
            with self._note.open() as opened:
                text = opened.read(_MAX_CHARS).strip()
        except FileNotFoundError:
            return ""
        if not re.fullmatch("[0-9]+ [0-9]+", text, re.ASCII):
            return ""
        note = JobNote(*map(int, text.split()))
        epoch = mine.epoch
        # A peer that missed the update sees that the others have changed. One peer alone, which may lie, or has begun
        # too early, does not decide.
        changed = [word.epoch for word in others if word.version == note.version]
        if len(changed) > sum(word.version == mine.version for word in others):
            epoch = max(epoch, statistics.median_low(changed))
        return (
            f"the next version of the job takes over after update {note.since}" if epoch >= note.since else ""
        )


TOPIC = "progress"
LAST_WORDS = "ends"
"""The topic of the last words of peers that take no further update. They live for minutes, so that calm looks do for
those that do not come by themselves."""
SPEED_WEIGHT = 0.2  # weight of the newest batch in the moving average of samples per second
BATCHES = 8  # in the median of batch times, which ignores a single batch delayed by an evaluation


class BatchPace:
    """The speed of one peer and the time that its batches take; calls are given ``now``.

    Args:
        now: seconds of the clock that all calls use.
    """

    def __init__(self, now: float) -> None:
        self.samples_per_second = 0.0
        """A moving average; 0 before the first batch."""
        self._batches: deque[float] = deque(maxlen=BATCHES)
        self.last = now
        """When the last batch was computed, or the wait after it ended."""

    @property
    def batch_seconds(self) -> float:
        """Median time of the last batches; 0 before the first one."""
        return statistics.median(self._batches) if self._batches else 0.0

    def computed(self, batch: float, now: float) -> None:
        """Note that a batch of this many samples was computed."""
        if now > self.last:
            self._batches.append(min(now - self.last, MAX_BATCH_SECONDS))
            speed = batch / (now - self.last)
            # The first batch counts in full: an average that begins at 0 would take many batches to come near.
            share = SPEED_WEIGHT if self.samples_per_second else 1.0
            self.samples_per_second = min((1 - share) * self.samples_per_second + share * speed, MAX_SAMPLES)
        self.last = now

    def rested(self, now: float) -> None:
        """Exclude the time up to now from the next batch's time."""
        self.last = now


class RunView:
    """Publishes one peer's progress and decides from that of the others; not thread-safe.

    Args:
        averager: averager of the run.
        lineage: lineage of this peer's parameters at the beginning.
        target: number of samples, of all peers together, that make a round due; infinite if every peer counts its own
            steps.
        peers_to_start: number of peers that this peer's first round needs.
        least: number of peers that an update needs; 1 if this peer may take updates alone.
        overlaps: true if each peer counts its own steps, and goes on with them while a round runs.
        sync_timeout: seconds for which a call waits for other peers.
    """

    hands_over: ClassVar[bool] = True
    """False if the peers of the run have no common updates, so that there is nothing to hand over at the end."""

    def __init__(
        self,
        averager: Averager,
        lineage: Lineage,
        *,
        target: float,
        peers_to_start: int,
        least: int,
        overlaps: bool = False,
        sync_timeout: float = 0.0,
    ) -> None:
        self.lineage = lineage
        self.peers_to_start = peers_to_start
        self._remembered: frozenset[str] = frozenset()
        self._follows = False
        self._left = False
        self._groups: deque[frozenset[str]] = deque(maxlen=KNOWN_UPDATES)
        self._target = target
        self._least = least
        self._overlaps = overlaps
        self.hurries = False
        """True if the next round is to be without the peers that still compute."""
        self.comes_back = False
        """True if this peer can fetch the run's state when it is behind; an optimizer that shares states sets it."""
        self.differs: tuple[str, ...] = ()
        """The known differences in training between this peer and others."""
        self._version = averager.config.version
        self.change = JobChange.of(averager.config)
        """Tells when another version of the job takes over; ``None`` if this program never hears of one."""
        self._board = averager.board(TOPIC)
        self._averager = averager
        self._sync_timeout = sync_timeout
        self._last_words: Topic | None = None
        now = time.monotonic()
        self.pace = BatchPace(now)
        """The speed of this peer's batches."""
        self._vain = VainClaims()
        self._read = DecodedWords(PeerProgress)
        self._attendance = PeerTrust(now, overlaps=overlaps)
        self.mine = self._progress(0.0, waiting=False)
        """This peer's own word."""
        # The others learn of this peer before its first batch, because the first round includes all present peers.
        self._publish(now=True)

    # ------------------------------------------------------------------ publishing

    def was_stepped(self, at: float) -> bool:
        """Return whether the loop that computed this peer's batches still did so at a moment.

        Other peers judge in the same way whether to expect this peer. Optimizers with rounds in the background count
        as not stepped: they do not keep the loop.
        """
        pause = max(PAUSE_BATCHES * self.pace.batch_seconds, MIN_ABSENCE_SECONDS)
        return not self._overlaps and at < self.pace.last + pause

    def publish(self, samples: float, *, waiting: bool) -> None:
        """Publish this peer's progress.

        Args:
            samples: samples accumulated since the last update.
            waiting: true if there will be no more until the next update.
        """
        before, self.mine = self.mine, self._progress(samples, waiting=waiting)
        if self._overlaps:  # the round goes on for many steps
            self._publish(now=waiting and not before.waiting)
        else:
            # Others may wait for a word that leads to a round, so it goes out at once. Any other one goes out soon.
            self._publish(now=isinstance(self.decide(), Average | WaitForPeers))

    def stand_by(self) -> None:
        """Publish that this peer has stopped computing, because it is in a call that waits for the others."""
        if not self.mine.waiting:
            self.mine = replace(self.mine, waiting=True)
            self._publish()

    def follow(self, follows: bool) -> None:
        """Publish whether this peer replays the run's last updates, and will observe the next round."""
        if follows != self._follows:
            self._follows = follows
            self.mine = self._progress(0.0, waiting=follows)
            self._publish(now=True)

    def end(self) -> None:
        """Publish that this peer takes no further update, and stays to hand over what other peers lack."""
        self._left = True
        self.mine = self._progress(0.0, waiting=False)
        self._publish(now=True)

    def resume(self) -> None:
        """Note that this peer takes part again after :meth:`end` or :meth:`say_last`; its next word says so."""
        self._left = False
        if self._last_words is not None:
            self._last_words.withdraw()

    def _publish(self, *, now: bool = False) -> None:
        self._board.publish(self.mine.encode(), now=now)
        tell_progress(self._averager, self.mine)

    def leave(self) -> None:
        """Withdraw this peer's progress: no other peer waits for this one until it publishes again."""
        self._board.withdraw()

    def _progress(self, samples: float, *, waiting: bool) -> PeerProgress:
        return PeerProgress(
            epoch=self.lineage.epoch,
            state=self.lineage.state,
            samples=samples,
            samples_per_second=self.pace.samples_per_second,
            # A peer that replays updates computes no batch, so the others need not wait for one.
            waiting=waiting or self._follows,
            batch_seconds=self.pace.batch_seconds,
            started=self._attendance.started,
            follows=self._follows,
            left=self._left,
            version=self._version,
        ).normalised()

    # ------------------------------------------------------------------ the other peers

    @property
    def has_started(self) -> bool:
        """True if this peer has taken an update with others since it began, or since it loaded a state."""
        return self._attendance.started

    @property
    def is_start(self) -> bool:
        """True while no peer of the run has taken an update since it began, or began again."""
        self.survey()  # the next line depends on it
        return self._attendance.is_start(self.mine)

    @property
    def companions(self) -> frozenset[str]:
        """Ids of the peers that took one of the last updates with this one; before that, those of the last one that it
        has taken from the log; after a start, the remembered ones."""
        return self._attendance.known or self._attendance.logged or self._remembered

    @property
    def last_group(self) -> frozenset[str]:
        """Ids of the other members of the last group with which this peer's process took an update, or replayed one."""
        return self._groups[-1] if self._groups else frozenset()

    @property
    def last_members(self) -> frozenset[str]:
        """Ids of the other members of its last groups."""
        return frozenset().union(*self._groups)

    def was_in(self, group: Iterable[str]) -> None:
        """Note the other members of a group whose update this peer has taken, in its round or from the log."""
        if members := frozenset(group):
            self._groups.append(members)
            self._attendance.replayed(members)

    def forget_groups(self) -> None:
        """Note that this peer begins anew, from a state that its program loaded."""
        self._groups.clear()

    def are_asleep(self, peers: Iterable[str]) -> bool:
        """Return whether all of these peers have computed nothing for long, or say nothing at all."""
        self.survey()  # the next line depends on it
        return all(self._attendance.is_asleep(peer, time.monotonic()) for peer in peers)

    def remember(self, companions: AbstractSet[str]) -> None:
        """Note the companions of an earlier process of this peer."""
        self._remembered = frozenset(companions)

    def peers_ahead(self) -> tuple[str, ...]:
        """Return the ids of the peers whose state the run goes on with; empty if it goes on with this peer's."""
        return self.survey().ahead_peers

    def is_behind(self) -> bool:
        """Return whether the run goes on with another state than this peer's."""
        return isinstance(self.decide(), LeftBehind)

    def is_behind_few(self) -> tuple[bool, frozenset[str]]:
        """Return :meth:`is_behind`, and the peers that are ahead if they are few (:attr:`Survey.few_ahead`)."""
        seen = self.survey()
        behind = isinstance(self.decide(seen), LeftBehind)
        return behind, frozenset(seen.ahead_peers if behind and seen.few_ahead else ())

    @property
    def version(self) -> int:
        """A number that grows whenever a word of another peer changes."""
        return self._board.version

    def wait(self, version: int, timeout: float) -> None:
        """Block until :attr:`version` is above ``version``, for at most ``timeout`` seconds."""
        self._board.wait(version, timeout)

    def poll(self) -> None:
        """Ask for the words of the other peers now, without waiting for the next regular look."""
        self._board.poll()

    def survey(self) -> Survey:
        """Return the run as this peer sees it."""
        now = time.monotonic()
        seen = self._attendance.receive(self.mine, self.words, now)
        stays = self._attendance.stays(self.mine, now)
        # Without states it cannot follow those that went on, and without a group it could not tell whether they did.
        if not self.comes_back or not self._groups:
            stays, seen = True, tuple(dataclasses.replace(peer, stays=True) for peer in seen)
        vain = self._vain.peers
        seen = tuple(dataclasses.replace(peer, in_vain=peer.peer_id in vain) for peer in seen)
        found = survey(self.mine, seen, self.differs, stays=stays)
        self._vain.note(found.ahead_peers if found.few_ahead else (), now)
        return found

    @property
    def words(self) -> dict[str, PeerProgress]:
        """The live words of the other peers with this version of the program: a run goes on with no others."""
        return {peer_id: word for peer_id, word in self._all_words().items() if word.version == self._version}

    def _all_words(self) -> dict[str, PeerProgress]:
        said = {peer_id: word.value for peer_id, word in self._board.entries.items()}
        return self._read.of(said)

    @property
    def other_job(self) -> str:
        """The reason why another version of the job takes over from this program now; empty if none does."""
        if self.change is None:
            return ""
        return self.change.reason(self.mine, self._all_words().values())

    @property
    def is_called(self) -> bool:
        """True if this peer has joined a run in which all others wait for its batch alone."""
        seen = self.survey()  # first, because the next line depends on it
        return self._attendance.joins(self.mine) and seen.others_wait

    def decide(self, seen: Survey | None = None) -> Decision:
        """Decide what this peer does now; ``seen`` is a survey made just before, if there is one."""
        seen = self.survey() if seen is None else seen
        return decide(
            self.mine,
            seen,
            target=self._target,
            peers_to_start=self.peers_to_start,
            least=self._least,
            at_once=self._overlaps,
            hurries=self.hurries,
            settled=self._attendance.is_settled(self.mine, seen.peers, self.peers_to_start, time.monotonic()),
        )

    # ------------------------------------------------------------------ last words

    def say_last(self) -> None:
        """Publish that this peer has stopped after its last update."""
        self._topic().publish(LastWord(self.lineage.epoch, self.lineage.state).encode(), now=True)

    @property
    def last_words(self) -> dict[str, LastWord]:
        """The last words of the other peers that have ended."""
        return decoded_all({peer: entry.value for peer, entry in self._topic().entries.items()}, LastWord)

    def _topic(self) -> Topic:
        """Return the board of last words, which this peer opens when it first needs it.

        A last word lives for ``sync_timeout``, as long as a call of ``step`` waits for others: a peer that was away for
        less still reads it.
        """
        if self._last_words is None:
            self._last_words = self._averager.board(LAST_WORDS, CALM_LOOK_SECONDS, lasts=self._sync_timeout)
        return self._last_words

    def run_end(self) -> RunEnd | None:
        """Return the end of the run, if it has ended without this peer.

        While the members of its last group are there and train, it reads nothing but their words.
        """
        group = self.last_group
        if not group:
            return None
        words = self.words
        present = sum(peer_id in words and not words[peer_id].left for peer_id in group)
        if 2 * present >= len(group):
            return None
        is_first, topic = self._last_words is None, self._topic()
        if is_first:  # it looks before this peer begins anything with the peers that are left
            topic.poll()
            topic.wait(topic.version, LOOK_SECONDS)
            words = self.words
        return run_end(self.mine, group, words, self.last_words, follows=self.comes_back)

    # ------------------------------------------------------------------ updates

    def took(self, companions: AbstractSet[str], after: Lineage) -> None:
        """Note an update that this peer took with others.

        Args:
            companions: ids of the other peers.
            after: lineage after the update.
        """
        now = time.monotonic()
        self._follows = self.hurries = False
        self.pace.rested(now)
        # The words are judged by this peer's state before the update, so the lineage changes last.
        words = self.words
        self._attendance.took(companions, self.mine, words, now)
        # What an honest peer's claims have cost in many short pauses does not add up for ever.
        self._vain.proved(companions)
        self.was_in(companions)
        self._reach(after)

    def no_group_formed(self) -> None:
        """Note a round to which no other peer came within the match timeout."""
        self._attendance.no_group_formed(self.mine, self.words, time.monotonic())

    def _reach(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self._vain.proved(peer for peer, word in self.words.items() if word.state == lineage.state)

    def is_at(self, lineage: Lineage) -> None:
        """Note that the parameters were replaced by those of another lineage, or by earlier ones of the same."""
        self._reach(lineage)
        # No other peer has taken an update with these parameters yet, so all are newcomers.
        self._attendance.begin(time.monotonic())
