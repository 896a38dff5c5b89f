"""One peer's part in the end of a generation of its team: it publishes, proposes, copies to try, and chooses its vote.

It runs in the training thread, between two updates, and waits there. The team's decision comes with the next update, in
:class:`~p2pavg.population.team_member.TeamMember`.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial

from p2pavg.base.errors import StateError
from p2pavg.population.copying import LOOK_SECONDS, Donors, Pause, donors_of, fetch
from p2pavg.population.rules import worst
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.team_history import TeamHistory
from p2pavg.population.team_member import Prepared, TeamMember
from p2pavg.population.team_rules import Claim, Proposal, check_ballot, chosen, claims, proposal, vote_for
from p2pavg.population.team_words import (
    MAX_TEAM_PEERS,
    Ballot,
    TeamWord,
    encode_team_word,
    read_team_words,
    short_peer,
    short_peers,
)
from p2pavg.runs.records.board import Topic
from p2pavg.state.donor.shelf import HeldSnapshot
from p2pavg.state.news import SnapshotOffer
from p2pavg.state.progress import amount
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import copy_of, read
from p2pavg.state.tree import chunk_digests, root_of

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Teams that one peer tries to copy at the end of a generation; after that it proposes to keep the weights."""
MAX_DISTRUSTED = 256
"""Teams whose weights were worse than they said, or unusable; the earliest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of one peer; see :class:`~p2pavg.population.TeamPopulation`."""

    wait: float
    teams: int
    verify: bool
    copy_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One end of a generation, until the team's decision."""

    score: float
    """Of this peer."""
    proposal: Proposal
    failures: Mapping[str, str]
    """The reason for which teams could not be copied, or were worse, by name."""
    seconds: float


class Turns:
    """Holds one peer's part in the ends of generations.

    Args:
        board: the population's board of words.
        sharing: the states of the population's run.
        peer_id: this peer.
        clock: seconds, at any pace that never goes back.
        pause: waits.
    """

    def __init__(
        self,
        board: Topic,
        sharing: StateSharing,
        settings: PopulationSettings,
        options: TurnOptions,
        *,
        peer_id: str,
        clock: Callable[[], float],
        pause: Callable[[Pause], None],
    ) -> None:
        self._board = board
        self._sharing = sharing
        self._settings = settings
        self._options = options
        self._peer_id = peer_id
        self._clock = clock
        self._pause = pause
        self.history = TeamHistory(settings)
        self._words: dict[str, TeamWord] = {}
        self._seen: dict[str, int] = {}
        self._malformed: dict[str, str] = {}
        self._mine: TeamWord | None = None
        self._last: dict[str, Claim] = {}
        """What each team that has words on the board has said last, by name."""
        self._used: dict[str, bytes] = {}
        """Claims on which the last proposal rested, by team."""
        self._distrusted: OrderedDict[str, str] = OrderedDict()

    # ------------------------------------------------------------------ words

    def look(self) -> None:
        """Read the words that others have published since the last call."""
        entries = self._board.entries
        fresh = {peer: said.value for peer, said in entries.items() if self._seen.get(peer) != said.sequence}
        if not fresh and entries.keys() == self._seen.keys():
            return
        found, malformed = read_team_words(fresh)
        for peer, word in found.items():
            self.history.note(peer, word)
        self._seen = {peer: said.sequence for peer, said in entries.items()}
        changed = {**self._words, **found}
        self._words = {peer: changed[peer] for peer in entries if peer in changed and peer not in malformed}
        still = {**self._malformed, **malformed}
        self._malformed = {peer: still[peer] for peer in entries if peer in still and peer not in found}
        names = {word.standing.member for word in self._words.values()}
        last = {**self._last, **claims(self._words, self._settings).teams}
        self._last = {name: team for name, team in last.items() if name in names}

    def ballot(self, vote: str) -> Ballot | None:
        """Return the ballot of any peer that leads to the outcome of a vote; ``None`` if none is known."""
        self.look()
        own: list[TeamWord] = [] if self._mine is None else [self._mine]
        for word in (*own, *self._words.values()):
            if word.ballot is not None and vote_for(word.ballot.outcome(word.claim)) == vote:
                return word.ballot
        return None

    def _say(self, word: TeamWord) -> None:
        self._mine = word
        self._board.publish(encode_team_word(word), now=True)
        self.history.note(self._peer_id, word)

    def leave(self) -> None:
        """Withdraw this peer's word."""
        self._board.withdraw()

    # ------------------------------------------------------------------ the end of a generation

    def hold(self, member: TeamMember, evaluate: Callable[[], float], *, can_repeat: bool) -> Held | None:
        """Publish this peer's word, agree on a ballot with the team's other peers, and set the member's vote.

        Args:
            evaluate: returns the score of the present weights.
            can_repeat: true if it can be called again, for the weights of other teams.

        Returns:
            ``None`` if the team has too many peers to take part.
        """
        began = self._clock()
        if len(member.peers) > MAX_TEAM_PEERS:
            logger.warning(
                "the team %s has %d peers, and %d at most can decide: it keeps its weights",
                member.life.team,
                len(member.peers),
                MAX_TEAM_PEERS,
            )
            member.peers = ()
            return None
        own = self._snapshot(member)
        score = evaluate()
        member.restore_buffers()
        mine = self._published(member, own, score)
        self._wait(lambda: self._are_all_here(mine))
        failures: dict[str, str] = {}
        found = self._propose(
            member, mine, score, evaluate if can_repeat and self._options.verify else None, failures
        )
        self._say(TeamWord(standing=mine.standing, peers=mine.peers, ballot=found.ballot))
        self._used = {name: team.digest for name, team in self._others(member.life.team).items()}
        self._wait(lambda: all(word.ballot is not None for word in self._companions(mine).values()))
        ballot = self._chosen(member, mine)
        member.vote = vote_for(ballot.outcome(mine.claim))
        logger.info("generation %d of %s: %s", mine.standing.generation, member.life.team, found.reason)
        return Held(score=score, proposal=found, failures=failures, seconds=self._clock() - began)

    def _snapshot(self, member: TeamMember) -> HeldSnapshot:
        """Return a snapshot of the team's weights, before anything else changes the model."""
        life = member.life
        data = copy_of(member.weights.content(life.ancestors))
        digests = chunk_digests(data)
        root = root_of(digests, len(data))
        standing = life.standing(self._settings, score=0.0, root=root, size=len(data))
        offer = SnapshotOffer(epoch=standing.generation, state=standing.lineage, root=root, size=len(data))
        return HeldSnapshot(offer, data, digests)

    def _published(self, member: TeamMember, own: HeldSnapshot, score: float) -> TeamWord:
        # The former one stays: others may have decided to copy it, and have not begun yet.
        self._sharing.shelf.put(own, keeps_former=True)
        self._sharing.say(wants=False, epoch=own.offer.epoch)
        shown = float(score) if math.isfinite(score) else worst(self._settings)
        standing = member.life.standing(self._settings, score=shown, root=own.offer.root, size=own.offer.size)
        word = TeamWord(standing=standing, peers=short_peers(member.peers))
        self._say(word)
        return word

    def _wait(self, is_done: Callable[[], bool]) -> None:
        until = self._clock() + self._options.wait
        while (left := until - self._clock()) > 0:
            version = self._board.version
            self.look()
            if is_done():
                return
            self._board.look()
            self._pause(Pause(version, min(left, LOOK_SECONDS)))
        self.look()

    def _companions(self, mine: TeamWord) -> dict[str, TeamWord]:
        """Return the words of the other peers of this team that say the same as this one."""
        return {peer: word for peer, word in self._words.items() if self._is_companion(peer, word, mine)}

    @staticmethod
    def _is_companion(peer: str, word: TeamWord, mine: TeamWord) -> bool:
        return word.claim == mine.claim and short_peer(peer) in mine.peers

    def _believed(self, own: str) -> dict[str, TeamWord]:
        """Return the words on which a proposal rests.

        While only some peers of another team have ended its next generation, no claim of it has enough words. It counts
        with its last one then.
        """
        present = claims(self._words, self._settings).teams
        last = [team for name, team in self._last.items() if name not in present and name != own]
        return {**self._words, **{peer: word for team in last for peer, word in team.words.items()}}

    def _others(self, own: str) -> dict[str, Claim]:
        """Return the teams that may count, without this peer's own."""
        teams = claims(self._believed(own), self._settings).teams
        return {name: team for name, team in teams.items() if name != own}

    def _are_all_here(self, mine: TeamWord) -> bool:
        """Return whether the peers of this team, and the other teams, have ended this generation."""
        if len(self._companions(mine)) + 1 < len(mine.peers):
            return False
        others = self._others(mine.standing.member)
        if mine.standing.generation == 1 and len(others) + 1 < self._options.teams:
            return False
        return not any(
            team.standing.steps < mine.standing.steps and self._used.get(name) == team.digest
            for name, team in others.items()
        )

    # ------------------------------------------------------------------ this peer's proposal

    def _propose(
        self,
        member: TeamMember,
        mine: TeamWord,
        score: float,
        evaluate: Callable[[], float] | None,
        failures: dict[str, str],
    ) -> Proposal:
        """Return this peer's proposal, after it has fetched and tried the weights that it proposes to copy.

        Args:
            failures: gets the reason for each team that could not be copied, or was worse, by name.
        """
        words = {**self._believed(member.life.team), self._peer_id: mine}
        failed: set[bytes] = set()
        while True:
            found = proposal(self._peer_id, words, self._settings, failed=failed, distrusted=self._distrusted)
            if found.donor is None:
                return found
            if len(failures) >= MAX_TRIES:
                none = {peer: word for peer, word in words.items() if word.claim == mine.claim}
                return proposal(self._peer_id, none, self._settings)
            failure = self._prepare(member, found.donor, score, evaluate)
            if not failure:
                return found
            failures[found.donor.standing.member] = failure
            failed.add(found.donor.digest)

    def _prepare(
        self, member: TeamMember, donor: Claim, score: float, evaluate: Callable[[], float] | None
    ) -> str:
        """Fetch the weights of another team and try them; return the reason if this team should not take them."""
        its = donor.standing
        if its.size > member.weights.max_bytes:
            most = amount(member.weights.max_bytes)
            return self._distrust(
                its.member, f"its state has {amount(its.size)}, and this model's has at most {most}"
            )
        data, failure = self._fetched(donor)
        if failure:
            logger.warning("this peer could not fetch the weights of the team %s: %s", its.member, failure)
            return failure
        try:
            loaded = member.weights.prepare(read(data))
        except StateError as error:
            return self._distrust(its.member, f"its state cannot be used: {error}")
        # Kept also if it is worse here: the team's other peers may find it better, and outvote this one.
        member.prepared[donor.digest] = Prepared(its, loaded)
        if evaluate is None:
            return ""
        found = self._tried(member, loaded.take, evaluate)
        if math.isfinite(found) and not self._settings.better(score, found):
            return ""
        said = f"it says {its.score:g}, and they scored {found:g} here"
        return self._distrust(
            its.member, f"its weights are worse than this team's own, which scored {score:g} here: {said}"
        )

    def _tried(self, member: TeamMember, take: Callable[[], None], evaluate: Callable[[], float]) -> float:
        """Return the score of other weights. After it, the model has this team's again, to the bit."""
        held = self._sharing.shelf.snapshot
        assert held is not None
        try:
            take()
            return float(evaluate())
        finally:
            member.weights.restore(read(held.data))
            member.restore_buffers()

    def _fetched(self, donor: Claim) -> tuple[bytes, str]:
        its = donor.standing
        offer = SnapshotOffer(epoch=its.generation, state=its.lineage, root=its.root, size=its.size)
        transfer = self._sharing.fetch_snapshot(offer)

        def donors() -> Donors:
            self.look()
            present = [peer for peer in donor.words if peer in self._words]
            return donors_of(self._sharing, present, its.root)

        flow = fetch(
            transfer,
            donors=donors,
            has_left=lambda found: not found,
            version=lambda: self._board.version,
            clock=self._clock,
            timeout=self._options.copy_timeout,
        )
        try:
            failure = self._drive(flow)
            if failure:
                return b"", failure
            with transfer.data() as data:
                return bytes(data), ""
        finally:
            if not transfer.ended:
                transfer.cancel()

    def _drive(self, flow: Generator[Pause, float | None, str]) -> str:
        while True:
            try:
                self._pause(next(flow))
            except StopIteration as end:
                failure: str = end.value
                return failure

    def _distrust(self, team: str, reason: str) -> str:
        logger.warning("this peer believes the team %s no more: %s", team, reason)
        self._distrusted[team] = reason
        while len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)
        return reason

    # ------------------------------------------------------------------ this peer's vote

    def _chosen(self, member: TeamMember, mine: TeamWord) -> Ballot:
        """Return the ballot for which this peer votes."""
        assert self._mine is not None
        assert self._mine.ballot is not None
        known = {word.digest(peer): (peer, word) for peer, word in self._words.items()}
        known |= {word.digest(peer): (peer, word) for peer, word in self.history.words()}
        ballots = {self._peer_id: self._mine.ballot}
        for peer, word in self._companions(mine).items():
            if word.ballot is not None and not self._refusal(peer, word, known):
                ballots[peer] = word.ballot
        able = partial(self._can, member, self._mine.ballot)
        return chosen(ballots, mine.claim, able) or self._mine.ballot

    def _refusal(self, peer: str, word: TeamWord, known: Mapping[bytes, tuple[str, TeamWord]]) -> str:
        try:
            return check_ballot(peer, word, known, self._settings)
        except ValueError as error:  # some of the words have not come to this peer
            return str(error)

    @staticmethod
    def _can(member: TeamMember, own: Ballot, ballot: Ballot) -> bool:
        """Return whether this peer can vote for a ballot: it keeps the weights, or has tried those that it copies."""
        return not ballot.donor or (ballot.donor in member.prepared and ballot.donor not in own.failed)
