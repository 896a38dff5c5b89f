"""The rules of teams: which words make a team, what it decides, and which votes decide."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.population.team_rules import (
    check_ballot,
    chosen,
    claims,
    is_vote,
    middle_score,
    own_claim,
    proposal,
    vote_for,
    winner,
)
from p2pavg.population.team_words import (
    Ballot,
    TeamWord,
    encode_team_word,
    read_team_word,
    read_team_words,
    short_peers,
)
from p2pavg.population.words import MAX_BASIS, MAX_SCORE, MAX_WORD_BYTES, in_order
from tests.unit.population.samples import SETTINGS, standing

HALF = replace(SETTINGS, quantile=0.5)


def team(number: int, scores: list[float], named: int | None = None, **changes: Any) -> dict[str, TeamWord]:
    """Return the words of the peers of one team, with these scores; ``named`` peers are in the team, as they say."""
    peers = [f"peer {number} {index}" for index in range(named or len(scores))]
    changes = {"settings": HALF, **changes}
    return {
        peer: TeamWord(standing=standing(number, score, **changes), peers=short_peers(peers))
        for peer, score in zip(peers, scores, strict=False)
    }


def ballot_of(word: TeamWord, **changes: Any) -> Ballot:
    given: dict[str, Any] = {"score": 1.0, "hyperparameters": word.standing.hyperparameters}
    return Ballot(**(given | changes))


scores = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9)


@given(scores, st.sampled_from(["min", "max"]))
def test_one_liar_in_three_cannot_bring_the_score_out_of_the_range_of_the_others(
    honest: list[float], mode: Any
) -> None:
    settings = replace(HALF, mode=mode)
    for lie in (-MAX_SCORE, MAX_SCORE):
        assert min(honest) <= middle_score([*honest, lie], settings) <= max(honest)
    if len(honest) % 2:
        assert middle_score(honest, settings) == statistics.median(honest)


def test_of_two_scores_the_worse_one_counts() -> None:
    """So one of two peers cannot make its team look better than the other one finds it."""
    assert middle_score([1.0, 2.0], replace(HALF, mode="min")) == 2.0
    assert middle_score([1.0, 2.0], replace(HALF, mode="max")) == 1.0


def test_a_team_is_what_more_than_half_of_its_peers_say() -> None:
    words = team(1, [3.0, 1.0, 2.0], named=4)
    found = claims(words, HALF)
    assert found.teams["member 1"].standing.score == 2.0
    assert found.teams["member 1"].words.keys() == words.keys()
    assert not found.refused
    some = dict(list(words.items())[:2])
    assert not claims(some, HALF).teams
    assert all("fewer than half" in why for why in claims(some, HALF).refused.values())


def test_one_peer_is_no_team() -> None:
    assert not claims(team(1, [1.0]), HALF).teams


def test_a_stranger_that_repeats_a_teams_word_does_not_count() -> None:
    words = team(1, [3.0, 3.0])
    lie = replace(words["peer 1 0"], standing=replace(words["peer 1 0"].standing, score=0.0))
    found = claims({**words, "stranger": lie}, HALF)
    assert found.teams["member 1"].standing.score == 3.0
    assert found.refused == {"stranger": "it is not among the peers that it names as the team member 1"}


def test_a_stranger_that_claims_a_teams_name_does_not_count() -> None:
    """It names itself, and a peer that says nothing of the kind."""
    words = team(1, [3.0, 3.0, 3.0])
    lie = TeamWord(
        standing=standing(1, 0.0, settings=HALF, steps=1000), peers=short_peers(["peer 1 0", "stranger"])
    )
    found = claims({**words, "stranger": lie}, HALF)
    assert found.teams["member 1"].standing.score == 3.0
    assert found.teams["member 1"].words.keys() == words.keys()
    assert "fewer than half" in found.refused["stranger"]


def test_two_strangers_do_not_take_the_name_of_a_team_of_three() -> None:
    words = team(1, [3.0, 3.0, 3.0])
    lie = TeamWord(standing=standing(1, 0.0, settings=HALF, steps=1000), peers=short_peers(["x", "y"]))
    found = claims({**words, "x": lie, "y": lie}, HALF)
    assert found.teams["member 1"].standing.score == 3.0


@given(st.permutations(range(6)), st.lists(st.floats(0.0, 10.0), min_size=6, max_size=6))
def test_a_proposal_depends_on_the_words_alone(order: list[int], found: list[float]) -> None:
    words = {**team(1, found[:2]), **team(2, found[2:4]), **team(3, found[4:])}
    names = list(words)
    shuffled = {names[index]: words[names[index]] for index in order}
    both = [proposal(peer, words, HALF).ballot for peer in ("peer 1 0", "peer 1 1")]
    assert both[0] == both[1] == proposal("peer 1 0", shuffled, HALF).ballot


@given(st.lists(st.floats(0.0, 10.0), min_size=7, max_size=7))
def test_any_observer_repeats_a_ballot(found: list[float]) -> None:
    words = {**team(1, found[:3]), **team(2, found[3:5]), **team(3, found[5:])}
    known = {word.digest(peer): (peer, word) for peer, word in words.items()}
    for failed in ((), (words["peer 2 0"].claim,)):
        made = proposal("peer 1 0", words, HALF, failed=failed).ballot
        word = replace(words["peer 1 0"], ballot=made)
        assert check_ballot("peer 1 0", word, known, HALF) == ""
        assert made.donor not in failed
        wrong = replace(word, ballot=replace(made, score=made.score + 1.0))
        assert "it follows that" in check_ballot("peer 1 0", wrong, known, HALF)


def test_a_ballot_on_words_that_do_not_count_is_refused() -> None:
    words = {**team(1, [9.0, 9.0]), **team(2, [1.0, 1.0])}
    made = proposal("peer 1 0", words, HALF).ballot
    assert made.donor == words["peer 2 0"].claim
    known = {word.digest(peer): (peer, word) for peer, word in words.items()}
    single = team(3, [0.0], named=2)["peer 3 0"]
    known[single.digest("peer 3 0")] = ("peer 3 0", single)

    def check(ballot: Ballot, peer: str = "peer 1 0") -> str:
        return check_ballot(peer, replace(words[peer], ballot=ballot), known, HALF)

    more = replace(made, basis=tuple(sorted({*made.basis, single.digest("peer 3 0")})))
    assert check(more) == "it rests on a word that does not count"
    own = words["peer 1 0"].digest("peer 1 0")
    without = replace(made, basis=tuple(each for each in made.basis if each != own))
    assert check(without) == "it does not rest on its publisher's own word"
    with pytest.raises(ValueError, match="has no ballot"):
        check_ballot("peer 1 0", words["peer 1 0"], known, HALF)
    with pytest.raises(ValueError, match="are not known"):
        check_ballot("peer 1 0", replace(words["peer 1 0"], ballot=made), {}, HALF)


def test_a_score_does_not_change_the_draws() -> None:
    """A peer that chooses its score among many cannot choose the team that is copied, or the hyperparameters."""
    words = {**team(1, [9.0, 9.0, 9.0]), **team(2, [1.0, 1.0]), **team(3, [1.1, 1.1]), **team(4, [1.2, 1.2])}
    made = proposal("peer 1 0", words, HALF).ballot
    for lie in (9.1, 9.2, 10.0, 11.5):
        changed = replace(words["peer 1 2"], standing=replace(words["peer 1 2"].standing, score=lie))
        found = proposal("peer 1 0", {**words, "peer 1 2": changed}, HALF).ballot
        assert (found.donor, found.hyperparameters) == (made.donor, made.hyperparameters)
        other = {
            peer: replace(word, standing=replace(word.standing, score=lie))
            if peer in team(1, [0.0] * 3)
            else word
            for peer, word in words.items()
        }
        assert proposal("peer 1 0", other, HALF).ballot.hyperparameters == made.hyperparameters


def test_a_distrusted_team_does_not_count() -> None:
    words = {**team(1, [9.0, 9.0]), **team(2, [1.0, 1.0])}
    found = proposal("peer 1 0", words, HALF, distrusted={"member 2": "it lied"})
    assert found.donor is None
    assert found.refused == {"member 2": "it lied"}
    assert found.counted == ()


def test_a_team_whose_training_has_diverged_does_not_count() -> None:
    words = {**team(1, [9.0, 9.0]), **team(2, [MAX_SCORE, 1.0])}
    found = proposal("peer 1 0", words, HALF)
    assert found.refused == {"member 2": "its training has diverged"}


def test_a_ballot_rests_on_as_many_words_as_it_can_name() -> None:
    words = team(0, [9.0] * 4)
    for number in range(1, 20):
        words |= team(number, [1.0] * 4)
    made = proposal("peer 0 0", words, HALF)
    assert len(made.ballot.basis) == MAX_BASIS
    assert len(made.counted) == (MAX_BASIS - 4) // 4


def test_own_claim_needs_no_majority() -> None:
    words = team(1, [3.0], named=3)
    assert own_claim("peer 1 0", words, HALF).standing.score == 3.0


# ---------------------------------------------------------------------- votes


def test_a_peer_votes_for_what_most_peers_propose() -> None:
    word = team(1, [3.0])["peer 1 0"]
    one, other = ballot_of(word, score=1.0), ballot_of(word, score=2.0)
    copy = ballot_of(word, donor=b"d" * 16, donor_score=0.5)
    assert chosen({"a": one, "b": other, "c": other}, word.claim, lambda _: True) == other
    assert chosen({"a": one, "b": copy}, word.claim, lambda _: True) == one, "each peer can keep its weights"
    assert chosen({"a": one, "b": copy, "c": copy}, word.claim, lambda _: True) == copy
    assert chosen({"a": one, "b": copy, "c": copy}, word.claim, lambda each: not each.donor) == one
    assert chosen({}, word.claim, lambda _: True) is None


@given(st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from(["x", "y", "both", "none"]), max_size=7))
def test_a_winner_has_the_votes_of_more_than_half(votes: dict[str, str]) -> None:
    x, y = vote_for(b"x" * 16), vote_for(b"y" * 16)
    said = {"x": [x, "loss"], "y": ["loss", y], "both": [x, y], "none": ["loss", "vote for me"]}
    found = winner({peer: said[each] for peer, each in votes.items()})
    counts = {name: sum(each == name for each in votes.values()) for name in "xy"}
    expected = [name for name in "xy" if 2 * counts[name] > len(votes)]
    assert found == ({"x": x, "y": y}[expected[0]] if expected else None)


def test_votes_are_metrics_of_one_form() -> None:
    name = vote_for(bytes(range(16)))
    assert is_vote(name)
    assert len(name) <= 32
    assert not any(map(is_vote, ("loss", "vote", name[:-1], name + "0", name[:-1] + "g")))


# ---------------------------------------------------------------------- words


def test_a_word_is_read_as_it_was_written() -> None:
    words = {**team(1, [9.0, 9.0]), **team(2, [1.0, 1.0])}
    word = replace(words["peer 1 0"], ballot=proposal("peer 1 0", words, HALF).ballot)
    assert read_team_word(encode_team_word(word)) == word
    assert read_team_word(encode_team_word(words["peer 1 1"])) == words["peer 1 1"]


def test_the_largest_word_fits_into_a_record() -> None:
    pairs = in_order({f"hyperparameter_number_{number:02}": 0.123456 + number for number in range(16)})
    digests = tuple(sorted(bytes([number]) * 16 for number in range(64)))
    word = TeamWord(
        standing=standing(1, 1.5, member="m" * 64, hyperparameters=pairs, generation=2**39, size=2**49),
        peers=short_peers(f"peer {number}" for number in range(16)),
        ballot=Ballot(
            score=1.5,
            donor=digests[9],
            donor_score=2.5,
            hyperparameters=pairs,
            basis=digests,
            failed=digests[:8],
        ),
    )
    assert len(encode_team_word(word)) <= MAX_WORD_BYTES
    assert read_team_word(encode_team_word(word)) == word


@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_raise_anything_else(data: bytes) -> None:
    assert read_team_words({"a": data})[1].keys() == {"a"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"score": 1e101}, "score out of range"),
        ({"basis": (b"b" * 16, b"a" * 16)}, "not in order"),
        ({"basis": (b"short",)}, "another length"),
        ({"failed": tuple(bytes([n]) * 16 for n in range(9))}, "too many words"),
        ({"donor": b"short"}, "cannot be copied"),
        ({"donor": b"a" * 16, "failed": (b"a" * 16,)}, "cannot be copied"),
        ({"donor_score": 1.0}, "no donor"),
    ],
)
def test_a_ballot_out_of_range_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        ballot_of(team(1, [3.0])["peer 1 0"], **changes)


@pytest.mark.parametrize(
    "peers",
    [(), (b"a" * 12,) * 2, (b"b" * 12, b"a" * 12), (b"a",), tuple(bytes([n]) * 12 for n in range(17))],
)
def test_a_word_with_wrong_peers_is_refused(peers: tuple[bytes, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="a word of a team"):
        TeamWord(standing=standing(1, 1.0), peers=peers)
