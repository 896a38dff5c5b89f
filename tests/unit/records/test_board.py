"""What is said goes out soon, what others say comes in, and what is old never comes back."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import p2pavg.records.board as bulletin_module
from p2pavg.errors import ClosedError
from p2pavg.records.board import (
    LOOK_SECONDS,
    MAX_CALLS,
    SAID_TTL_SECONDS,
    SAY_SECONDS,
    Bulletin,
    Said,
    bulletin_key,
)
from p2pavg.testing import simulate
from p2pavg_dht import Ed25519Signer
from tests.unit.records.records import (
    ALICE,
    BOB,
    EPOCH,
    KEY,
    ME,
    Records,
    heard,
    open_bulletin,
    record,
    wall_clock,
)

WATCHDOG = 30.0


def test_the_key_never_changes_and_is_of_run_and_topic() -> None:
    key = bulletin_key("run", "topic")
    assert key.hex() == "a138c2e3f632912f99f07298d039b4e8a142a3ffed27a76449ebb5a7d74caafb"
    pairs = [("run", "topic"), ("run", "other"), ("other", "topic"), ("topic", "run"), ("runt", "opic")]
    assert len({bulletin_key(*pair) for pair in pairs}) == len(pairs)
    assert {len(bulletin_key(*pair)) for pair in pairs} == {32}


class TestSaying:
    async def test_a_word_for_which_somebody_waits_goes_out_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            for moment, word in ((0.05, b"a"), (0.06, b"b"), (0.5, b"c")):
                await trio.sleep_until(moment)
                bulletin.say(word, now=True)
                await wait_all_tasks_blocked()
                assert records.words[-1] == word
                assert records.moments[-1] == pytest.approx(moment)
        assert {(ttl, key) for _, _, ttl in records.published for key in records.keys} == {
            (SAID_TTL_SECONDS, KEY)
        }

    async def test_another_one_soon_and_only_the_newest(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            for moment, word in ((0.05, b"a"), (0.1, b"b"), (0.15, b"c")):
                await trio.sleep_until(moment)
                bulletin.say(word)
            await trio.sleep(5.0)
        assert records.words == [b"c"]
        assert records.moments == pytest.approx([SAY_SECONDS])

    async def test_after_a_pause_it_goes_out_at_once_too(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await trio.sleep_until(0.7)
            bulletin.say(b"a")
            await wait_all_tasks_blocked()
            assert records.words == [b"a"]
            assert records.moments == pytest.approx([0.7])

    async def test_who_says_much_says_it_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            for count in range(100):
                bulletin.say(b"%d" % count)
                await trio.sleep(0.03)
            await trio.sleep(SAY_SECONDS)
        gaps = [later - before for before, later in itertools.pairwise(records.moments)]
        assert min(gaps) >= SAY_SECONDS - 1e-9
        assert max(gaps) <= SAY_SECONDS + 0.03 + 1e-9
        assert records.words[-1] == b"99"

    @pytest.mark.parametrize("urgent", [(True, False), (False, True), (True, True)])
    async def test_of_two_at_once_the_newest_goes_out_and_as_soon_as_either_must(
        self, autojump_clock: MockClock, urgent: tuple[bool, bool]
    ) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await trio.sleep_until(0.05)
            bulletin.say(b"a", now=urgent[0])
            bulletin.say(b"b", now=urgent[1])
            await trio.sleep(5.0)
        assert records.words == [b"b"]
        assert records.moments == pytest.approx([0.05])

    async def test_it_is_said_once(self, autojump_clock: MockClock) -> None:
        """The node renews it."""
        records = Records()
        async with open_bulletin(records) as bulletin:
            bulletin.say(b"a")
            await trio.sleep(60.0)
        assert len(records.published) == 1

    async def test_from_any_thread(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            thread = threading.Thread(target=bulletin.say, args=(b"a",))
            thread.start()
            thread.join(WATCHDOG)
            await trio.sleep(2 * SAY_SECONDS)
            assert records.words == [b"a"]


class TestLooking:
    async def test_what_others_say_is_read_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.there = (record(),)
            await trio.sleep_until(0.99 * LOOK_SECONDS)
            assert heard(bulletin) == {}
            await trio.sleep_until(3.5 * LOOK_SECONDS)
            assert heard(bulletin) == {ALICE.peer_id: b"a"}
        assert records.found == pytest.approx([LOOK_SECONDS * count for count in range(4)])
        assert records.keys == {KEY}

    async def test_what_is_there_at_the_beginning_is_seen_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        records.there = (record(), record(BOB, b"b"))
        async with open_bulletin(records) as bulletin:
            assert bulletin.said == {
                ALICE.peer_id: Said(b"a", 1, EPOCH + 15.0),
                BOB.peer_id: Said(b"b", 1, EPOCH + 15.0),
            }
            assert trio.current_time() == 0.0

    async def test_the_answer_to_a_word_is_a_look(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.there = (record(),)
            await trio.sleep_until(0.4)
            bulletin.say(b"mine", now=True)
            await wait_all_tasks_blocked()
            assert heard(bulletin) == {ALICE.peer_id: b"a"}
            await trio.sleep(1.5 * LOOK_SECONDS)
        assert records.found == pytest.approx([0.0, 0.4 + LOOK_SECONDS])

    async def test_one_can_look_now(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await trio.sleep_until(0.3)
            bulletin.look()
            await wait_all_tasks_blocked()
        assert records.found == pytest.approx([0.0, 0.3])

    async def test_what_somebody_stores_here_is_seen_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await trio.sleep_until(0.3)
            version = bulletin.version
            records.store(record())
            assert heard(bulletin) == {ALICE.peer_id: b"a"}
            assert bulletin.version > version
        assert len(records.found) == 1


class TestWhatIsHeard:
    async def test_of_one_peer_the_newest_counts(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            for sequence, word, counts in (
                (5, b"b", b"b"),
                (4, b"a", b"b"),
                (5, b"x", b"b"),
                (6, b"c", b"c"),
            ):
                records.store(record(value=word, sequence=sequence))
                assert heard(bulletin) == {ALICE.peer_id: counts}

    async def test_what_was_taken_back_is_gone_and_does_not_come_back(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record(sequence=5), record(BOB, b"b"))
            version = bulletin.version
            records.store(record(value=b"", sequence=6))
            assert heard(bulletin) == {BOB.peer_id: b"b"}
            assert bulletin.version > version
            records.store(record(sequence=5))
            assert heard(bulletin) == {BOB.peer_id: b"b"}
            records.store(record(value=b"again", sequence=7))
            assert heard(bulletin) == {ALICE.peer_id: b"again", BOB.peer_id: b"b"}

    @given(
        st.lists(
            st.tuples(st.sampled_from([ALICE, BOB]), st.integers(1, 6), st.booleans()),
            max_size=12,
        )
    )
    def test_however_records_come_the_newest_of_each_peer_counts(
        self, brought: list[tuple[Ed25519Signer, int, bool]]
    ) -> None:
        newest: dict[str, int] = {}

        async def main() -> None:
            records = Records()
            async with open_bulletin(records) as bulletin:
                for signer, sequence, looked in brought:
                    value = b"" if sequence % 3 == 0 else b"%d" % sequence
                    one = record(signer, value, sequence=sequence)
                    if looked:
                        records.there = (one,)
                        bulletin.look()
                        await wait_all_tasks_blocked()
                    else:
                        records.store(one)
                    newest[signer.peer_id] = max(newest.get(signer.peer_id, 0), sequence)
                    assert heard(bulletin) == {p: b"%d" % s for p, s in newest.items() if s % 3}

        trio.run(main, clock=MockClock())

    async def test_the_own_word_is_not_among_them(self, mock_clock: MockClock) -> None:
        records = Records()
        records.there = (record(ME, b"mine"),)
        async with open_bulletin(records) as bulletin:
            records.store(record(ME, b"mine", sequence=2))
            assert heard(bulletin) == {}
            assert bulletin.version == 0

    async def test_a_word_fades_at_its_expiration(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record(until=4.5), record(BOB, b"b", until=60.0))
            version = bulletin.version
            await trio.sleep_until(4.49)
            assert heard(bulletin) == {ALICE.peer_id: b"a", BOB.peer_id: b"b"}
            assert bulletin.version == version
            await trio.sleep_until(4.5)
            assert heard(bulletin) == {BOB.peer_id: b"b"}
            await trio.sleep_until(4.5 + LOOK_SECONDS)
            assert bulletin.version > version

    async def test_the_number_of_publishers_is_bounded_and_known_ones_keep_their_places(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulletin_module, "MAX_PUBLISHERS", 3)
        invented = [Ed25519Signer(bytes([number]) * 32) for number in range(10, 20)]
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record(until=60.0))
            records.store(*(record(signer, b"x") for signer in invented))
            assert len(heard(bulletin)) == 3
            records.store(record(value=b"new", sequence=2, until=60.0), record(BOB, b"b", until=60.0))
            assert heard(bulletin)[ALICE.peer_id] == b"new"
            assert BOB.peer_id not in heard(bulletin)
            await trio.sleep_until(16.0 + LOOK_SECONDS)
            records.store(record(BOB, b"b", until=60.0))
            assert heard(bulletin) == {ALICE.peer_id: b"new", BOB.peer_id: b"b"}

    async def test_what_has_faded_before_it_came_is_not_heard(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await trio.sleep_until(3.0)
            version = bulletin.version
            records.store(record(until=3.0))
            assert heard(bulletin) == {}
            assert bulletin.version == version

    async def test_the_version_grows_with_a_renewal_and_with_nothing_else(
        self, autojump_clock: MockClock
    ) -> None:
        """Who has renewed its word is there, whatever it says."""
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record())
            version = bulletin.version
            records.store(record())
            await trio.sleep(3 * LOOK_SECONDS)
            assert bulletin.version == version
            records.store(record(sequence=2))
            assert bulletin.version > version

    async def test_what_is_heard_is_nobodys_to_change(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            before = bulletin.said
            records.store(record())
            assert before == {}
            with pytest.raises(TypeError):
                bulletin.said["peer"] = Said(b"", 1, 2.0)  # type: ignore[index]


class Noticing(threading.Condition):
    """Says when somebody has begun to wait; whatever is told afterwards wakes it or nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def waiting(bulletin: Bulletin) -> threading.Thread:
    """A thread that waits for what is newer than now, for an hour."""
    bulletin._changed = noticing = Noticing()
    version = bulletin.version

    def wait() -> None:
        with suppress(ClosedError):
            bulletin.wait(version, 3600.0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert noticing.begun.wait(WATCHDOG)
    return thread


class TestWaiting:
    async def test_who_waits_hears_at_once(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            thread = waiting(bulletin)
            assert thread.is_alive()
            records.store(record())
            thread.join(WATCHDOG)
            assert not thread.is_alive()

    async def test_who_waits_hears_of_a_withdrawal(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record())
            thread = waiting(bulletin)
            records.store(record(value=b"", sequence=2))
            thread.join(WATCHDOG)
            assert not thread.is_alive()

    async def test_what_has_changed_already_is_not_waited_for(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            version = bulletin.version
            records.store(record())
            bulletin.wait(version, 3600.0)

    async def test_where_nothing_changes_the_wait_ends(self, mock_clock: MockClock) -> None:
        async with open_bulletin(Records()) as bulletin:
            for timeout in (0.0, 0.001):
                bulletin.wait(bulletin.version, timeout)
                assert bulletin.version == 0

    async def test_nobody_waits_for_one_that_has_ended(self, mock_clock: MockClock) -> None:
        async with open_bulletin(Records()) as bulletin:
            thread = waiting(bulletin)
            await bulletin.withdraw()
            await wait_all_tasks_blocked()
            thread.join(WATCHDOG)
            assert not thread.is_alive()
            with pytest.raises(ClosedError):
                bulletin.wait(bulletin.version, 3600.0)

    async def test_nor_for_one_that_was_cancelled(self, mock_clock: MockClock) -> None:
        async with open_bulletin(Records()) as bulletin:
            thread = waiting(bulletin)
        thread.join(WATCHDOG)
        assert not thread.is_alive()


class TestCallsThatHang:
    async def test_they_do_not_hold_up_the_next_word(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.gate = trio.Event()
            for count in range(MAX_CALLS):
                bulletin.say(b"%d" % count, now=True)
                await wait_all_tasks_blocked()
                assert records.words[-1] == b"%d" % count
                assert records.moments[-1] == 0.0
                assert records.calling == count + 1

    async def test_there_are_no_more_at_once_and_then_the_newest_goes_first(
        self, autojump_clock: MockClock
    ) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.gate = trio.Event()
            for count in range(MAX_CALLS + 5):
                bulletin.say(b"%d" % count, now=True)
                await wait_all_tasks_blocked()
            await trio.sleep(60.0)
            assert records.calling == MAX_CALLS
            assert len(records.published) == MAX_CALLS
            gate, records.gate = records.gate, None
            gate.set()
            await wait_all_tasks_blocked()
            assert records.words[MAX_CALLS:] == [b"%d" % (MAX_CALLS + 4)]
            assert records.moments[MAX_CALLS:] == [60.0]

    async def test_what_is_stored_here_is_seen_meanwhile(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.gate = trio.Event()
            await trio.sleep(60.0)
            assert records.calling == MAX_CALLS
            records.store(record(until=90.0))
            assert heard(bulletin) == {ALICE.peer_id: b"a"}


class TestTakingBack:
    async def test_it_goes_out_at_once_and_in_place_of_what_was_to_be_said(
        self, autojump_clock: MockClock
    ) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            bulletin.say(b"a", now=True)
            await trio.sleep_until(2.5)
            bulletin.say(b"b")
            bulletin.take_back()
            await wait_all_tasks_blocked()
            assert records.withdrawn == [2.5]
            await trio.sleep(60.0)
            assert records.words == [b"a"]

    async def test_something_new_may_be_said_afterwards(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            bulletin.take_back()
            await trio.sleep(1.0)
            bulletin.say(b"b", now=True)
            await wait_all_tasks_blocked()
            assert records.words == [b"b"]


class TestTheEnd:
    async def test_what_was_said_is_taken_back(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            assert records.watched == {KEY}
            records.gate = trio.Event()
            bulletin.say(b"a", now=True)
            await trio.sleep_until(2.5)
            await bulletin.withdraw()
            await wait_all_tasks_blocked()
            calls = len(records.published), len(records.found)
            await trio.sleep(60.0)
            assert records.withdrawn == [2.5]
            assert records.calling == 0
            assert records.watched == set()
            assert (len(records.published), len(records.found)) == calls

    async def test_what_was_heard_can_still_be_read(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            records.store(record())
            await bulletin.withdraw()
            assert heard(bulletin) == {ALICE.peer_id: b"a"}

    async def test_what_is_said_after_it_goes_nowhere(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_bulletin(records) as bulletin:
            await bulletin.withdraw()
            bulletin.say(b"a", now=True)
            bulletin.look()
            await trio.sleep(5.0)
        assert records.published == []

    def test_what_is_said_just_before_it_goes_nowhere_or_is_taken_back(self) -> None:
        """Wherever in its way the word is by then."""

        async def main(steps: int) -> int:
            records = Records()
            async with open_bulletin(records) as bulletin:
                bulletin.say(b"a", now=True)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                before = len(records.published)
                await bulletin.withdraw()
                await wait_all_tasks_blocked()
                return len(records.published) - before

        late = {
            (steps, seed): simulate(partial(main, steps), seed=seed)
            for steps in range(6)
            for seed in range(4)
        }
        assert not any(late.values()), late

    async def test_one_that_was_withdrawn_before_it_ran_says_nothing(self, autojump_clock: MockClock) -> None:
        records = Records()
        bulletin = Bulletin(records, key=KEY, peer_id=ME.peer_id, wall_clock=wall_clock)
        bulletin.say(b"a", now=True)
        await bulletin.withdraw()
        await bulletin.run()
        assert records.published == []

    def test_once_the_loop_is_gone_nothing_is_said_and_nobody_waits(self) -> None:
        async def main() -> Bulletin:
            async with open_bulletin(Records()) as bulletin:
                return bulletin

        bulletin = trio.run(main, clock=MockClock())
        bulletin.say(b"a")
        bulletin.say(b"b", now=True)
        bulletin.look()
        with pytest.raises(ClosedError):
            bulletin.wait(bulletin.version, 3600.0)
