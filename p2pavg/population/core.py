"""One peer's part in a population: it publishes, decides, copies and goes on. No waiting, no thread of its own.

:meth:`Core.finish` is a generator. It yields what it needs, a :class:`Pause` or an :class:`Evaluate`, and its driver
does it: :mod:`p2pavg.population.population` in an ordinary thread, :mod:`p2pavg.population.concurrent` in trio.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.population.copying import LOOK_SECONDS, Donors, Pause, donors_of, fetch
from p2pavg.population.history import History
from p2pavg.population.lineage import MAX_ANCESTORS, Ancestor
from p2pavg.population.report import GenerationReport
from p2pavg.population.rules import Counted, counted, decide, ranked, worst
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Value
from p2pavg.population.weights import Weights
from p2pavg.population.words import (
    MAX_MEMBER_CHARS,
    Decision,
    Standing,
    Word,
    encode_word,
    in_order,
    lineage_after,
    read_words,
)
from p2pavg.runs.records.board import Topic
from p2pavg.state.donor.shelf import HeldSnapshot
from p2pavg.state.joiner.transfers import SnapshotTransfer
from p2pavg.state.news import SnapshotOffer
from p2pavg.state.progress import amount
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import copy_of, read
from p2pavg.state.tree import chunk_digests, root_of

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Members that one peer tries to copy at the end of a generation; after that it keeps its own weights."""
MAX_DISTRUSTED = 256
"""Members whose weights were worse than they said, or unusable; the earliest are forgotten."""
ORIGIN = bytes(32)
"""Lineage of weights that have not been trained."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The core needs the score of the present weights."""


Flow: TypeAlias = Generator[Pause | Evaluate, float | None, GenerationReport]
Taking: TypeAlias = Generator[Pause | Evaluate, float | None, "str | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one member, which the others need not share. See :class:`~p2pavg.population.Population`."""

    member: str = ""
    wait: float = 0.0
    members: int = 0
    verify: bool = True
    copy_timeout: float = 600.0
    start: Mapping[str, Value] | None = None

    def __post_init__(self) -> None:
        name = self.member
        if (
            not isinstance(name, str)
            or not (name.isascii() and name.isprintable())
            or len(name) > MAX_MEMBER_CHARS
        ):
            raise ConfigError(f"member must be text of at most {MAX_MEMBER_CHARS} printable ASCII characters")
        for what, seconds in (("wait", self.wait), ("copy_timeout", self.copy_timeout)):
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not number or not 0 <= seconds < math.inf:
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
        clock: seconds, at any pace that never goes back.
    """

    def __init__(
        self,
        board: Topic,
        sharing: StateSharing,
        weights: Weights,
        settings: PopulationSettings,
        options: Options,
        *,
        peer_id: str,
        clock: Callable[[], float],
    ) -> None:
        if sharing.belongs_to_several:
            raise ValueError(
                "averager is one of a process that shares its peer with others, whose states are not a member's: "
                "give each member of a population a peer of its own, with open_averager"
            )
        self._board = board
        self._sharing = sharing
        self._weights = weights
        self._settings = settings
        self._options = replace(options, member=options.member or peer_id)
        self._peer_id = peer_id
        self._clock = clock
        start = settings.first(self._options.member) if options.start is None else options.start
        self.life = Life(settings.checked(start))
        self.history = History(settings)
        self._heard = _Heard(board, self.history)
        self._distrusted: OrderedDict[str, str] = OrderedDict()
        self._mine: Standing | None = None
        """This member's last word."""
        self._used: dict[str, bytes] = {}
        """Digests of the words on which the last decision rested, by peer id."""
        weights.apply(self.life.hyperparameters)

    def look(self) -> None:
        """Remember the words that others have published since the last call."""
        self._heard.look()

    def finish(self, score: float, *, can_evaluate: bool) -> Flow:
        """End a generation.

        Args:
            score: of the present weights.
            can_evaluate: true if the driver answers an :class:`Evaluate`.
        """
        began = self._clock()
        mine = self._publish(score)
        yield from self._wait_for_others(mine)
        found = self._counted(mine)
        self._used = {peer: its.digest for peer, its in found.words.items()}
        failures: dict[str, str] = {}
        failed: set[bytes] = set()
        while True:
            made = decide(self._peer_id, mine, found.words, self._settings, failed=failed)
            donor = next((peer for peer, its in found.words.items() if its.digest == made.donor), None)
            if donor is None:
                break
            failure = yield from self._copy(donor, found.words[donor], mine, verify=can_evaluate)
            if not failure:
                break
            failures[donor] = failure
            failed.add(made.donor)
            if len(failures) >= MAX_TRIES:
                failed |= {its.digest for its in found.words.values()}
        self._conclude(mine, made, None if donor is None else found.words[donor])
        return GenerationReport(
            generation=mine.generation,
            score=score,
            reason=made.reason,
            copied_from=donor,
            hyperparameters=dict(made.hyperparameters),
            counted=tuple(sorted(found.words)),
            refused=found.refused,
            failures=failures,
            seconds=self._clock() - began,
        )

    def take_best(self, *, can_evaluate: bool) -> Taking:
        """Take the weights of the member with the best score; return its peer id, or ``None`` if it is this one.

        Raises:
            ValueError: this member has not finished a generation.
        """
        mine = self._mine
        if mine is None:
            raise ValueError("this member has not finished a generation, so there is nothing to compare with")
        words = self._counted(mine).words
        order = reversed(ranked(words, self._settings))
        better = [peer for peer in order if self._settings.better(words[peer].score, mine.score)]
        for donor in better[:MAX_TRIES]:
            failure = yield from self._copy(donor, words[donor], mine, verify=can_evaluate)
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
        shown = score if math.isfinite(score) else worst(self._settings)
        name, pairs = self._options.member, in_order(life.hyperparameters)
        life.ancestors = (
            *life.ancestors,
            Ancestor(name, life.generation, life.steps, shown, dict(life.hyperparameters)),
        )[-MAX_ANCESTORS:]
        parent = life.lineage
        life.lineage = lineage_after(parent, self._peer_id, life.generation, pairs)
        data = copy_of(self._weights.content(life.ancestors))
        digests = chunk_digests(data)
        root = root_of(digests, len(data))
        offer = SnapshotOffer(epoch=life.generation, state=life.lineage, root=root, size=len(data))
        # The former one stays: others may have decided to copy it, and have not begun yet.
        self._sharing.shelf.put(HeldSnapshot(offer, data, digests), keeps_former=True)
        self._sharing.say(wants=False, epoch=life.generation)
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
        )
        self._mine = mine
        self._say(Word(standing=mine))
        return mine

    def _say(self, word: Word) -> None:
        self._board.publish(encode_word(word), now=True)
        self.history.note(self._peer_id, word)

    def _wait_for_others(self, mine: Standing) -> Generator[Pause, float | None, None]:
        """Wait until the others have finished this generation too, for at most the option's seconds.

        The first generation waits until so many members are there, too. Later, those that have left are not missed.
        """
        members = self._options.members if mine.generation == 1 else 0
        until = self._clock() + self._options.wait
        while (left := until - self._clock()) > 0:
            version = self._board.version
            self.look()
            found = self._counted(mine).words
            late = any(self._is_late(peer, its, mine) for peer, its in found.items())
            if not late and self._heard.members(mine) >= members and (found or mine.generation > 1):
                return
            self._board.look()
            yield Pause(version, min(left, LOOK_SECONDS))

    def _is_late(self, peer: str, its: Standing, mine: Standing) -> bool:
        """Return whether another member is behind this one, and has said nothing new since the last decision."""
        return its.steps < mine.steps and self._used.get(peer) == its.digest

    def _counted(self, mine: Standing) -> Counted:
        self.look()
        words = {peer: word.standing for peer, word in self._heard.words.items()}
        trusted = {peer: word for peer, word in words.items() if peer not in self._distrusted}
        found = counted(mine, trusted, self._settings)
        barred = {peer: self._distrusted[peer] for peer in words.keys() - trusted.keys()}
        return Counted(found.words, {**self._heard.malformed, **found.refused, **barred})

    def _conclude(self, mine: Standing, made: Decision, donor: Standing | None) -> None:
        self._adopt(donor or mine, dict(made.hyperparameters))
        self._say(Word(standing=mine, decision=made))
        logger.info("generation %d, score %g: %s", mine.generation, mine.score, made.reason)

    def _adopt(self, its: Standing, hyperparameters: dict[str, Value]) -> None:
        """Go on with weights that are loaded, and with other hyperparameters."""
        self.life.steps, self.life.lineage = its.steps, its.lineage
        self.life.hyperparameters = hyperparameters
        self._weights.apply(hyperparameters)

    # ------------------------------------------------------------------ another member's weights

    def _copy(
        self, donor: str, its: Standing, mine: Standing, *, verify: bool
    ) -> Generator[Pause | Evaluate, float | None, str]:
        """Take the weights of another member; return the reason if that failed. Then this member has its own."""
        failure = yield from self._load(donor, its)
        if failure:
            logger.warning("this member could not copy %s: %s", its.member, failure)
            return failure
        if not verify or not self._options.verify:
            return ""
        try:
            score = yield Evaluate()
        except BaseException:  # the evaluation failed, or was interrupted
            self._take_back()
            raise
        assert score is not None
        if math.isfinite(score) and not self._settings.better(mine.score, score):
            return ""
        self._take_back()
        scores = f"it says {its.score:g}, and they scored {score:g} here"
        failure = f"its weights are worse than this member's own, which scored {mine.score:g}: {scores}"
        self._distrust(donor, failure)
        logger.warning(
            "this member takes back its own weights instead of those of %s: %s", its.member, failure
        )
        return failure

    def _load(self, donor: str, its: Standing) -> Generator[Pause, float | None, str]:
        if its.size > self._weights.max_bytes:
            most = amount(self._weights.max_bytes)
            failure = f"its state has {amount(its.size)}, and this model's has at most {most}"
            self._distrust(donor, failure)
            return failure
        offer = SnapshotOffer(epoch=its.generation, state=its.lineage, root=its.root, size=its.size)
        transfer = self._sharing.fetch_snapshot(offer)
        try:
            failure = yield from self._fetch(transfer, donor, its)
        finally:
            if not transfer.ended:
                transfer.cancel()
        if failure:
            return failure
        with transfer.data() as data:
            try:
                loaded = self._weights.prepare(read(data))
            except StateError as error:
                self._distrust(donor, f"its state cannot be used: {error}")
                return f"its state cannot be used: {error}"
            loaded.take()
        self.life.former, self.life.ancestors = self.life.ancestors, loaded.ancestors
        return ""

    def _fetch(
        self, transfer: SnapshotTransfer, donor: str, its: Standing
    ) -> Generator[Pause, float | None, str]:
        def donors() -> Donors:
            self.look()
            return donors_of(self._sharing, (donor,), its.root)

        return fetch(
            transfer,
            donors=donors,
            has_left=lambda found: donor not in self._heard.words and found.keys() == {donor},
            version=lambda: self._board.version,
            clock=self._clock,
            timeout=self._options.copy_timeout,
        )

    def _take_back(self) -> None:
        """Load this member's own weights, of the end of this generation."""
        held = self._sharing.shelf.snapshot
        assert held is not None
        self._weights.restore(read(held.data))
        self.life.ancestors = self.life.former

    def _distrust(self, peer: str, reason: str) -> None:
        self._distrusted[peer] = reason
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
        self.former: tuple[Ancestor, ...] = ()
        """The ancestors of the weights that a copy has replaced."""


class _Heard:
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

    def look(self) -> None:
        """Read the words that have changed."""
        version, entries = self._board.version, self._board.entries
        if version == self._version and entries.keys() == self._seen.keys():
            return
        self._version = version
        fresh = {peer: said.value for peer, said in entries.items() if self._seen.get(peer) != said.sequence}
        found, malformed = read_words(fresh)
        for peer, word in found.items():
            self._history.note(peer, word)
        self._seen = {peer: said.sequence for peer, said in entries.items()}
        changed = {**self.words, **found}
        self.words = {peer: changed[peer] for peer in entries if peer in changed and peer not in malformed}
        still = {**self.malformed, **malformed}
        self.malformed = {peer: still[peer] for peer in entries if peer in still and peer not in found}
