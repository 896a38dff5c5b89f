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

import p2pavg.records.board as board_module
from p2pavg.errors import ClosedError
from p2pavg.records.board import (
    LOOK_SECONDS,
    MAX_CALLS,
    SAID_TTL_SECONDS,
    SAY_SECONDS,
    Board,
    Entry,
    board_key,
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
    open_board,
    record,
    wall_clock,
)

WATCHDOG = 30.0


def test_the_key_never_changes_and_is_of_run_and_topic() -> None:
    key = board_key("run", "topic")
    assert key.hex() == "a138c2e3f632912f99f07298d039b4e8a142a3ffed27a76449ebb5a7d74caafb"
    pairs = [("run", "topic"), ("run", "other"), ("other", "topic"), ("topic", "run"), ("runt", "opic")]
    assert len({board_key(*pair) for pair in pairs}) == len(pairs)
    assert {len(board_key(*pair)) for pair in pairs} == {32}


class TestSaying:
    async def test_a_word_for_which_somebody_waits_goes_out_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for moment, word in ((0.05, b"a"), (0.06, b"b"), (0.5, b"c")):
                await trio.sleep_until(moment)
                board.publish(word, now=True)
                await wait_all_tasks_blocked()
                assert records.words[-1] == word
                assert records.moments[-1] == pytest.approx(moment)
        assert {(ttl, key) for _, _, ttl in records.published for key in records.keys} == {
            (SAID_TTL_SECONDS, KEY)
        }

    async def test_another_one_soon_and_only_the_newest(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for moment, word in ((0.05, b"a"), (0.1, b"b"), (0.15, b"c")):
                await trio.sleep_until(moment)
                board.publish(word)
            await trio.sleep(5.0)
        assert records.words == [b"c"]
        assert records.moments == pytest.approx([SAY_SECONDS])

    async def test_after_a_pause_it_goes_out_at_once_too(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(0.7)
            board.publish(b"a")
            await wait_all_tasks_blocked()
            assert records.words == [b"a"]
            assert records.moments == pytest.approx([0.7])

    async def test_who_says_much_says_it_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for count in range(100):
                board.publish(b"%d" % count)
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
        async with open_board(records) as board:
            await trio.sleep_until(0.05)
            board.publish(b"a", now=urgent[0])
            board.publish(b"b", now=urgent[1])
            await trio.sleep(5.0)
        assert records.words == [b"b"]
        assert records.moments == pytest.approx([0.05])

    async def test_it_is_said_once(self, autojump_clock: MockClock) -> None:
        """The node renews it."""
        records = Records()
        async with open_board(records) as board:
            board.publish(b"a")
            await trio.sleep(60.0)
        assert len(records.published) == 1

    async def test_from_any_thread(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            thread = threading.Thread(target=board.publish, args=(b"a",))
            thread.start()
            thread.join(WATCHDOG)
            await trio.sleep(2 * SAY_SECONDS)
            assert records.words == [b"a"]


class TestLooking:
    async def test_what_others_say_is_read_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.there = (record(),)
            await trio.sleep_until(0.99 * LOOK_SECONDS)
            assert heard(board) == {}
            await trio.sleep_until(3.5 * LOOK_SECONDS)
            assert heard(board) == {ALICE.peer_id: b"a"}
        assert records.found == pytest.approx([LOOK_SECONDS * count for count in range(4)])
        assert records.keys == {KEY}

    async def test_what_is_there_at_the_beginning_is_seen_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        records.there = (record(), record(BOB, b"b"))
        async with open_board(records) as board:
            assert board.entries == {
                ALICE.peer_id: Entry(b"a", 1, EPOCH + 15.0),
                BOB.peer_id: Entry(b"b", 1, EPOCH + 15.0),
            }
            assert trio.current_time() == 0.0

    async def test_the_answer_to_a_word_is_a_look(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.there = (record(),)
            await trio.sleep_until(0.4)
            board.publish(b"mine", now=True)
            await wait_all_tasks_blocked()
            assert heard(board) == {ALICE.peer_id: b"a"}
            await trio.sleep(1.5 * LOOK_SECONDS)
        assert records.found == pytest.approx([0.0, 0.4 + LOOK_SECONDS])

    async def test_one_can_look_now(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(0.3)
            board.look()
            await wait_all_tasks_blocked()
        assert records.found == pytest.approx([0.0, 0.3])

    async def test_what_somebody_stores_here_is_seen_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(0.3)
            version = board.version
            records.store(record())
            assert heard(board) == {ALICE.peer_id: b"a"}
            assert board.version > version
        assert len(records.found) == 1


class TestWhatIsHeard:
    async def test_of_one_peer_the_newest_counts(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for sequence, word, counts in (
                (5, b"b", b"b"),
                (4, b"a", b"b"),
                (5, b"x", b"b"),
                (6, b"c", b"c"),
            ):
                records.store(record(value=word, sequence=sequence))
                assert heard(board) == {ALICE.peer_id: counts}

    async def test_what_was_taken_back_is_gone_and_does_not_come_back(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.store(record(sequence=5), record(BOB, b"b"))
            version = board.version
            records.store(record(value=b"", sequence=6))
            assert heard(board) == {BOB.peer_id: b"b"}
            assert board.version > version
            records.store(record(sequence=5))
            assert heard(board) == {BOB.peer_id: b"b"}
            records.store(record(value=b"again", sequence=7))
            assert heard(board) == {ALICE.peer_id: b"again", BOB.peer_id: b"b"}

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
            async with open_board(records) as board:
                for signer, sequence, looked in brought:
                    value = b"" if sequence % 3 == 0 else b"%d" % sequence
                    one = record(signer, value, sequence=sequence)
                    if looked:
                        records.there = (one,)
                        board.look()
                        await wait_all_tasks_blocked()
                    else:
                        records.store(one)
                    newest[signer.peer_id] = max(newest.get(signer.peer_id, 0), sequence)
                    assert heard(board) == {p: b"%d" % s for p, s in newest.items() if s % 3}

        trio.run(main, clock=MockClock())

    async def test_the_own_word_is_not_among_them(self, mock_clock: MockClock) -> None:
        records = Records()
        records.there = (record(ME, b"mine"),)
        async with open_board(records) as board:
            records.store(record(ME, b"mine", sequence=2))
            assert heard(board) == {}
            assert board.version == 0

    async def test_a_word_fades_at_its_expiration(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.store(record(until=4.5), record(BOB, b"b", until=60.0))
            version = board.version
            await trio.sleep_until(4.49)
            assert heard(board) == {ALICE.peer_id: b"a", BOB.peer_id: b"b"}
            assert board.version == version
            await trio.sleep_until(4.5)
            assert heard(board) == {BOB.peer_id: b"b"}
            await trio.sleep_until(4.5 + LOOK_SECONDS)
            assert board.version > version

    async def test_the_number_of_publishers_is_bounded_and_known_ones_keep_their_places(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(board_module, "MAX_PUBLISHERS", 3)
        invented = [Ed25519Signer(bytes([number]) * 32) for number in range(10, 20)]
        records = Records()
        async with open_board(records) as board:
            records.store(record(until=60.0))
            records.store(*(record(signer, b"x") for signer in invented))
            assert len(heard(board)) == 3
            records.store(record(value=b"new", sequence=2, until=60.0), record(BOB, b"b", until=60.0))
            assert heard(board)[ALICE.peer_id] == b"new"
            assert BOB.peer_id not in heard(board)
            await trio.sleep_until(16.0 + LOOK_SECONDS)
            records.store(record(BOB, b"b", until=60.0))
            assert heard(board) == {ALICE.peer_id: b"new", BOB.peer_id: b"b"}

    async def test_what_has_faded_before_it_came_is_not_heard(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(3.0)
            version = board.version
            records.store(record(until=3.0))
            assert heard(board) == {}
            assert board.version == version

    async def test_the_version_grows_with_a_renewal_and_with_nothing_else(
        self, autojump_clock: MockClock
    ) -> None:
        """Who has renewed its word is there, whatever it says."""
        records = Records()
        async with open_board(records) as board:
            records.store(record())
            version = board.version
            records.store(record())
            await trio.sleep(3 * LOOK_SECONDS)
            assert board.version == version
            records.store(record(sequence=2))
            assert board.version > version

    async def test_what_is_heard_is_nobodys_to_change(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            before = board.entries
            records.store(record())
            assert before == {}
            with pytest.raises(TypeError):
                board.entries["peer"] = Entry(b"", 1, 2.0)  # type: ignore[index]


class Noticing(threading.Condition):
    """Says when somebody has begun to wait; whatever is told afterwards wakes it or nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def waiting(board: Board) -> threading.Thread:
    """A thread that waits for what is newer than now, for an hour."""
    board._changed = noticing = Noticing()
    version = board.version

    def wait() -> None:
        with suppress(ClosedError):
            board.wait(version, 3600.0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert noticing.begun.wait(WATCHDOG)
    return thread


class TestWaiting:
    async def test_who_waits_hears_at_once(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            thread = waiting(board)
            assert thread.is_alive()
            records.store(record())
            thread.join(WATCHDOG)
            assert not thread.is_alive()

    async def test_who_waits_hears_of_a_withdrawal(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.store(record())
            thread = waiting(board)
            records.store(record(value=b"", sequence=2))
            thread.join(WATCHDOG)
            assert not thread.is_alive()

    async def test_what_has_changed_already_is_not_waited_for(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            version = board.version
            records.store(record())
            board.wait(version, 3600.0)

    async def test_where_nothing_changes_the_wait_ends(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            for timeout in (0.0, 0.001):
                board.wait(board.version, timeout)
                assert board.version == 0

    async def test_nobody_waits_for_one_that_has_ended(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            thread = waiting(board)
            await board.aclose()
            await wait_all_tasks_blocked()
            thread.join(WATCHDOG)
            assert not thread.is_alive()
            with pytest.raises(ClosedError):
                board.wait(board.version, 3600.0)

    async def test_nor_for_one_that_was_cancelled(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            thread = waiting(board)
        thread.join(WATCHDOG)
        assert not thread.is_alive()


class TestCallsThatHang:
    async def test_they_do_not_hold_up_the_next_word(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.gate = trio.Event()
            for count in range(MAX_CALLS):
                board.publish(b"%d" % count, now=True)
                await wait_all_tasks_blocked()
                assert records.words[-1] == b"%d" % count
                assert records.moments[-1] == 0.0
                assert records.calling == count + 1

    async def test_there_are_no_more_at_once_and_then_the_newest_goes_first(
        self, autojump_clock: MockClock
    ) -> None:
        records = Records()
        async with open_board(records) as board:
            records.gate = trio.Event()
            for count in range(MAX_CALLS + 5):
                board.publish(b"%d" % count, now=True)
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
        async with open_board(records) as board:
            records.gate = trio.Event()
            await trio.sleep(60.0)
            assert records.calling == MAX_CALLS
            records.store(record(until=90.0))
            assert heard(board) == {ALICE.peer_id: b"a"}


class TestTakingBack:
    async def test_it_goes_out_at_once_and_in_place_of_what_was_to_be_said(
        self, autojump_clock: MockClock
    ) -> None:
        records = Records()
        async with open_board(records) as board:
            board.publish(b"a", now=True)
            await trio.sleep_until(2.5)
            board.publish(b"b")
            board.withdraw()
            await wait_all_tasks_blocked()
            assert records.withdrawn == [2.5]
            await trio.sleep(60.0)
            assert records.words == [b"a"]

    async def test_something_new_may_be_said_afterwards(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            board.withdraw()
            await trio.sleep(1.0)
            board.publish(b"b", now=True)
            await wait_all_tasks_blocked()
            assert records.words == [b"b"]


class TestTheEnd:
    async def test_what_was_said_is_taken_back(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            assert records.watched == {KEY}
            records.gate = trio.Event()
            board.publish(b"a", now=True)
            await trio.sleep_until(2.5)
            await board.aclose()
            await wait_all_tasks_blocked()
            calls = len(records.published), len(records.found)
            await trio.sleep(60.0)
            assert records.withdrawn == [2.5]
            assert records.calling == 0
            assert records.watched == set()
            assert (len(records.published), len(records.found)) == calls

    async def test_what_was_heard_can_still_be_read(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.store(record())
            await board.aclose()
            assert heard(board) == {ALICE.peer_id: b"a"}

    async def test_what_is_said_after_it_goes_nowhere(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await board.aclose()
            board.publish(b"a", now=True)
            board.look()
            await trio.sleep(5.0)
        assert records.published == []

    def test_what_is_said_just_before_it_goes_nowhere_or_is_taken_back(self) -> None:
        """Wherever in its way the word is by then."""

        async def main(steps: int) -> int:
            records = Records()
            async with open_board(records) as board:
                board.publish(b"a", now=True)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                before = len(records.published)
                await board.aclose()
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
        board = Board(records, key=KEY, peer_id=ME.peer_id, wall_clock=wall_clock)
        board.publish(b"a", now=True)
        await board.aclose()
        await board.run()
        assert records.published == []

    def test_once_the_loop_is_gone_nothing_is_said_and_nobody_waits(self) -> None:
        async def main() -> Board:
            async with open_board(Records()) as board:
                return board

        board = trio.run(main, clock=MockClock())
        board.publish(b"a")
        board.publish(b"b", now=True)
        board.look()
        with pytest.raises(ClosedError):
            board.wait(board.version, 3600.0)
