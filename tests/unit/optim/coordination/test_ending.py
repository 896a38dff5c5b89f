"""Rules of the end of a run: for whom a peer stays, and when a run has ended for a peer that was away."""

from __future__ import annotations

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.optim.coordination.ending import Goes, GroupMember, Handover, LastWord, Stays, run_end
from p2pavg.optim.coordination.progress import MAX_EPOCH, PeerProgress

LATER, OTHER, MINE = (bytes([number]) * 32 for number in (20, 21, 17))
NEVER = float("-inf")


def word(epoch: int, state: bytes = MINE, *, left: bool = False, follows: bool = False) -> PeerProgress:
    return PeerProgress(
        epoch=epoch,
        state=state,
        samples=0.0,
        samples_per_second=1.0,
        waiting=False,
        left=left,
        follows=follows,
    )


def last(epoch: int, state: bytes = LATER) -> LastWord:
    return LastWord(epoch, state)


def member(
    peer_id: str, said: PeerProgress | None, *, connected: bool = True, has_ended: bool = False
) -> GroupMember:
    return GroupMember(peer_id=peer_id, word=said, connected=connected, has_ended=has_ended)


class TestRunEnd:
    def test_it_has_ended_when_most_of_the_last_group_have_said_so(self) -> None:
        found = run_end(word(17), "ab", {}, {"a": last(20), "b": last(20)}, follows=True)
        assert found is not None
        assert found.epoch == 20
        assert "ended at update 20" in found.reason
        assert "at update 17" in found.reason

    @pytest.mark.parametrize("group", ["ab", "abc", "abcd"])
    def test_one_liar_ends_nothing(self, group: str) -> None:
        assert run_end(word(17), group, {}, {"a": last(1000)}, follows=True) is None

    @pytest.mark.parametrize("group", ["a", "ab"])
    @pytest.mark.parametrize("state", [MINE, OTHER])
    def test_a_small_group_of_liars_ends_nothing_while_more_peers_train(
        self, group: str, state: bytes
    ) -> None:
        """In a large run, liars may have taken this peer's last update with it alone."""
        training = {f"honest {number}": word(17, state) for number in range(3)}
        lies = {liar: last(18) for liar in group}
        assert run_end(word(17), group, training, lies, follows=True) is None
        # The peers of other groups have finished, too, and one is as late as this one.
        others = {f"other {number}": last(18) for number in range(3)}
        late = {"late": word(17, state)}
        found = run_end(word(17), group, late, lies | others, follows=True)
        assert found is not None
        assert found.epoch == 18

    def test_last_words_of_strangers_count_nothing(self) -> None:
        strangers = {f"stranger {number}": last(1000) for number in range(100)}
        assert run_end(word(17), "ab", {}, strangers, follows=True) is None

    def test_last_words_of_different_states_do_not_add_up(self) -> None:
        said = {"a": last(20), "b": last(20, OTHER), "c": last(19)}
        assert run_end(word(17), "abc", {}, said, follows=True) is None

    def test_a_peer_that_merely_left_at_this_peers_update_ends_nothing(self) -> None:
        assert run_end(word(17), "a", {}, {"a": last(17)}, follows=True) is None
        assert run_end(word(17), "a", {}, {"a": last(12)}, follows=True) is None

    def test_a_live_word_counts_more_than_a_last_one(self) -> None:
        """The peer takes part again."""
        said = {"a": last(20), "b": last(20)}
        assert run_end(word(17), "ab", {"a": word(17), "b": word(17)}, said, follows=True) is None

    def test_it_has_not_ended_while_a_peer_trains_on(self) -> None:
        said = {"a": last(20), "b": last(20)}
        words = {"joined later": word(21, OTHER)}
        for follows in (True, False):
            assert run_end(word(17), "ab", words, said, follows=follows) is None

    def test_a_peer_that_can_follow_waits_for_those_that_stay(self) -> None:
        words = {"a": word(20, LATER, left=True), "b": word(20, LATER, left=True)}
        assert run_end(word(17), "ab", words, {}, follows=True) is None
        found = run_end(word(17), "ab", words, {}, follows=False)
        assert found is not None
        assert found.epoch == 20

    def test_peers_that_were_away_together_do_not_go_on_by_themselves(self) -> None:
        """With two of four, the others' updates are the run's."""
        said = {"a": last(20), "b": last(20)}
        assert run_end(word(17), "abc", {"c": word(17)}, said, follows=True) is not None

    def test_without_a_group_nothing_tells(self) -> None:
        """A peer that begins must be able to start a run again, while last words of the former one are known."""
        assert run_end(word(0), "", {}, {"a": last(20), "b": last(20)}, follows=True) is None


class TestHandover:
    def handover(self) -> Handover:
        return Handover(100.0, quiet=30.0, most=90.0)

    def test_it_goes_at_once_when_all_have_the_update(self) -> None:
        members = [
            member("a", word(20, LATER)),
            member("b", word(21, OTHER)),
            member("c", None, connected=False),
        ]
        assert isinstance(self.handover().decide(20, members, NEVER, 100.0), Goes)

    def test_it_stays_for_one_that_lacks_it_and_says_for_whom(self) -> None:
        found = self.handover().decide(20, [member("peer-abcdef", word(17))], NEVER, 100.0)
        assert isinstance(found, Stays)
        assert found.peers == ("peer-abcdef",)
        assert "abcdef is at update 17" in found.reason

    def test_it_does_not_stay_for_one_that_has_ended(self) -> None:
        members = [member("a", word(17, left=True)), member("b", None, has_ended=True)]
        assert isinstance(self.handover().decide(20, members, NEVER, 100.0), Goes)

    def test_a_stopped_process_has_no_word_and_is_waited_for(self) -> None:
        assert isinstance(self.handover().decide(20, [member("a", None)], NEVER, 100.0), Stays)

    def test_without_a_sign_it_goes_after_the_quiet_time(self) -> None:
        handover, asleep = self.handover(), [member("a", word(17))]
        assert isinstance(handover.decide(20, asleep, NEVER, 100.0), Stays)
        assert isinstance(handover.decide(20, asleep, NEVER, 129.9), Stays)
        assert isinstance(handover.decide(20, asleep, NEVER, 130.0), Goes)

    def test_a_sign_of_progress_makes_it_stay_longer_and_not_for_ever(self) -> None:
        handover, now, epoch = self.handover(), 100.0, 1
        while isinstance(handover.decide(20, [member("a", word(min(epoch, 19)))], NEVER, now), Stays):
            now, epoch = now + 10.0, epoch + 1
        assert now == 190.0

    def test_a_peer_that_reads_the_state_is_served(self) -> None:
        handover = self.handover()
        assert isinstance(handover.decide(20, [], 110.0, 110.0), Stays)
        assert isinstance(handover.decide(20, [], 110.0, 140.0), Goes)
        assert isinstance(handover.decide(20, [], 90.0, 110.0), Goes), "read before the end"


class TestWords:
    def test_the_bytes_never_change(self) -> None:
        assert last(3).encode() == pack(2, 3, LATER)
        assert LastWord.decode(pack(2, 3, LATER)) == last(3)

    @pytest.mark.parametrize(("epoch", "state"), [(0, LATER), (MAX_EPOCH + 1, LATER), (-1, LATER), (3, b"")])
    def test_values_out_of_range_are_refused(self, epoch: int, state: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            LastWord.decode(pack(2, epoch, state))
