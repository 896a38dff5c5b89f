"""The time for which a thread had work and no processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pavg.base.threads import processor
from p2pavg.base.threads.processor import ThreadWaits, never_waits, wait_of_this_thread

ENDLESS = "while True: pass"


@pytest.fixture
def busy_processor() -> Iterator[None]:
    """Share one processor with a process that never rests."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    rival = subprocess.Popen([sys.executable, "-c", ENDLESS])  # it inherits the processor
    try:
        yield
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread has waited")
def test_a_thread_that_shares_a_processor_waits(busy_processor: None) -> None:
    wait = wait_of_this_thread()
    before = wait()
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    assert wait() > before


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that Linux fills, here written by the test."""
    made = tmp_path / "schedstat"
    monkeypatch.setattr(processor, "Path", lambda _: made)
    return made


def test_nanoseconds_on_a_run_queue_are_counted(file: Path) -> None:
    file.write_bytes(b"700 1500000000 3\n")
    wait = wait_of_this_thread()
    assert wait() == 1.5
    file.write_bytes(b"900 2000000000 4\n")
    assert wait() == 2.0
    file.unlink()
    assert wait() == 2.0


def test_a_wait_is_not_longer_than_the_time_that_has_passed() -> None:
    """The system's number may jump: if no file can be opened, the last one is returned again."""
    told = iter([5.0, 5.5, 100.0, 90.0, 90.1])
    waits = ThreadWaits(lambda: next(told), now=10.0)
    assert waits.since_last_look(11.0) == 0.5
    assert waits.since_last_look(12.0) == 1.0
    assert waits.since_last_look(13.0) == 0.0
    assert waits.since_last_look(14.0) == pytest.approx(0.1)


@pytest.mark.parametrize("content", [None, b"", b"12 x 3"])
def test_a_system_that_does_not_tell_never_waits(content: bytes | None, file: Path) -> None:
    if content is not None:
        file.write_bytes(content)
    assert wait_of_this_thread() is never_waits
