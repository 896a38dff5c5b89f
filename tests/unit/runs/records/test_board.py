"""Boards: entries are published soon, others' entries are read, and old ones never come back."""

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

import p2pavg.runs.records.board as board_module
from p2pavg.base.errors import ClosedError
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS
from p2pavg.runs.records.board import MAX_CALLS, SAID_TTL_SECONDS, Board, board_key
from p2pavg.testing import simulate
from p2pavg_dht import Ed25519Signer
from tests.unit.runs.records.records import (
    ALICE,
    BOB,
    KEY,
    ME,
    Records,
    heard,
    open_board,
    record,
    wall_clock,
)

WATCHDOG = 30.0


def test_the_key_never_changes() -> None:
    assert board_key("run", "topic").hex() == (
        "a138c2e3f632912f99f07298d039b4e8a142a3ffed27a76449ebb5a7d74caafb"
    )
    assert board_key("runt", "opic") != board_key("run", "topic")


class TestSaying:
    async def test_urgent_entry_is_published_at_once(self, autojump_clock: MockClock) -> None:
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

    async def test_next_entry_is_published_soon_and_only_the_newest(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for moment, word in ((0.05, b"a"), (0.1, b"b"), (0.15, b"c")):
                await trio.sleep_until(moment)
                board.publish(word)
            await trio.sleep(5.0)
        assert records.words == [b"c"]
        assert records.moments == pytest.approx([GLANCE_SECONDS])

    async def test_entry_after_a_pause_is_published_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(0.7)
            board.publish(b"a")
            await wait_all_tasks_blocked()
            assert records.words == [b"a"]
            assert records.moments == pytest.approx([0.7])

    async def test_frequent_entries_are_published_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            for count in range(100):
                board.publish(b"%d" % count)
                await trio.sleep(0.03)
            await trio.sleep(GLANCE_SECONDS)
        gaps = [later - before for before, later in itertools.pairwise(records.moments)]
        assert min(gaps) >= GLANCE_SECONDS - 1e-9
        assert max(gaps) <= GLANCE_SECONDS + 0.03 + 1e-9
        assert records.words[-1] == b"99"

    @pytest.mark.parametrize("urgent", [(True, False), (False, True), (True, True)])
    async def test_newest_of_two_entries_is_published_with_either_urgency(
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

    async def test_entry_is_published_once(self, autojump_clock: MockClock) -> None:
        """The node renews the record."""
        records = Records()
        async with open_board(records) as board:
            board.publish(b"a")
            await trio.sleep(60.0)
        assert len(records.published) == 1

    async def test_publish_from_any_thread(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            thread = threading.Thread(target=board.publish, args=(b"a",))
            thread.start()
            thread.join(WATCHDOG)
            await trio.sleep(2 * GLANCE_SECONDS)
            assert records.words == [b"a"]


class TestLooking:
    async def test_entries_are_read_at_intervals(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.there = (record(),)
            await trio.sleep_until(0.99 * LOOK_SECONDS)
            assert heard(board) == {}
            await trio.sleep_until(3.5 * LOOK_SECONDS)
            assert heard(board) == {ALICE.peer_id: b"a"}
        assert records.found == pytest.approx([LOOK_SECONDS * count for count in range(4)])
        assert records.keys == {KEY}

    async def test_publishing_also_reads_entries(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.there = (record(),)
            await trio.sleep_until(0.4)
            board.publish(b"mine", now=True)
            await wait_all_tasks_blocked()
            assert heard(board) == {ALICE.peer_id: b"a"}
            await trio.sleep(1.5 * LOOK_SECONDS)
        assert records.found == pytest.approx([0.0, 0.4 + LOOK_SECONDS])

    async def test_records_stored_here_are_read_at_once(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(0.3)
            version = board.version
            records.store(record())
            assert heard(board) == {ALICE.peer_id: b"a"}
            assert board.version > version
        assert len(records.found) == 1


class TestWhatIsHeard:
    @given(st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.integers(1, 6), st.booleans()), max_size=12))
    def test_newest_entry_counts_in_any_order_of_records(
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
                        board.poll()
                        await wait_all_tasks_blocked()
                    else:
                        records.store(one)
                    newest[signer.peer_id] = max(newest.get(signer.peer_id, 0), sequence)
                    assert heard(board) == {p: b"%d" % s for p, s in newest.items() if s % 3}

        trio.run(main, clock=MockClock())

    async def test_an_entry_from_before_the_end_of_its_peer_does_not_bring_it_back(
        self, mock_clock: MockClock
    ) -> None:
        """The last entry of a peer that is killed may arrive after its end is noticed."""
        records = Records()
        async with open_board(records) as board:
            records.store(record(ALICE, b"first", sequence=1, until=SAID_TTL_SECONDS))
            mock_clock.jump(2.0)
            board.depart(ALICE.peer_id)
            assert not heard(board)
            records.store(record(ALICE, b"last", sequence=2, until=SAID_TTL_SECONDS + 1.9))
            assert not heard(board)
            assert board.entries == {}

    async def test_an_entry_from_after_the_end_of_its_peer_brings_it_back(
        self, mock_clock: MockClock
    ) -> None:
        records = Records()
        async with open_board(records) as board:
            mock_clock.jump(2.0)
            board.depart(ALICE.peer_id)
            records.store(record(ALICE, b"again", sequence=3, until=SAID_TTL_SECONDS + 2.1))
            assert heard(board) == {ALICE.peer_id: b"again"}

    async def test_an_end_in_the_future_hides_no_entry(self, mock_clock: MockClock) -> None:
        """The wall clock of this machine was set back after it noticed the end."""
        records = Records()
        async with open_board(records) as board:
            board.depart(ALICE.peer_id)
            board._departed[ALICE.peer_id] += 10.0
            records.store(record(ALICE, b"again", sequence=3, until=SAID_TTL_SECONDS))
            assert heard(board) == {ALICE.peer_id: b"again"}

    async def test_ends_of_peers_are_forgotten_when_their_entries_cannot_be_live(
        self, mock_clock: MockClock
    ) -> None:
        records = Records()
        async with open_board(records) as board:
            board.depart(ALICE.peer_id)
            mock_clock.jump(SAID_TTL_SECONDS + 0.1)
            records.store(record(BOB, b"b", until=2 * SAID_TTL_SECONDS))
            assert not board._departed

    async def test_own_entry_is_left_out(self, mock_clock: MockClock) -> None:
        records = Records()
        records.there = (record(ME, b"mine"),)
        async with open_board(records) as board:
            records.store(record(ME, b"mine", sequence=2))
            assert heard(board) == {}
            assert board.version == 0

    async def test_entry_disappears_at_its_expiration(self, autojump_clock: MockClock) -> None:
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

    async def test_expired_record_is_ignored(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await trio.sleep_until(3.0)
            version = board.version
            records.store(record(until=3.0))
            assert heard(board) == {}
            assert board.version == version

    async def test_version_grows_with_a_renewal_only(self, autojump_clock: MockClock) -> None:
        """A peer that renews its entry is alive, even if the value is the same."""
        records = Records()
        async with open_board(records) as board:
            records.store(record())
            version = board.version
            records.store(record())
            await trio.sleep(3 * LOOK_SECONDS)
            assert board.version == version
            records.store(record(sequence=2))
            assert board.version > version


class Noticing(threading.Condition):
    """A condition that reports when a thread has begun to wait; only a later notification can wake it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def waiting(board: Board) -> threading.Thread:
    """Run a thread that waits for the next change, for an hour."""
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
    async def test_waiting_ends_with_a_new_entry(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            thread = waiting(board)
            assert thread.is_alive()
            records.store(record())
            thread.join(WATCHDOG)
            assert not thread.is_alive()

    async def test_waiting_for_a_past_change_returns_at_once(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            version = board.version
            records.store(record())
            board.wait(version, 3600.0)

    async def test_waiting_times_out(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            for timeout in (0.0, 0.001):
                board.wait(board.version, timeout)
                assert board.version == 0

    async def test_waiting_on_an_ended_board_raises(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            thread = waiting(board)
            await board.aclose()
            await wait_all_tasks_blocked()
            thread.join(WATCHDOG)
            assert not thread.is_alive()
            with pytest.raises(ClosedError):
                board.wait(board.version, 3600.0)

    async def test_waiting_on_a_cancelled_board_raises(self, mock_clock: MockClock) -> None:
        async with open_board(Records()) as board:
            thread = waiting(board)
        thread.join(WATCHDOG)
        assert not thread.is_alive()


class TestCallsThatHang:
    async def test_hanging_calls_do_not_delay_the_next_entry(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.gate = trio.Event()
            for count in range(MAX_CALLS):
                board.publish(b"%d" % count, now=True)
                await wait_all_tasks_blocked()
                assert records.words[-1] == b"%d" % count
                assert records.moments[-1] == 0.0
                assert records.calling == count + 1

    async def test_concurrent_calls_are_limited_and_the_newest_entry_goes_first(
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

    async def test_stored_records_are_read_while_calls_hang(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.gate = trio.Event()
            await trio.sleep(60.0)
            assert records.calling == MAX_CALLS
            records.store(record(until=90.0))
            assert heard(board) == {ALICE.peer_id: b"a"}


class TestTakingBack:
    async def test_withdrawal_is_urgent_and_replaces_a_pending_entry(self, autojump_clock: MockClock) -> None:
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


class TestTheEnd:
    async def test_closing_withdraws_the_entry(self, autojump_clock: MockClock) -> None:
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

    async def test_entries_can_be_read_after_closing(self, mock_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            records.store(record())
            await board.aclose()
            assert heard(board) == {ALICE.peer_id: b"a"}

    async def test_entry_after_closing_is_not_published(self, autojump_clock: MockClock) -> None:
        records = Records()
        async with open_board(records) as board:
            await board.aclose()
            board.publish(b"a", now=True)
            board.poll()
            await trio.sleep(5.0)
        assert records.published == []

    def test_entry_just_before_closing_is_dropped_or_withdrawn(self) -> None:
        """This holds at any stage of publishing."""

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

    async def test_entry_withdrawn_before_the_start_is_not_published(self, autojump_clock: MockClock) -> None:
        records = Records()
        board = Board(records, key=KEY, peer_id=ME.peer_id, wall_clock=wall_clock)
        board.publish(b"a", now=True)
        await board.aclose()
        await board.run()
        assert records.published == []

    def test_calls_after_the_event_loop_ended_do_nothing(self) -> None:
        async def main() -> Board:
            async with open_board(Records()) as board:
                return board

        board = trio.run(main, clock=MockClock())
        board.publish(b"a")
        board.publish(b"b", now=True)
        board.poll()
        with pytest.raises(ClosedError):
            board.wait(board.version, 3600.0)
