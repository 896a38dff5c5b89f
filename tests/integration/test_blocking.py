"""The blocking averager for ordinary training loops, between real peers on loopback."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from p2pavg import Failed, InProgress, NoPeers, NoPeersCode, RoundResult, Success
from p2pavg.base.errors import ClosedError
from p2pavg.blocking import Averager, open_averager
from tests.integration.loopback import (
    LOOPBACK,
    WATCHDOG_SECONDS,
    config,
    step_together,
    tensors,
    two_averagers,
)


def test_a_round_of_two() -> None:
    with two_averagers() as (first, second):
        values = [torch.randn(3, 5), torch.tensor(2.0), torch.zeros(0), torch.randn(7).half()]
        first.accumulate(values, weight=3)
        first.accumulate(values, weight=5)
        second.accumulate([torch.zeros_like(value) for value in values], weight=24)
        one, other = step_together(first, second)
        for mine, its, value in zip(tensors(one), tensors(other), values, strict=True):
            assert torch.equal(mine, its)
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(mine, value / 4)
        assert isinstance(one, Success)
        assert isinstance(other, Success)
        assert one.group_id == other.group_id
        assert set(one.peers) == {first.peer_id, second.peer_id}
        assert one.peers == other.peers
        assert len(one.peers) == 2
        assert dict(one.weights) == {first.peer_id: 8.0, second.peer_id: 24.0}
        assert one.total_weight == 32.0
        assert one.auxiliaries == ()
        assert one.duration >= one.exchange_duration > 0
        assert one.bytes_sent > 0
        assert one.bytes_received > 0
        assert (first.weight, first.accumulated) == (0.0, None)
        for averager in (first, second):
            assert averager.config == config()
            assert averager.addresses
            for address in averager.addresses:
                assert address.startswith("/ip4/127.0.0.1/tcp/")
                assert address.endswith(f"/p2p/{averager.peer_id}")


def test_all_transferred_bytes_are_counted() -> None:
    elements = 200_000
    codec = config(compression="blockwise8").codec
    with two_averagers(compression="blockwise8") as (first, second):
        for averager in (first, second):
            averager.accumulate([torch.randn(elements)])
        for result in step_together(first, second):
            assert isinstance(result, Success)
            half = codec.encoded_nbytes(elements // 2)
            assert 2 * half < result.bytes_sent < 2.01 * half
            assert 2 * half < result.bytes_received < 2.01 * half
            # Half of the vector goes out and in as contributions, and half of it in and out as averages.
            moved = result.bytes_sent + result.bytes_received
            assert result.compression_ratio == pytest.approx(4 * 2 * elements / moved)


def test_a_step_without_waiting_is_collected_by_a_later_one() -> None:
    with two_averagers() as (first, second):
        first.accumulate([torch.ones(4)], weight=2.0)
        # No other peer is ready yet: if this call waited, it would wait for the second peer.
        begun = first.step(wait=0)
        assert begun == InProgress(ready_peers=1, target_size=2, reason="a group is being formed")
        assert first.weight == 0.0
        first.accumulate([torch.full((4,), 100.0)], weight=7.0)  # of the next round
        second.accumulate([torch.full((4,), 5.0)], weight=2.0)
        other = second.step(wait=None)
        result = first.step(wait=WATCHDOG_SECONDS)
        assert torch.equal(tensors(result)[0], torch.full((4,), 3.0))
        assert torch.equal(tensors(result)[0], tensors(other)[0])
        assert first.weight == 7.0
        assert torch.equal(first.accumulated[0], torch.full((4,), 100.0))  # type: ignore[index]


class TestSteppingWithoutWaiting:
    """A training loop may call ``step(wait=0)`` in each of its steps: mostly, the averager's thread is not asked."""

    @pytest.fixture(autouse=True)
    def seldom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let what is known of a round be told again for the whole test."""
        monkeypatch.setattr("p2pavg.blocking.GLANCE_SECONDS", 1e6)

    def test_a_round_without_news_costs_no_call_of_the_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with open_averager(config(match_timeout=1800.0), listen=LOOPBACK) as alone:
            alone.accumulate([torch.ones(2)])
            begun = alone.step(wait=0)
            called: list[object] = []
            monkeypatch.setattr(alone._thread, "call", called.append)
            assert [alone.step(wait=0.0) for _ in range(100)] == [begun] * 100
            assert called == []
            with pytest.raises(ValueError, match=r"^group_size\b"):
                alone.step(wait=0, group_size=65)

    def test_progress_is_asked_again_after_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("p2pavg.blocking.GLANCE_SECONDS", 0.05)
        with two_averagers(match_timeout=1800.0, group_size=3) as (first, second):
            first.accumulate([torch.ones(2)])
            assert first.step(wait=0) == InProgress(
                ready_peers=1, target_size=3, reason="a group is being formed"
            )
            second.accumulate([torch.ones(2)])
            second.step(wait=0)
            assert until(first, lambda told: isinstance(told, InProgress) and told.ready_peers == 2)

    def test_a_result_is_returned_as_soon_as_it_is_there(self) -> None:
        with two_averagers() as (first, second):
            first.accumulate([torch.ones(2)])
            assert isinstance(first.step(wait=0), InProgress)
            second.accumulate([torch.ones(2)])
            assert isinstance(second.step(wait=None), Success)
            assert isinstance(until(first, lambda told: not isinstance(told, InProgress)), Success)
            assert isinstance(first.step(wait=0), NoPeers), "nothing is accumulated"

    def test_the_average_of_a_round_that_has_ended_is_not_kept(self) -> None:
        with two_averagers() as (first, second):
            first.accumulate([torch.ones(2)])
            assert isinstance(first.step(wait=0), InProgress)
            second.accumulate([torch.ones(2)])
            assert isinstance(second.step(wait=None), Success)
            average = weakref.ref(tensors(first.step(wait=None))[0])
            gc.collect()
            assert average() is None

    def test_the_next_round_is_not_told_the_progress_of_the_one_before(self) -> None:
        with open_averager(config(match_timeout=0.5), listen=LOOPBACK) as alone:
            alone.accumulate([torch.ones(2)])
            assert alone.step(wait=0, group_size=3) == InProgress(
                ready_peers=1, target_size=3, reason="a group is being formed"
            )
            assert isinstance(alone.step(wait=None), NoPeers)
            with ThreadPoolExecutor(1) as threads:
                other = threads.submit(alone.step, wait=None, group_size=4)
                # Whichever of the two threads begins the round, it is one of four.
                told = until(alone, lambda told: isinstance(told, InProgress), group_size=4)
                assert isinstance(told, InProgress)
                assert told.target_size == 4
                assert isinstance(other.result(WATCHDOG_SECONDS), NoPeers)

    def test_the_end_of_a_match_timeout_is_told(self) -> None:
        with open_averager(config(match_timeout=0.3), listen=LOOPBACK) as alone:
            alone.accumulate([torch.ones(2)])
            assert isinstance(alone.step(wait=0), InProgress)
            assert isinstance(until(alone, lambda told: not isinstance(told, InProgress)), NoPeers)

    def test_a_closed_averager_says_so(self) -> None:
        with open_averager(config(match_timeout=1800.0), listen=LOOPBACK) as alone:
            sibling, close = alone.open_sibling(config(match_timeout=1800.0, run_id="another"))
            for averager in (alone, sibling):
                averager.accumulate([torch.ones(2)])
                assert isinstance(averager.step(wait=0), InProgress)
            close()
            with pytest.raises(ClosedError):
                sibling.step(wait=0)
        with pytest.raises(ClosedError):
            alone.step(wait=0)


def until(
    averager: Averager, wanted: Callable[[RoundResult], bool], *, group_size: int | None = None
) -> RoundResult:
    """Call ``step(wait=0)`` until it returns what is wanted."""
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not wanted(told := averager.step(wait=0, group_size=group_size)):
        assert time.monotonic() < deadline, told
        time.sleep(0.001)
    return told


def test_one_peer_declares_and_the_other_observes() -> None:
    with two_averagers() as (first, second):
        value = torch.randn(400, 500)
        first.accumulate([value], weight=2.0, metrics={"loss": 2.5, "accuracy": 0.5})
        second.declare([torch.zeros(400, 500)])
        with ThreadPoolExecutor(2) as threads:
            contributes = threads.submit(first.step, wait=None, state=b"step 7", group_size=2)
            observes = threads.submit(second.step, wait=None, state=b"step 7", observe=True)
            results = [each.result(WATCHDOG_SECONDS) for each in (contributes, observes)]
        for result in results:
            assert torch.equal(tensors(result)[0], value)
            assert isinstance(result, Success)
            assert result.peers == (first.peer_id,)
            assert result.observers == (second.peer_id,)
            assert result.metrics == {"loss": 2.5, "accuracy": 0.5}
        assert (first.weight, second.weight) == (0.0, 0.0)


def test_each_argument_of_a_step_reaches_the_round() -> None:
    with open_averager(config(group_size=4, match_timeout=1800.0), listen=LOOPBACK) as alone:
        alone.accumulate([torch.ones(2)])
        for name, value in (("state", b"x" * 33), ("group_size", 65)):
            with pytest.raises(ValueError, match=rf"^{name}\b"):
                alone.step(**{"wait": 0, name: value})  # type: ignore[arg-type]
        begun = alone.step(wait=0, observe=True, group_size=3)
        assert isinstance(begun, InProgress)
        assert begun.target_size == 3
        assert alone.weight == 1.0, "the peer observes"


def test_a_step_that_cannot_begin_a_round_does_not_wait() -> None:
    nothing = NoPeers(reason="nothing is accumulated", code=NoPeersCode.NOTHING_ACCUMULATED)
    with open_averager(config(match_timeout=1800.0), listen=LOOPBACK) as alone:
        assert alone.step(wait=None) == nothing
        alone.accumulate([torch.ones(2)])
        alone.clear()
        assert alone.step(wait=None) == nothing
        alone.accumulate([torch.ones(2)])
        for wait in (-1, float("nan"), "5", True):
            with pytest.raises(ValueError, match="wait must be None or a number of seconds"):
                alone.step(wait=wait)  # type: ignore[arg-type]
        assert alone.weight == 1.0


def test_many_threads_use_one_averager() -> None:
    """One thread accumulates, two step: no weight is lost or counted twice, and each result goes to one thread."""
    calls, rounds = 60, 3
    collected: list[Success] = []
    failures: list[RoundResult] = []
    enough = threading.Event()

    def accumulate(averager: Averager) -> None:
        for number in range(calls):
            averager.accumulate([torch.full((100,), float(number))])

    def step(averager: Averager) -> None:
        while not enough.is_set():
            result = averager.step(wait=0.05)
            if isinstance(result, Success):
                collected.append(result)
            elif isinstance(result, Failed):
                failures.append(result)
            elif isinstance(result, NoPeers) and not enough.is_set():
                averager.accumulate([torch.zeros(100)], weight=0.5)
                extra.append(0.5)
            if len(collected) >= rounds:
                enough.set()

    extra: list[float] = []
    with two_averagers() as (first, second):
        with ThreadPoolExecutor(3) as threads:
            done = [threads.submit(accumulate, first), *[threads.submit(step, first) for _ in range(2)]]
            others: list[Success] = []
            while len(others) < rounds:
                second.accumulate([torch.zeros(100)])
                result = second.step(wait=None)
                assert isinstance(result, Success), result
                others.append(result)
            assert enough.wait(WATCHDOG_SECONDS)
            for each in done:
                each.result(WATCHDOG_SECONDS)
        name = first.peer_id
    assert failures == []
    assert sorted(result.group_id for result in collected) == sorted(result.group_id for result in others)
    # The last round may have been interrupted by the end. Its contribution then counts as accumulated again.
    assert sum(result.weights[name] for result in collected) + first.weight == calls + sum(extra)


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with two_averagers() as (first, second):
            for averager in (first, second):
                averager.accumulate([torch.randn(100_000)])
            assert all(isinstance(result, Success) for result in step_together(first, second))
            assert torch.get_num_threads() == 3
            with ThreadPoolExecutor(1) as new_thread:
                assert new_thread.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
