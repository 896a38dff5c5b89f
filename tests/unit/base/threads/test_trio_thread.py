"""The thread that runs trio: its calls, its end, and the reports of its errors. No network."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import trio

from p2pavg.base.errors import ClosedError
from p2pavg.base.threads.trio_thread import TrioThread

WATCHDOG_SECONDS = 120.0

Give = Callable[[str], None]
Live = Callable[[Give, trio.Event], Awaitable[None]]


class BoomError(Exception):
    pass


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Restore the default handler of SIGINT, because a shell makes background jobs and their children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def live(give: Give, stop: trio.Event) -> None:
    give("ready")
    await stop.wait()


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


@contextmanager
def running(live: Live = live, name: str = "under test") -> Iterator[TrioThread[str]]:
    thread = TrioThread(live, name=name)
    try:
        assert thread.start() == "ready"
        yield thread
    finally:
        thread.stop()
        assert not is_running(name)


async def boom() -> None:
    raise BoomError("in the thread")


def ending_with(error: BaseException) -> tuple[Live, threading.Event]:
    """A ``live`` that waits for the event, and then ends with an error."""
    end = threading.Event()

    async def until_then(give: Give, _stop: trio.Event) -> None:
        give("ready")
        await trio.to_thread.run_sync(end.wait)
        raise error

    return until_then, end


class TestCalls:
    def test_a_call_runs_in_the_thread_and_brings_its_result(self) -> None:
        async def where() -> str:
            await trio.lowlevel.checkpoint()
            return threading.current_thread().name

        with running() as thread:
            assert thread.call(where) == "under test"
            assert is_running("under test")

    def test_torch_uses_one_thread_inside_and_is_unchanged_outside(self) -> None:
        async def count() -> int:
            return torch.get_num_threads()

        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            with running() as thread:
                assert thread.call(count) == 1
                assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)

    def test_an_exception_of_a_call_reaches_its_caller_only(self) -> None:
        with running() as thread:
            with pytest.raises(BoomError, match="in the thread"):
                thread.call(boom)
            thread.check()

            async def works() -> int:
                return 5

            assert thread.call(works) == 5

    def test_calls_of_several_threads_run_together(self) -> None:
        """Each call waits in the thread for all others."""
        count = 6
        arrived: list[int] = []
        together = trio.Event()

        async def meet(number: int) -> int:
            arrived.append(number)
            if len(arrived) == count:
                together.set()
            await together.wait()
            return number

        results: list[int] = []
        with running() as thread:
            callers = [
                threading.Thread(
                    target=lambda number=number: results.append(thread.call(lambda: meet(number)))
                )
                for number in range(count)
            ]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(WATCHDOG_SECONDS)
        assert sorted(results) == list(range(count))

    def test_ctrl_c_cancels_only_the_interrupted_call(self) -> None:
        cancelled = threading.Event()
        main = threading.main_thread().ident
        assert main == threading.get_ident()

        async def wait_for_ever() -> None:
            try:
                signal.pthread_kill(main, signal.SIGINT)
                await trio.sleep_forever()
            finally:
                cancelled.set()

        async def works() -> int:
            return 5

        with running() as thread:
            with pytest.raises(KeyboardInterrupt):
                thread.call(wait_for_ever)
            assert cancelled.wait(WATCHDOG_SECONDS)
            assert thread.call(works) == 5


class TestTheEnd:
    def test_an_error_of_the_start_is_raised_by_start_only(self) -> None:
        async def fails(_give: Give, _stop: trio.Event) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(boom)

        thread = TrioThread(fails, name="under test")
        with pytest.raises(BoomError, match="in the thread"):
            thread.start()
        thread.stop()  # start() has reported the error already
        assert not is_running("under test")

    def test_live_may_end_before_it_reports_a_start(self) -> None:
        async def ends(_give: Give, _stop: trio.Event) -> None:
            await trio.lowlevel.checkpoint()

        thread = TrioThread(ends, name="under test")
        with pytest.raises(ClosedError, match="closed meanwhile"):
            thread.start()
        thread.stop()

    def test_the_thread_can_be_stopped_while_it_starts(self) -> None:
        cancelled = threading.Event()
        main = threading.main_thread().ident
        assert main == threading.get_ident()

        async def begins_for_ever(_give: Give, _stop: trio.Event) -> None:
            try:
                signal.pthread_kill(main, signal.SIGINT)
                await trio.sleep_forever()
            finally:
                cancelled.set()

        thread = TrioThread(begins_for_ever, name="under test")
        with pytest.raises(KeyboardInterrupt):
            thread.start()
        thread.stop()
        assert cancelled.is_set()
        assert not is_running("under test")

    def test_the_error_reaches_waiting_and_later_calls(self) -> None:
        until_then, end = ending_with(BoomError("ended"))

        async def wait_for_ever() -> None:
            end.set()
            await trio.sleep_forever()

        with running(until_then) as thread:
            for _ in range(2):
                with pytest.raises(BoomError, match="ended"):
                    thread.call(wait_for_ever)
            with pytest.raises(BoomError, match="ended"):
                thread.check()

    def test_the_error_has_priority_over_closed_errors(self) -> None:
        """The clean-up of ``live`` ends a call before the thread itself ends."""

        async def closes_first(give: Give, _stop: trio.Event) -> None:
            give("ready")
            try:
                await waiting.wait()
                raise BoomError("the cause")
            finally:
                closed.set()
                with trio.CancelScope(shield=True):
                    await told.wait()

        async def wait_until_closed() -> None:
            waiting.set()
            await closed.wait()
            trio.lowlevel.current_trio_token().run_sync_soon(told.set)
            raise ClosedError("the averager is closed")

        waiting, closed, told = trio.Event(), trio.Event(), trio.Event()
        with running(closes_first) as thread, pytest.raises(BoomError, match="the cause"):
            thread.call(wait_until_closed)

    def test_an_unreported_error_is_raised_by_stop(self) -> None:
        until_then, end = ending_with(BoomError("unheard"))
        thread = TrioThread(until_then, name="under test")
        thread.start()
        end.set()
        with pytest.raises(BoomError, match="unheard"):
            thread.stop()
        thread.stop()  # only once

    def test_several_errors_at_once_stay_a_group(self) -> None:
        async def twice(give: Give, _stop: trio.Event) -> None:
            give("ready")
            raise ExceptionGroup("both", [BoomError("one"), ValueError("two")])

        thread = TrioThread(twice, name="under test")
        thread.start()
        with pytest.raises(ExceptionGroup) as caught:
            thread.stop()
        assert caught.value.subgroup(BoomError) is not None
        assert caught.value.subgroup(ValueError) is not None

    def test_base_exceptions_are_reported_too(self) -> None:
        until_then, end = ending_with(SystemExit(3))
        thread = TrioThread(until_then, name="under test")
        thread.start()
        end.set()
        with pytest.raises(SystemExit):
            thread.stop()

    def test_a_waiting_call_raises_when_the_thread_is_stopped(self) -> None:
        waiting = threading.Event()
        seen: list[BaseException] = []

        async def wait_for_ever() -> None:
            waiting.set()
            await trio.sleep_forever()

        def call(thread: TrioThread[str]) -> None:
            try:
                thread.call(wait_for_ever)
            except ClosedError as error:
                seen.append(error)

        with running() as thread:
            caller = threading.Thread(target=call, args=(thread,))
            caller.start()
            assert waiting.wait(WATCHDOG_SECONDS)
        caller.join(WATCHDOG_SECONDS)
        assert [str(error) for error in seen] == ["the averager was closed meanwhile"]

    def test_calls_after_the_end_raise_closed_error(self) -> None:
        with running() as thread:
            thread.check()
        for call in (thread.check, lambda: thread.call(boom)):
            with pytest.raises(ClosedError, match=r"^the averager is closed"):
                call()

    def test_stop_lets_live_finish(self) -> None:
        finished: list[bool] = []

        async def takes_leave(give: Give, stop: trio.Event) -> None:
            give("ready")
            await stop.wait()
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            finished.append(True)

        with running(takes_leave):
            pass
        assert finished == [True]

    def test_a_thread_that_does_not_end_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("p2pavg.base.threads.trio_thread.STOP_SECONDS", 0.01)
        release = threading.Event()

        async def hangs(give: Give, stop: trio.Event) -> None:
            give("ready")
            await stop.wait()
            release.wait()

        thread = TrioThread(hangs, name="under test")
        thread.start()
        thread.stop()
        assert "closing under test takes longer than" in caplog.text
        assert "the thread under test did not end within" in caplog.text
        release.set()
        for left in threading.enumerate():
            if left.name == "under test":
                left.join(WATCHDOG_SECONDS)
        assert not is_running("under test")


def exit_code_of_child(function: Callable[[], None]) -> int:
    """Run a function in a child made by os.fork. Return 0 if it returns."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about forks of a process with threads, which this test is about.
        warnings.filterwarnings(
            "ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning
        )
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WATCHDOG_SECONDS))
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestFork:
    def test_a_forked_child_is_refused_and_the_parent_goes_on(self) -> None:
        async def works() -> int:
            return 5

        def in_child() -> None:
            for call in (thread.check, lambda: thread.call(works)):
                with pytest.raises(
                    ClosedError, match=rf"belongs to process {parent} and cannot be used after a fork"
                ):
                    call()
            # The socket that wakes the loop is shared with the parent, so nothing may be sent on it.
            thread._soon = None  # type: ignore[method-assign,assignment]
            thread.stop()

        parent = os.getpid()
        with running() as thread:
            with thread._lock:  # the child waits for no lock that a thread of the parent holds
                assert exit_code_of_child(in_child) == 0
            assert thread.call(works) == 5
