"""The record that each peer of a team publishes on the board. No I/O, no clock.

A record may come from any stranger: lengths, ranges and characters are checked before anything is compared or shown.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2pavg.base.encoding import checked, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.population.words import (
    MAX_BASIS,
    MAX_SCORE,
    SHORT_BYTES,
    STANDING_TYPES,
    Hyperparameters,
    Standing,
    check_hyperparameters,
    pairs_of,
    standing_fields,
    standing_of,
)

TEAM_TOPIC = "population/teams"
MAX_TEAM_PEERS = 16
"""Peers of one team: the record of each names all of them."""
PEER_BYTES = 12  # of a peer id's digest
MAX_FAILED = 8
"""Teams that one ballot names as failed."""

_VERSION = 1
_WORD = "p2pavg/population/team word/1"
_CLAIM = "p2pavg/population/team claim/1"
_OUTCOME = "p2pavg/population/team outcome/1"
_PEER = "p2pavg/population/team peer/1"


def short_peer(peer_id: str) -> bytes:
    """Return 12 bytes that name a peer in the words of its team."""
    return hashlib.sha256(pack(_PEER, peer_id)).digest()[:PEER_BYTES]


def short_peers(peer_ids: Iterable[str]) -> tuple[bytes, ...]:
    """Return the names of a team's peers, in the order that words have."""
    return tuple(sorted(map(short_peer, peer_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The decision of a team as one of its peers proposes it, and the words on which it rests.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    score: float
    """The team's."""
    donor: bytes = b""
    """Claim of the team whose weights it copies, 16 bytes; empty if it keeps its own."""
    donor_score: float = 0.0
    """That team's; 0 without a donor."""
    hyperparameters: Hyperparameters
    """Those of the team's next generation."""
    basis: tuple[bytes, ...] = ()
    """Digests of the words that counted, those of the own team included, in ascending order."""
    failed: tuple[bytes, ...] = ()
    """Claims of the teams that this peer could not copy, or whose weights scored worse, in ascending order."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(each) and abs(each) <= MAX_SCORE for each in (self.score, self.donor_score)):
            raise RemoteProtocolError("a ballot with a score out of range")
        if len(self.basis) > MAX_BASIS or len(self.failed) > MAX_FAILED:
            raise RemoteProtocolError("a ballot on too many words")
        if any(len(each) != SHORT_BYTES for each in (*self.basis, *self.failed)):
            raise RemoteProtocolError("a ballot with a digest of another length")
        for each in (self.basis, self.failed):
            if any(one >= other for one, other in pairwise(each)):
                raise RemoteProtocolError("a ballot whose digests are not in order")
        if self.donor and (len(self.donor) != SHORT_BYTES or self.donor in self.failed):
            raise RemoteProtocolError("a ballot for a team that cannot be copied")
        if not self.donor and self.donor_score:
            raise RemoteProtocolError("a ballot with the score of no donor")
        check_hyperparameters(self.hyperparameters)

    def outcome(self, claim: bytes) -> bytes:
        """Return the digest of what the team does by this ballot, 16 bytes; the words on which it rests do not matter.

        Args:
            claim: the team's own claim.
        """
        fields = (claim, float(self.score), self.donor, float(self.donor_score), self.hyperparameters)
        return hashlib.sha256(pack(_OUTCOME, *fields)).digest()[:SHORT_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamWord:
    """The record of one peer of a team, at the end of one of the team's generations.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    standing: Standing
    """``member`` is the team's name; ``score`` is that of this peer. The rest is the same in all words of a team."""
    peers: tuple[bytes, ...]
    """The peers of the update that ended the generation, each in 12 bytes, in ascending order: see
    :func:`short_peers`."""
    ballot: Ballot | None = None
    """``None`` until this peer has decided."""

    def __post_init__(self) -> None:
        if not 0 < len(self.peers) <= MAX_TEAM_PEERS or any(len(each) != PEER_BYTES for each in self.peers):
            raise RemoteProtocolError("a word of a team with too many peers, or none")
        if any(one >= other for one, other in pairwise(self.peers)):
            raise RemoteProtocolError("a word of a team whose peers are not in order")

    def digest(self, peer_id: str) -> bytes:
        """Return 16 bytes that name this word in ballots; the ballot of the word itself does not matter.

        Args:
            peer_id: its publisher. Two peers of a team may have the same score.
        """
        packed = pack(_WORD, peer_id, *standing_fields(self.standing), self.peers)
        return hashlib.sha256(packed).digest()[:SHORT_BYTES]

    @property
    def claim(self) -> bytes:
        """16 bytes that are the same for the words of all peers of a team: they depend on all but the score."""
        settings, member, generation, steps, _, *rest = standing_fields(self.standing)
        packed = pack(_CLAIM, settings, member, generation, steps, *rest, self.peers)
        return hashlib.sha256(packed).digest()[:SHORT_BYTES]


def encode_team_word(word: TeamWord) -> bytes:
    """Return the bytes that a peer publishes, at most 3,500."""
    made = word.ballot
    ballot = (
        ()
        if made is None
        else (
            float(made.score),
            made.donor,
            float(made.donor_score),
            made.hyperparameters,
            made.basis,
            made.failed,
        )
    )
    return pack(_VERSION, *standing_fields(word.standing), word.peers, ballot)


def read_team_word(value: bytes) -> TeamWord:
    """Read a record; raise RemoteProtocolError for anything that :func:`encode_team_word` does not make."""
    version, *fields, peers, made = unpack(value, int, *STANDING_TYPES, tuple, tuple)
    if version != _VERSION:
        raise RemoteProtocolError(f"a team's word of version {version}")
    return TeamWord(
        standing=standing_of(fields), peers=checked(peers, (bytes,) * len(peers)), ballot=_ballot(made)
    )


def read_team_words(said: Mapping[str, bytes]) -> tuple[dict[str, TeamWord], dict[str, str]]:
    """Return each peer's word, and the reason for which the others are malformed, by peer id."""
    found, refused = {}, {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = read_team_word(value)
        except RemoteProtocolError as error:
            refused[peer_id] = str(error)
    return found, refused


def _ballot(fields: tuple[Any, ...]) -> Ballot | None:
    if not fields:
        return None
    types = (float, bytes, float, tuple, tuple, tuple)
    score, donor, donor_score, hyperparameters, basis, failed = checked(fields, types)
    return Ballot(
        score=score,
        donor=donor,
        donor_score=donor_score,
        hyperparameters=pairs_of(hyperparameters),
        basis=checked(basis, (bytes,) * len(basis)),
        failed=checked(failed, (bytes,) * len(failed)),
    )
