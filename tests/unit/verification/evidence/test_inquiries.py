"""Fetches of evidence from accusers: an attacker's accusations cost little, and delay no true one."""

from __future__ import annotations

import pytest

from p2pavg.base.limits import HOLD_OFF_SECONDS
from p2pavg.verification.evidence import inquiries
from p2pavg.verification.evidence.accusation import MAX_EVIDENCE_BYTES, Named, Notice
from p2pavg.verification.evidence.inquiries import (
    ACCUSER_FETCHES,
    ALL_FETCHES,
    MAX_FETCHES,
    MAX_INQUIRY_RETRY_SECONDS,
    REST,
    UNMET_FETCHES,
    EvidenceFetch,
    Exclusions,
    Inquiries,
)
from tests.unit.verification.evidence.samples import accusation, named

FAR = 1e9


class Peer:
    """One peer's inquiries, at a time that the test sets."""

    def __init__(self, *met: str) -> None:
        self.exclusions = Exclusions("me")
        for peer_id in met:
            self.exclusions.meets(peer_id)
        self.inquiries = Inquiries(self.exclusions, "me")
        self.now = 1000.0
        self._sequence = 0

    def hears(self, accuser: str, *what: Named, expires: float = FAR) -> None:
        self._sequence += 1
        self.inquiries.heard(accuser, Notice((), what), self._sequence, expires, self.now)

    def next(self) -> EvidenceFetch | None:
        return self.inquiries.next(self.now)

    def count(self, most: int = 1000) -> int:
        """Fetch without an outcome as long as something is to be fetched; return how often."""
        for number in range(most):
            fetch = self.next()
            if fetch is None:
                return number
            self.inquiries.ended(fetch)
        return most


def test_unknown_evidence_is_fetched_from_its_accuser() -> None:
    peer = Peer("liar")
    assert peer.next() is None
    peer.hears("accuser", named("liar"))
    assert peer.next() == EvidenceFetch("accuser", (), named("liar"))
    assert peer.next() is None, "it runs"


def test_evidence_against_an_excluded_peer_is_not_fetched() -> None:
    peer = Peer("liar")
    peer.exclusions.learn(accusation("liar"))
    peer.hears("accuser", *(named("liar", number) for number in range(16)))
    assert peer.next() is None


def test_an_excluded_accuser_is_not_asked() -> None:
    peer = Peer("liar")
    peer.hears("accuser", named("liar"))
    peer.exclusions.learn(accusation("accuser"))
    assert peer.next() is None


@pytest.mark.parametrize("what", [named("liar", kind="new/1"), named("liar", size=MAX_EVIDENCE_BYTES)])
def test_evidence_that_this_version_cannot_verify_is_not_fetched(what: Named) -> None:
    peer = Peer("liar")
    peer.hears("accuser", what)
    assert peer.next() is None


def test_an_own_record_is_no_accuser() -> None:
    peer = Peer("liar")
    peer.hears("me", named("liar"))
    assert peer.next() is None


def test_few_pieces_are_fetched_at_once_and_one_from_each_accuser() -> None:
    peer = Peer("liar")
    for accuser in ("a", "b", "c"):
        peer.hears(accuser, *(named("liar", ord(accuser) + 1000 * number) for number in range(9)))
    found = [peer.next() for _ in range(5)]
    assert [fetch.accuser for fetch in found if fetch is not None] == ["a", "b"]
    assert MAX_FETCHES == 2
    assert found[0] is not None
    peer.inquiries.ended(found[0])
    following = peer.next()
    assert following is not None
    assert following.accuser == "c"


def test_the_same_evidence_is_not_fetched_twice_at_once() -> None:
    peer = Peer("liar")
    peer.hears("a", named("liar"))
    peer.hears("b", named("liar"))
    first = peer.next()
    assert peer.next() is None
    assert first is not None
    peer.inquiries.ended(first)
    peer.inquiries.failed(first, peer.now)
    second = peer.next()
    assert second is not None
    assert second.accuser == "b"


def test_an_accuser_that_lied_is_ignored_with_all_its_further_records() -> None:
    peer = Peer("victim")
    peer.hears("accuser", named("victim"))
    fetch = peer.next()
    assert fetch is not None
    peer.inquiries.ignore("accuser")
    peer.inquiries.ended(fetch)
    for number in range(100):
        peer.hears("accuser", named("victim", number))
        assert peer.next() is None
    assert peer.inquiries.is_heard("accuser", 10**9)


def test_an_accuser_without_an_answer_is_asked_again_ever_later() -> None:
    peer = Peer("victim")
    pauses, last = [], peer.now
    for number in range(11_000):
        peer.hears("accuser", named("victim", number))
        fetch = peer.next()
        if fetch is not None:
            pauses.append(peer.now - last)
            last = peer.now
            peer.inquiries.failed(fetch, peer.now)
            peer.inquiries.ended(fetch)
        peer.now += 1.0
    assert pauses == [0.0, *(min(HOLD_OFF_SECONDS * 2**k, MAX_INQUIRY_RETRY_SECONDS) for k in range(10))]


def test_accusers_that_proved_a_lie_come_before_others_and_failed_ones_last() -> None:
    peer = Peer("liar")
    for accuser in ("failed", "proved", "new"):
        peer.hears(accuser, named("liar", ord(accuser[0])))
    peer.inquiries.proved(EvidenceFetch("proved", (), named("liar")))
    peer.inquiries.failed(EvidenceFetch("failed", (), named("liar")), peer.now - 2 * HOLD_OFF_SECONDS)
    order = []
    for _ in range(3):
        fetch = peer.next()
        assert fetch is not None
        order.append(fetch.accuser)
        peer.inquiries.ended(fetch)
        peer.hears(fetch.accuser)  # it names nothing any more
    assert order == ["proved", "new", "failed"]


def test_one_accuser_has_an_allowance() -> None:
    peer = Peer("victim")
    for number in range(100):
        peer.hears("accuser", *(named("victim", 16 * number + index) for index in range(16)))
    assert peer.count() == ACCUSER_FETCHES


def test_peers_that_were_not_met_have_a_small_allowance_and_come_last() -> None:
    peer = Peer("liar")
    for accuser in range(10):
        peer.hears(f"hostile {accuser}", *(named(f"invented {index}", index) for index in range(16)))
    assert peer.count() == UNMET_FETCHES
    peer.hears("accuser", named("liar"))
    fetch = peer.next()
    assert fetch is not None
    assert fetch.named.peer_id == "liar"


def test_evidence_against_peers_that_were_met_comes_first() -> None:
    peer = Peer("liar")
    peer.hears("hostile", named("invented", 1))
    peer.hears("accuser", named("liar", 2))
    fetch = peer.next()
    assert fetch is not None
    assert fetch.named.peer_id == "liar"


def test_all_accusers_together_have_an_allowance() -> None:
    peer = Peer("victim")
    for accuser in range(200):
        peer.hears(f"hostile {accuser}", named("victim", accuser))
    assert peer.count() == ALL_FETCHES


def test_the_number_of_accusers_is_bounded_and_expired_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inquiries, "MAX_ACCUSERS", 3)
    peer = Peer("liar")
    for accuser in ("a", "b", "c", "d"):
        peer.hears(accuser, named("liar", ord(accuser)), expires=peer.now + 10.0)
    assert set(peer.inquiries._accusers) == {"a", "b", "c"}
    peer.now += 20.0
    assert peer.next() is None, "expired"
    peer.hears("d", named("liar"))
    assert set(peer.inquiries._accusers) == {"d"}


def test_the_number_of_ignored_accusers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "MAX_IGNORED", 2)
    peer = Peer("victim")
    for accuser in ("a", "b", "c"):
        peer.inquiries.ignore(accuser)
    assert [peer.inquiries.is_heard(accuser, 0) for accuser in ("a", "b", "c")] == [False, True, True]


def test_an_older_record_changes_nothing() -> None:
    peer = Peer("liar")
    peer.inquiries.heard("accuser", Notice((), (named("liar", 2),)), 2, FAR, peer.now)
    peer.inquiries.heard("accuser", Notice((), (named("liar", 1),)), 1, FAR, peer.now)
    fetch = peer.next()
    assert fetch is not None
    assert fetch.named == named("liar", 2)


def test_evidence_about_peers_that_were_not_met_takes_a_tenth_of_a_core() -> None:
    """It may be true and made to take long, by identities that cost nothing; other evidence goes on meanwhile."""
    peer = Peer("met")
    peer.hears("accuser", named("stranger 1"), named("stranger 2"))
    fetch = peer.next()
    assert fetch is not None
    peer.inquiries.verified(fetch, 2.0, peer.now)
    peer.exclusions.learn(accusation(fetch.named.peer_id))
    peer.inquiries.ended(fetch)
    peer.now += 2.0 * REST - 0.1
    assert peer.next() is None
    peer.hears("another", named("met"))
    other = peer.next()
    assert other is not None
    assert other.named.peer_id == "met"
    peer.inquiries.verified(other, 60.0, peer.now)
    peer.inquiries.ended(other)
    peer.exclusions.learn(accusation("met"))
    peer.now += 0.1
    assert peer.next() is not None
