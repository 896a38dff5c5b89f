"""The words that one peer of a team believes, as they come to its board."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from p2pavg.population.team_rules import vote_for
from p2pavg.population.team_turn import TurnOptions, Turns
from p2pavg.population.team_words import TeamWord, encode_team_word
from p2pavg.runs.records.board import Entry
from tests.unit.population.test_team_rules import HALF, ballot_of, team


class FakeBoard:
    """A board of which a test sets the entries."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._count = 0

    def say(self, words: dict[str, TeamWord]) -> None:
        for peer, word in words.items():
            self.put(peer, encode_team_word(word))

    def put(self, peer: str, value: bytes) -> None:
        self._count += 1
        self.entries = {**self.entries, peer: Entry(value, self._count, 0.0)}


def turns(board: FakeBoard) -> Turns:
    options = TurnOptions(wait=1.0, teams=0, verify=True, copy_timeout=1.0)
    anything = cast(Any, SimpleNamespace())
    return Turns(
        cast(Any, board), anything, HALF, options, peer_id="me", clock=lambda: 0.0, pause=lambda _: None
    )


def test_a_team_counts_with_its_last_claim_while_its_peers_publish_the_next_one() -> None:
    board = FakeBoard()
    found = turns(board)
    before, after = team(1, [3.0, 3.0], generation=1), team(1, [2.0, 2.0], generation=2)
    board.say(before)
    found.look()
    board.say({"peer 1 0": after["peer 1 0"]})
    found.look()
    assert found._believed("other") == before
    assert found._believed("member 1")["peer 1 0"] == after["peer 1 0"], (
        "a peer of the team sees the present words"
    )
    board.say(after)
    found.look()
    assert found._believed("other") == after
    board.entries = {}
    found.look()
    assert found._believed("other") == {}


def test_a_malformed_word_replaces_the_good_one_before_it() -> None:
    board = FakeBoard()
    found = turns(board)
    board.say(team(1, [3.0, 3.0]))
    found.look()
    assert len(found._words) == 2
    board.put("peer 1 0", b"not a word")
    found.look()
    assert found._words.keys() == {"peer 1 1"}
    assert len(found.history.words()) == 2


def test_the_ballot_of_a_vote_is_found_by_its_content() -> None:
    board = FakeBoard()
    found = turns(board)
    word = team(1, [3.0, 3.0])["peer 1 0"]
    made = ballot_of(word, score=3.0)
    voted = TeamWord(standing=word.standing, peers=word.peers, ballot=made)
    board.say({"peer 1 0": voted})
    assert found.ballot(vote_for(made.outcome(word.claim))) == made
    assert found.ballot(vote_for(bytes(16))) is None
