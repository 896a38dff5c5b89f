"""The decisions of teams, from what their peers have signed. No I/O, no clock, no random source.

A team is one member of a population that several peers form. They train together, so they hold the same bits at each
update. At the end of a generation:

1. Each peer publishes a :class:`TeamWord`: its own score, and what is the same for all peers of the team.
2. :func:`claims` believes a team what more than half of the peers that it names have signed. Its score is the median of
   theirs; of two in the middle, the worse one.
3. :func:`proposal` says what the team does: the decision of :mod:`p2pavg.population.rules` with a team in place of a
   peer. Draws follow from the settings, the team, its generation and its weights, which no single score changes.
4. The peers publish their proposals as ballots. :func:`chosen` says for which one a peer votes.
5. The votes travel with the contributions of the next update. They are part of its roster, which each member has
   signed, so all members of the update count the same votes. :func:`winner` takes an outcome for which more than half
   of the contributors vote. Without one, the team keeps its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from p2pavg.base.encoding import pack
from p2pavg.population.rules import counted, decide, is_of
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.team_words import Ballot, TeamWord, short_peer
from p2pavg.population.words import MAX_BASIS, Standing

MIN_PUBLISHERS = 2
"""A team that one peer has signed is none."""
VOTE = "vote "
"""A vote is a metric of this name, followed by 26 hexadecimal digits of the outcome."""
VOTE_CHARS = 26

_SEED = "p2pavg/population/team draws/1"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the peers of a team say together."""

    standing: Standing
    """With the team's score."""
    digest: bytes
    """16 bytes that depend on all but the scores."""
    words: Mapping[str, TeamWord]
    """By publisher."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The teams, as one peer takes their words."""

    teams: Mapping[str, Claim]
    """By name."""
    refused: Mapping[str, str]
    """The reason for which other words do not count, by peer id."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A ballot, and how it was found."""

    ballot: Ballot
    own: Claim
    donor: Claim | None
    reason: str
    counted: tuple[str, ...]
    """Names of the other teams that counted."""
    refused: Mapping[str, str]
    """The reason for which others did not count, by the name of a team or by peer id."""


def middle_score(scores: Iterable[float], settings: PopulationSettings) -> float:
    """Return the median of some scores; of two in the middle, the worse one."""
    best_first = sorted(scores, reverse=settings.mode == "max")
    return best_first[len(best_first) // 2]


def claims(words: Mapping[str, TeamWord], settings: PopulationSettings) -> Claims:
    """Return the teams of which more than half of the named peers, and two at least, have published the same.

    Of several claims to one name, the one with most publishers counts; of these, the one with most steps.

    Args:
        words: by publisher.
    """
    refused: dict[str, str] = {}
    found: dict[str, dict[bytes, dict[str, TeamWord]]] = {}
    for peer, word in sorted(words.items()):
        if why := _why_not(peer, word, settings):
            refused[peer] = why
        else:
            found.setdefault(word.standing.member, {}).setdefault(word.claim, {})[peer] = word
    teams = {}
    for name, rivals in found.items():
        good = [
            each for digest, publishers in rivals.items() if (each := _claim(digest, publishers, settings))
        ]
        good.sort(key=lambda each: (len(each.words), each.standing.steps, each.digest))
        if good:
            teams[name] = good[-1]
        for publishers in rivals.values():
            for peer in publishers:
                if not good or peer not in good[-1].words:
                    refused[peer] = (
                        f"fewer than half of the peers that it names as the team {name} say the same"
                    )
    return Claims(teams, refused)


def _why_not(peer: str, word: TeamWord, settings: PopulationSettings) -> str:
    if word.standing.settings != settings.digest:
        return "its population has other settings"
    if short_peer(peer) not in word.peers:
        return f"it is not among the peers that it names as the team {word.standing.member}"
    return "" if is_of(word.standing, settings) else "its hyperparameters are not in their ranges"


def _claim(digest: bytes, publishers: Mapping[str, TeamWord], settings: PopulationSettings) -> Claim | None:
    first = next(iter(publishers.values()))
    if len(publishers) < MIN_PUBLISHERS or 2 * len(publishers) <= len(first.peers):
        return None
    return _joint(digest, publishers, settings)


def _joint(digest: bytes, publishers: Mapping[str, TeamWord], settings: PopulationSettings) -> Claim:
    score = middle_score((word.standing.score for word in publishers.values()), settings)
    first = next(iter(publishers.values()))
    return Claim(replace(first.standing, score=score), digest, dict(publishers))


def own_claim(me: str, words: Mapping[str, TeamWord], settings: PopulationSettings) -> Claim:
    """Return the claim of this peer's own team, however many of its peers have published it.

    Args:
        me: this peer, which has a word.
    """
    digest = words[me].claim
    same = {
        peer: word
        for peer, word in sorted(words.items())
        if word.claim == digest and not _why_not(peer, word, settings)
    }
    return _joint(digest, {**same, me: words[me]}, settings)


def proposal(
    me: str,
    words: Mapping[str, TeamWord],
    settings: PopulationSettings,
    *,
    failed: Collection[bytes] = (),
    distrusted: Mapping[str, str] | None = None,
) -> Proposal:
    """Return what a team does, as one of its peers finds it.

    Args:
        me: this peer, which has a word.
        words: those that this peer has heard, and its own, by publisher.
        failed: claims of teams that this peer could not copy.
        distrusted: the reason for which this peer believes a team nothing, by name.
    """
    distrusted = distrusted or {}
    own = own_claim(me, words, settings)
    name = own.standing.member
    found = claims({peer: word for peer, word in words.items() if word.standing.member != name}, settings)
    trusted = {team: each.standing for team, each in found.teams.items() if team not in distrusted}
    fit = counted(own.standing, trusted, settings)
    others = _within_basis(own, {team: found.teams[team] for team in fit.words})
    standings = {team: each.standing for team, each in others.items()}
    by_claim = {each.digest: each for each in others.values()}
    barred = {by_claim[digest].standing.digest for digest in failed if digest in by_claim}
    made = decide(name, own.standing, standings, settings, failed=barred, seed=_seed(own.standing))
    donor = next((each for each in others.values() if each.standing.digest == made.donor), None)
    basis = sorted(word.digest(peer) for each in (own, *others.values()) for peer, word in each.words.items())
    ballot = Ballot(
        score=own.standing.score,
        donor=b"" if donor is None else donor.digest,
        donor_score=0.0 if donor is None else donor.standing.score,
        hyperparameters=made.hyperparameters,
        basis=tuple(basis),
        failed=tuple(sorted(set(failed) & by_claim.keys())),
    )
    refused = {
        **found.refused,
        **fit.refused,
        **{team: distrusted[team] for team in distrusted if team in found.teams},
    }
    return Proposal(ballot, own, donor, made.reason, tuple(sorted(others)), refused)


def _within_basis(own: Claim, teams: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return the teams whose words, with the own team's, are no more than a ballot can name."""
    room, found = MAX_BASIS - len(own.words), {}
    for name in sorted(teams, key=lambda name: teams[name].digest):
        if len(teams[name].words) <= room:
            found[name] = teams[name]
            room -= len(teams[name].words)
    return dict(sorted(found.items()))


def _seed(own: Standing) -> bytes:
    return pack(_SEED, own.settings, own.member, own.generation, own.lineage, own.root)


def check_ballot(
    peer_id: str, word: TeamWord, known: Mapping[bytes, tuple[str, TeamWord]], settings: PopulationSettings
) -> str:
    """Return why a published ballot does not follow from the published words; empty if it does.

    Args:
        peer_id: the publisher of the word.
        word: has a ballot.
        known: words that were published, with their publishers, by digest.

    Raises:
        ValueError: the word has no ballot, or some words on which it rests are not known.
    """
    made = word.ballot
    if made is None:
        raise ValueError("the word has no ballot")
    if lacking := [digest for digest in made.basis if digest not in known]:
        raise ValueError(f"{len(lacking)} of the {len(made.basis)} words on which it rests are not known")
    words = dict(known[digest] for digest in made.basis)
    if len(words) != len(made.basis):
        return "it rests on two words of one peer"
    if words.get(peer_id) is None or words[peer_id].digest(peer_id) != word.digest(peer_id):
        return "it does not rest on its publisher's own word"
    if made.donor in made.failed:
        return "it copies a team that it names as failed"
    again = proposal(peer_id, words, settings, failed=made.failed)
    if again.ballot.basis != made.basis:
        return "it rests on a word that does not count"
    if again.ballot.outcome(word.claim) != made.outcome(word.claim):
        return f"from the same words it follows that {again.reason}"
    return ""


def chosen(ballots: Mapping[str, Ballot], claim: bytes, can: Callable[[Ballot], bool]) -> Ballot | None:
    """Return the ballot for whose outcome a peer votes: that of most peers of its team.

    Of equally many, one that keeps the team's weights, since each peer can do that; then the smallest digest.

    Args:
        ballots: of the peers of this peer's team, its own included, by peer id.
        claim: the team's.
        can: returns whether a ballot is right, and this peer holds what it needs for it.
    """
    able = {peer: ballot for peer, ballot in sorted(ballots.items()) if can(ballot)}
    votes = Counter(ballot.outcome(claim) for ballot in able.values())
    return min(
        able.values(),
        key=lambda each: (-votes[each.outcome(claim)], each.donor != b"", each.outcome(claim)),
        default=None,
    )


def vote_for(outcome: bytes) -> str:
    """Return the name of the metric that is a vote for an outcome."""
    return VOTE + outcome.hex()[:VOTE_CHARS]


def is_vote(name: str) -> bool:
    """Return whether a metric is a vote."""
    digits = name.removeprefix(VOTE)
    return digits != name and len(digits) == VOTE_CHARS and set(digits) <= set("0123456789abcdef")


def winner(metrics: Mapping[str, Collection[str]]) -> str | None:
    """Return the vote of more than half of an update's contributors; ``None`` if there is none.

    Args:
        metrics: names of the metrics that each contributor has signed, by peer id. A contributor without a vote, or
            with several, votes for nothing.
    """
    votes: Counter[str] = Counter()
    for names in metrics.values():
        own = [name for name in names if is_vote(name)]
        if len(own) == 1:
            votes[own[0]] += 1
    name, count = max(votes.items(), key=lambda vote: vote[1], default=("", 0))
    return name if 2 * count > len(metrics) else None
