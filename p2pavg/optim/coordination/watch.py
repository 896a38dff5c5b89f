"""Publishes this peer's recipe and parameter digests, and compares them with those of the other peers."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

import torch
from msgspec.structs import replace

from p2pavg.base.limits import CALM_LOOK_SECONDS
from p2pavg.base.messages import DecodedWords
from p2pavg.blocking import Averager
from p2pavg.optim.base.recipe import Rate, Settings, rate_of
from p2pavg.optim.base.state import SHORT_BYTES, Lineage, chunk_bounds, short_digests, tensor_digest
from p2pavg.optim.coordination.ending import Waiting
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.word import (
    MAX_RATES,
    TOPIC,
    RecipeRecord,
    differences,
    encode_word,
    keeps_apart,
)
from p2pavg.optim.ranks.shards import local_of
from p2pavg.state.progress import StateProgress
from p2pavg.telemetry.events import Drifted, Progressed, StateMoved, Waits

# Events of an optimizer, for the subscribers of its averager.


def tell_progress(averager: Averager, progress: PeerProgress) -> None:
    """Tell of what this peer publishes of its progress."""
    averager.events.emit(
        Progressed(
            time=time.time(),
            run_id=averager.config.run_id,
            epoch=progress.epoch,
            lineage=progress.state,
            samples=progress.samples,
            samples_per_second=progress.samples_per_second,
            waiting=progress.waiting,
            follows=progress.follows,
        )
    )


def tell_download(averager: Averager, progress: StateProgress) -> None:
    """Tell of a transfer to this peer, if one runs."""
    if progress.bytes_total:
        averager.events.emit(
            StateMoved(
                time=time.time(),
                run_id=averager.config.run_id,
                direction="download",
                done=progress.bytes_done,
                total=progress.bytes_total,
                bytes_per_second=progress.bytes_per_second,
                peers=progress.donors,
            )
        )


def tell_waiting(averager: Averager, waiting: Waiting) -> None:
    """Tell that a call waits for other peers, and why."""
    averager.events.emit(
        Waits(
            time=time.time(),
            run_id=averager.config.run_id,
            reason=waiting.reason or "",
            seconds=waiting.seconds,
            peers=waiting.peers,
        )
    )


# Detection of drift: peers that hold different parameters after the same updates.
#
# Every few updates each peer publishes short digests of its parameters, chunk by chunk. Peers of one lineage should
# publish the same digests. If they do not, the cause is a bug in a program, a faulty computer, or machines that round
# differently.

MAX_NAMED = 3  # peers, parameters and kinds of peers that one sentence names
MAX_ID_CHARS = 16  # of a peer's id in a sentence; enough to find it; ids differ at their ends


def drifted(epoch: int, mine: bytes, others: Mapping[str, bytes], labels: Sequence[str]) -> str | None:
    """Return a sentence on the peers with other parameters and the differing tensors; ``None`` if none differ.

    Args:
        epoch: update after which the digests were taken.
        mine: 8 bytes for each chunk.
        others: the digests that peers of the same lineage published, by peer id.
        labels: a name for each of this peer's tensors.
    """
    same = sum(digests == mine for digests in others.values())
    kinds: dict[bytes, list[str]] = {}
    for peer_id in sorted(others):
        if others[peer_id] != mine:
            kinds.setdefault(others[peer_id], []).append(peer_id)
    if not kinds:
        return None
    largest = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    alike = f" and {same} other{'s' if same > 1 else ''}" if same else ""
    told = [
        f"{_peers(ids)} other parameters after update {epoch} than this one{alike}:"
        f" {_where(mine, digests, labels)}"
        for digests, ids in largest[:MAX_NAMED]
    ]
    more = f"; and {len(largest) - MAX_NAMED} more kinds" if len(largest) > MAX_NAMED else ""
    return "; ".join(told) + more


def outnumbered(mine: bytes, others: Mapping[str, bytes]) -> bool:
    """Return whether more peers published the same other digests than hold this peer's.

    Args:
        mine, others: as for :func:`drifted`.
    """
    counts = Counter(others.values())
    with_me = 1 + counts.pop(mine, 0)
    return max(counts.values(), default=0) > with_me


def _peers(ids: Sequence[str]) -> str:
    named = ", ".join(f"..{peer_id[-MAX_ID_CHARS:]}" for peer_id in ids[:MAX_NAMED])
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    if len(ids) == 1:
        return f"1 peer ({named}) says that it holds"
    return f"{len(ids)} peers ({named}{more}) say that they hold"


def _where(mine: bytes, theirs: bytes, labels: Sequence[str]) -> str:
    if len(mine) != len(theirs):
        return "of another number of tensors"
    differing = [
        f"{labels[first]}" if end - first == 1 else f"{labels[first]} to {labels[end - 1]}"
        for index, (first, end) in enumerate(chunk_bounds(len(labels)))
        if _chunk(mine, index) != _chunk(theirs, index)
    ]
    more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
    return f"{', '.join(differing[:MAX_NAMED])}{more} differ{'s' if len(differing) == 1 else ''}"


def _chunk(digests: bytes, index: int) -> bytes:
    return digests[index * SHORT_BYTES : (index + 1) * SHORT_BYTES]


logger = logging.getLogger(__name__)

ERROR_SECONDS = 60.0  # between two log lines about drift: a lying peer causes at most one line a minute
MAX_WARNINGS = 16  # different sentences to log: a peer that changes its record each time cannot fill the disk
MAX_CHECKS = 4  # of this peer's own digests to keep, for peers that are an update or two away


class DriftMonitor:
    """Compares recipes and parameters with the other peers; not thread-safe.

    Args:
        averager: averager of the run.
        every: number of updates between two digests of the parameters; 0 for none.
        labels: names of the tensors that are compared.
    """

    def __init__(self, averager: Averager, *, every: int, labels: Sequence[str]) -> None:
        self._board = averager.board(TOPIC, CALM_LOOK_SECONDS)
        self._averager = averager
        self._every = every
        self._labels = tuple(labels)
        self._word: RecipeRecord | None = None
        self._rules: frozenset[str] = frozenset()
        self._read = DecodedWords(RecipeRecord)
        self._words: dict[str, RecipeRecord] = {}
        """The other peers' records, as they were when this peer looked last."""
        self._rates: deque[Rate] = deque(maxlen=MAX_RATES)
        self._checks: dict[tuple[int, bytes], bytes] = {}
        self._update = 0
        self._seen = -1
        self._looked_at = 0.0
        self._logged_at = -ERROR_SECONDS
        self._warned: set[str] = set()
        self.outnumbered = False
        """True if more companions hold the same other parameters than hold this peer's, after the same updates."""
        self.drifted: str | None = None
        """Sentence on the peers with other parameters after the same updates; ``None`` if there are none."""
        self.differs: tuple[str, ...] = ()
        """Differences in training between this peer and others, one sentence each."""

    def begins(self, word: RecipeRecord, lineage: Lineage, rules: Collection[str] = ()) -> None:
        """Publish the recipe with which this peer continues from a lineage; forget what belongs to an earlier one.

        Args:
            rules: names of the recipe's settings that never change.
        """
        self._rates.clear()
        self._checks.clear()
        self._rules = frozenset(rules)
        self._word, self._update, self.outnumbered = word, lineage.epoch, False
        self._note(None)
        self._publish()

    def updated(self, lineage: Lineage, numbers: Settings, tensors: Sequence[torch.Tensor]) -> None:
        """Note an update.

        Args:
            lineage: lineage after the update.
            numbers: hyperparameters of the update.
            tensors: the parameters after it, of which it takes the digests every few updates.
        """
        self._update = lineage.epoch
        rate = rate_of(lineage.epoch, numbers)
        if not self._rates or self._rates[-1].digest != rate.digest:
            self._rates.append(rate)
        is_due = self._every > 0 and lineage.epoch % self._every == 0
        if is_due:
            found = short_digests([tensor_digest(local_of(tensor)) for tensor in tensors])
            self._checks[lineage.epoch, lineage.state] = found
            for old in list(self._checks)[:-MAX_CHECKS]:
                del self._checks[old]
            if self._word is not None:
                self._word = replace(self._word, epoch=lineage.epoch, state=lineage.state, digests=found)
            self._publish(now=True)

    def poll(self, companions: Collection[str], *, forked: bool) -> None:
        """Read the others' records, if any may be new.

        Args:
            companions: the peers that took one of the last updates with this one. Only their digests may make this peer
                take their parameters.
            forked: true if some peers have other lineages; this peer then publishes its hyperparameters up to now.
        """
        if self._word is None:
            return
        if forked and self._word.until < self._update:
            self._publish()
        version, now = self._board.version, time.monotonic()
        if version == self._seen and now < self._looked_at + CALM_LOOK_SECONDS:
            return
        self._seen, self._looked_at = version, now
        words = self._words = self._read.of(
            {peer_id: said.value for peer_id, said in self._board.entries.items()}
        )
        mine = replace(self._word, rates=tuple(self._rates), until=self._update)
        self.differs = differences(mine, words.values())
        self._warn()
        self._compare(words, companions)

    def keeps_apart(self, peers: Collection[str]) -> str:
        """Return the difference that keeps this peer from following any of these peers, by their last known records.

        Empty if it could follow one of them, or if none of their records is known.
        """
        known = [self._words[peer_id] for peer_id in peers if peer_id in self._words]
        return "" if self._word is None else keeps_apart(self._word, known, self._rules)

    def _warn(self) -> None:
        for sentence in self.differs:
            if sentence not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(sentence)
                logger.warning("%s", sentence)

    def _compare(self, words: dict[str, RecipeRecord], companions: Collection[str]) -> None:
        """Compare the parameters after the last update for which others of this lineage published digests."""
        for (epoch, state), mine in sorted(self._checks.items(), reverse=True):
            theirs = {
                peer_id: word.digests
                for peer_id, word in words.items()
                if (word.epoch, word.state) == (epoch, state) and len(word.digests) >= SHORT_BYTES
            }
            if not theirs:
                continue
            self._note(drifted(epoch, mine, theirs, self._labels))
            known = {peer_id: digests for peer_id, digests in theirs.items() if peer_id in companions}
            self.outnumbered = outnumbered(mine, known)
            if self.drifted is not None and time.monotonic() >= self._logged_at + ERROR_SECONDS:
                self._logged_at = time.monotonic()
                logger.error("%s", self.drifted)
            return

    def _note(self, sentence: str | None) -> None:
        if sentence != self.drifted:
            # An empty sentence tells that all agree again.
            told = Drifted(time=time.time(), run_id=self._averager.config.run_id, sentence=sentence or "")
            self._averager.events.emit(told)
        self.drifted = sentence

    def _publish(self, *, now: bool = False) -> None:
        if self._word is None:
            return
        self._word = replace(self._word, rates=tuple(self._rates), until=self._update)
        self._seen = -1  # there is more to compare the others' records with now
        self._board.publish(encode_word(self._word), now=now)
