"""One peer's part in a population: it publishes, decides, copies and goes on. Its calls wait in the training thread."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from p2pavg.base.errors import ConfigError, RemoteProtocolError, StateError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.population.history import MAX_ANCESTORS, Ancestor, GenerationReport, History
from p2pavg.population.rules import Counted, counted, decide, ranked, worst
from p2pavg.population.settings import PopulationSettings, Value, is_number
from p2pavg.population.weights import Weights
from p2pavg.population.words import MAX_MEMBER_CHARS, Standing, Word, in_order, is_member_name, lineage_after
from p2pavg.runs.records.board import Topic
from p2pavg.state.choice import SnapshotOffer
from p2pavg.state.donor.shelf import HeldSnapshot
from p2pavg.state.joiner.transfers import SnapshotTransfer
from p2pavg.state.progress import amount
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import copy_of, read
from p2pavg.state.tree import chunk_digests, root_of

logger = logging.getLogger(__name__)

STILL_SECONDS = 8.0
"""A copy is given up when no donor has been of use for so long."""
MAX_TRIES = 3
"""Members that one peer tries to copy at the end of a generation; after that it keeps its own weights."""
MAX_DISTRUSTED = 256
"""Members whose weights were worse than they said, or unusable; the earliest are forgotten."""
ORIGIN = bytes(32)
"""Lineage of weights that have not been trained."""


Evaluate = Callable[[], float]
"""Returns the score of the present weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """Options of one member, which the others need not share. See :class:`~p2pavg.population.Population`."""

    member: str = ""
    wait: float = 0.0
    members: int = 0
    verify: bool = True
    copy_timeout: float = 600.0
    start: Mapping[str, Value] | None = None

    def __post_init__(self) -> None:
        name = self.member
        # The same limits as for the words of others: they would refuse a word with any other name.
        if not isinstance(name, str) or (name and not is_member_name(name)):
            raise ConfigError(f"member must be text of at most {MAX_MEMBER_CHARS} printable ASCII characters")
        for what, seconds in (("wait", self.wait), ("copy_timeout", self.copy_timeout)):
            if not is_number(seconds) or not 0 <= seconds < math.inf:
                raise ConfigError(f"{what} must be a number of seconds from 0, got {seconds!r}")
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 0:
            raise ConfigError(f"members must be a whole number from 0, got {self.members!r}")


class Core:
    """One member of a population.

    Args:
        board: the run's board of words.
        sharing: the states of the run's peers.
        weights: the model and its optimizer.
        peer_id: this peer.
    """

    def __init__(
        self,
        board: Topic,
        sharing: StateSharing,
        weights: Weights,
        settings: PopulationSettings,
        options: MemberOptions,
        *,
        peer_id: str,
    ) -> None:
        self._board = board
        self._sharing = sharing
        self._weights = weights
        self._settings = settings
        self._options = replace(options, member=options.member or peer_id)
        self._peer_id = peer_id
        start = settings.first(self._options.member) if options.start is None else options.start
        # A start that the caller gave is checked too: other members do not count a word that is out of range.
        self.life = Life(settings.checked(start))
        self.history = History(settings)
        self._heard = _ReadRecords(board, self.history)
        self._distrusted: OrderedDict[str, str] = OrderedDict()
        self._mine: Standing | None = None
        """This member's last word."""
        self._holds: Standing | None = None
        """The word whose weights this member went on with: its last one, or that of the member that it copied."""
        self._used: dict[str, bytes] = {}
        """Digests of the words on which the last decision rested, by peer id."""
        # The first generation already trains with them.
        weights.apply(self.life.hyperparameters)

    def poll(self) -> None:
        """Remember the words that others have published since the last call."""
        self._heard.poll()

    def finish(self, score: float, evaluate: Evaluate | None) -> GenerationReport:
        """End a generation.

        Args:
            score: of the present weights.
            evaluate: checks weights that are copied; ``None`` to take them unchecked.
        """
        began = time.monotonic()
        # The word and the weights go out first: other members may wait for both while this one decides.
        mine = self._publish(score)
        self._wait_for_others(mine)
        found = self._counted(mine)
        # At the end of the next generation, these words are old: their members are late.
        self._used = {peer: its.digest for peer, its in found.words.items()}
        failures: dict[str, str] = {}
        failed: set[bytes] = set()
        while True:
            # Each failure is part of the decision, so that other members can repeat the one that is
            # published.
            made, reason = decide(self._peer_id, mine, found.words, self._settings, failed=failed)
            donor = next((peer for peer, its in found.words.items() if its.digest == made.donor), None)
            if donor is None:
                break
            # The shelf has the weights of this generation's end, since its word was published before any copy.
            held = self._sharing.shelf.snapshot
            assert held is not None
            failure = self._copy(donor, found.words[donor], mine, evaluate, held.data)
            if not failure:
                break
            failures[donor] = failure
            failed.add(made.donor)
            if len(failures) >= MAX_TRIES:
                # The next decision then keeps this member's own weights, for a reason that other members can
                # repeat, too.
                failed |= {its.digest for its in found.words.values()}
        self._adopt(mine if donor is None else found.words[donor], dict(made.hyperparameters))
        # With the same standing: the decisions of other members rest on its digest.
        self._publish_word(Word(standing=mine, decision=made))
        logger.info("generation %d, score %g: %s", mine.generation, mine.score, reason)
        return GenerationReport(
            generation=mine.generation,
            score=score,
            reason=reason,
            copied_from=donor,
            hyperparameters=dict(made.hyperparameters),
            counted=tuple(sorted(found.words)),
            refused=found.refused,
            failures=failures,
            seconds=time.monotonic() - began,
        )

    def take_best(self, evaluate: Evaluate | None) -> str | None:
        """Take the weights of the member with the best score; return its peer id, or ``None`` if it is this one.

        Raises:
            ValueError: this member has not finished a generation.
        """
        mine, holds = self._mine, self._holds
        if mine is None or holds is None:
            raise ValueError("this member has not finished a generation, so there is nothing to compare with")
        words = self._counted(mine).words
        # The best first. Scores are claims, so the next best is tried when a copy fails.
        order = reversed(ranked(words, self._settings))
        better = [peer for peer in order if self._settings.better(words[peer].score, holds.score)]
        if not better:
            return None
        # Not those of the shelf: this member may have copied another one, or trained, since its last word.
        present = copy_of(self._weights.content(self.life.ancestors))
        for donor in better[:MAX_TRIES]:
            failure = self._copy(donor, words[donor], holds, evaluate, present)
            if not failure:
                self._adopt(words[donor], dict(words[donor].hyperparameters))
                return donor
        return None

    # ------------------------------------------------------------------ the word

    def _publish(self, score: float) -> Standing:
        life = self.life
        life.generation += 1
        life.steps += life.since
        life.since = 0
        # NaN has no order, and other members refuse it. The worst score tells them that this training has
        # diverged.
        shown = score if math.isfinite(score) else worst(self._settings)
        name, pairs = self._options.member, in_order(life.hyperparameters)
        life.ancestors = (
            *life.ancestors,
            Ancestor(name, life.generation, life.steps, shown, dict(life.hyperparameters)),
        )[-MAX_ANCESTORS:]
        parent = life.lineage
        life.lineage = lineage_after(parent, self._peer_id, life.generation, pairs)
        # A copy, because training goes on in these tensors while other members fetch them.
        data = copy_of(self._weights.content(life.ancestors))
        digests = chunk_digests(data)
        root = root_of(digests, len(data))
        offer = SnapshotOffer(epoch=life.generation, state=life.lineage, root=root, size=len(data))
        # The former one stays: others may have decided to copy it, and have not begun yet.
        self._sharing.shelf.put(HeldSnapshot(offer, data, digests), keeps_former=True)
        self._sharing.publish(wants=False, epoch=life.generation)
        mine = Standing(
            settings=self._settings.digest,
            member=name,
            generation=life.generation,
            steps=life.steps,
            score=float(shown),
            hyperparameters=pairs,
            lineage=life.lineage,
            parent=parent,
            root=root,
            size=len(data),
        ).normalised()
        # The snapshot is on the shelf before the word names it: other members may fetch it as soon as they
        # read the word.
        # Whatever follows in this generation, this member has these weights now.
        self._mine = self._holds = mine
        self._publish_word(Word(standing=mine))
        return mine

    def _publish_word(self, word: Word) -> None:
        # At once, since other members may wait for it.
        self._board.publish(word.encode(), now=True)
        # The board shows a peer the entries of the others only.
        self.history.note(self._peer_id, word)

    def _wait_for_others(self, mine: Standing) -> None:
        """Wait until the others have finished this generation too, for at most the option's seconds.

        The first generation waits until so many members are there, too. Later, those that have left are not missed.
        """
        members = self._options.members if mine.generation == 1 else 0
        until = time.monotonic() + self._options.wait
        while (left := until - time.monotonic()) > 0:
            # Read before the words: an entry that comes between the two ends the wait below at once.
            version = self._board.version
            self.poll()
            found = self._counted(mine).words
            # Some are late: behind this member, with nothing new since the last decision. A member that joined late
            # stays behind in steps, so any new word of it is enough.
            late = any(
                its.steps < mine.steps and self._used.get(peer) == its.digest for peer, its in found.items()
            )
            if not late and self._heard.members(mine) >= members and (found or mine.generation > 1):
                return
            # A peer that stores no entries of this topic hears of new ones only when it asks.
            self._board.poll()
            self._board.wait(version, min(left, GLANCE_SECONDS))

    def _counted(self, mine: Standing) -> Counted:
        self.poll()
        words = {peer: word.standing for peer, word in self._heard.words.items()}
        # Left out before the words are chosen: such a member takes no place among them, and moves no median.
        trusted = {peer: word for peer, word in words.items() if peer not in self._distrusted}
        found = counted(mine, trusted, self._settings)
        barred = {peer: self._distrusted[peer] for peer in words.keys() - trusted.keys()}
        return Counted(found.words, {**self._heard.malformed, **found.refused, **barred})

    def _adopt(self, its: Standing, hyperparameters: dict[str, Value]) -> None:
        """Go on with weights that are loaded, and with other hyperparameters."""
        self._holds = its
        # From the signed word, not from the snapshot, which only has to match the word's root.
        self.life.steps, self.life.lineage = its.steps, its.lineage
        self.life.hyperparameters = hyperparameters
        self._weights.apply(hyperparameters)

    # ------------------------------------------------------------------ another member's weights

    def _copy(
        self, donor: str, its: Standing, mine: Standing, evaluate: Evaluate | None, present: memoryview
    ) -> str:
        """Take the weights of another member; return the reason if that failed. Then this member has what it had.

        Args:
            mine: the word whose weights this member has now.
            present: those weights, as a snapshot.
        """
        former = self.life.ancestors
        try:
            failure = self._load(donor, its)
            if failure:
                logger.warning("this member could not copy %s: %s", its.member, failure)
                return failure
            # Without a function, there is no score but the one that the donor claims.
            if evaluate is None or not self._options.verify:
                return ""
            score = float(evaluate())
        # The caller must not be left with the weights of two members, or with some that no score has confirmed.
        except BaseException:  # the evaluation failed, or Ctrl-C interrupted it or the copy
            self._take_back(present, former)
            raise
        # The donor's claim does not count here: only what its weights score on this member.
        if math.isfinite(score) and not self._settings.better(mine.score, score):
            return ""
        self._take_back(present, former)
        scores = f"it says {its.score:g}, and they scored {score:g} here"
        failure = f"its weights are worse than this member's own, which scored {mine.score:g}: {scores}"
        self._distrust(donor, failure)
        logger.warning(
            "this member takes back its own weights instead of those of %s: %s", its.member, failure
        )
        return failure

    def _load(self, donor: str, its: Standing) -> str:
        # Before anything is reserved or fetched: a word may name any size.
        if its.size > self._weights.max_bytes:
            most = amount(self._weights.max_bytes)
            failure = f"its state has {amount(its.size)}, and this model's has at most {most}"
            self._distrust(donor, failure)
            return failure
        offer = SnapshotOffer(epoch=its.generation, state=its.lineage, root=its.root, size=its.size)
        transfer = self._sharing.fetch_snapshot(offer)
        try:
            failure = self._fetch(transfer, donor, its)
        finally:
            if not transfer.ended:
                # Ctrl-C, or a copy that is given up: the transfer runs in trio's thread, and would go on
                # there.
                transfer.cancel()
        if failure:
            return failure
        with transfer.data() as data:
            try:
                # The whole state is checked before anything of this member changes.
                loaded = self._weights.prepare(read(data))
            except StateError as error:
                # The bytes have the root that the donor has signed, so no other peer has changed them.
                self._distrust(donor, f"its state cannot be used: {error}")
                return f"its state cannot be used: {error}"
            loaded.take()
        self.life.ancestors = loaded.ancestors
        return ""

    def _fetch(self, transfer: SnapshotTransfer, donor: str, its: Standing) -> str:
        """Wait until a snapshot is here; return the reason if that failed, or an empty text."""
        began = useful = time.monotonic()
        while not transfer.ended:
            now = time.monotonic()
            # Anew in each turn: donors come and go while the copy runs.
            self.poll()
            news = self._sharing.news()
            same = {
                peer: said.addresses
                for peer, said in news.items()
                if said.snapshot is not None and said.snapshot.root == its.root
            }
            # The publisher counts even if its news name a later snapshot: it keeps the former one.
            donors = {donor: news[donor].addresses if donor in news else ()} | same
            transfer.set_donors(donors)
            useful = useful if transfer.stands_still else now
            # Any peer with the same snapshot can finish the copy, also after the member has left.
            if donor not in self._heard.words and donors.keys() == {donor}:
                return "it has left"
            if now - useful > STILL_SECONDS:
                return f"it has not sent anything of use for {STILL_SECONDS:.0f} s"
            if now - began > self._options.copy_timeout:
                return f"the copy took longer than copy_timeout, {self._options.copy_timeout:g} s"
            transfer.wait(GLANCE_SECONDS)
        return transfer.failure

    def _take_back(self, present: memoryview, ancestors: tuple[Ancestor, ...]) -> None:
        """Load the weights that this member had before it copied another one's."""
        self._weights.restore(read(present))
        self.life.ancestors = ancestors

    def _distrust(self, peer: str, reason: str) -> None:
        self._distrusted[peer] = reason
        # In an open run, a liar can come back under any number of identities.
        while len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)


class Life:
    """The generations of one member so far."""

    def __init__(self, hyperparameters: Mapping[str, Value]) -> None:
        self.hyperparameters = dict(hyperparameters)
        self.generation = 0
        """Generations that are over."""
        self.steps = 0
        """Steps of training in the weights, up to the last generation's end."""
        self.since = 0
        """Steps of this generation."""
        self.lineage = ORIGIN
        self.ancestors: tuple[Ancestor, ...] = ()


class _ReadRecords:
    """The words on the board. A word is read once."""

    def __init__(self, board: Topic, history: History) -> None:
        self._board = board
        self._history = history
        self._version = -1
        self._seen: dict[str, int] = {}
        self.words: dict[str, Word] = {}
        self.malformed: dict[str, str] = {}

    def members(self, mine: Standing) -> int:
        """Return the number of members that have published anything, this one included; some may not count."""
        said = {
            word.standing.member for word in self.words.values() if word.standing.settings == mine.settings
        }
        return len(said | {mine.member})

    def poll(self) -> None:
        """Read the words that have changed."""
        # The version first: what comes between the two is read in the next look. An entry that expires
        # changes the entries but not the version, so both are compared.
        version, entries = self._board.version, self._board.entries
        if version == self._version and entries.keys() == self._seen.keys():
            return
        self._version = version
        fresh = {peer: said.value for peer, said in entries.items() if self._seen.get(peer) != said.sequence}
        found, malformed = {}, {}
        for peer, value in fresh.items():
            try:
                found[peer] = Word.decode(value)
            except RemoteProtocolError as error:
                malformed[peer] = str(error)
            else:
                self._history.note(peer, found[peer])
        self._seen = {peer: said.sequence for peer, said in entries.items()}
        changed = {**self.words, **found}
        # A member whose newest word is malformed counts with none: its older word is no longer what it says.
        self.words = {peer: changed[peer] for peer in entries if peer in changed and peer not in malformed}
        still = {**self.malformed, **malformed}
        self.malformed = {peer: still[peer] for peer in entries if peer in still and peer not in found}
