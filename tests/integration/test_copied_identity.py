"""One identity in two processes: the same key file, or a copy of it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from p2pavg import IdentityError
from p2pavg.blocking import Averager, open_averager
from p2pavg.runs.records.identity import identity_of_this_process
from tests.integration.loopback import LOOPBACK, WATCHDOG_SECONDS, config


def test_one_key_file_is_for_one_peer_of_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "identity.key"
    with open_averager(config(), listen=LOOPBACK, identity=file) as first:
        with pytest.raises(IdentityError, match="another peer that runs on this machine has the identity"):
            open_averager(config(), listen=LOOPBACK, identity=file).__enter__()
        identity = first.peer_id
    with open_averager(config(), listen=LOOPBACK, identity=file) as again:
        assert again.peer_id == identity


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it forks
@pytest.mark.parametrize("crashes", [False, True])
def test_a_forked_worker_does_not_keep_the_key_file(tmp_path: Path, crashes: bool) -> None:
    """A worker of a DataLoader may outlive its parent for a while."""
    file, forked = tmp_path / "identity.key", tmp_path / "worker"
    if not (parent := os.fork()):
        try:
            with identity_of_this_process(file):
                if not (worker := os.fork()):
                    time.sleep(WATCHDOG_SECONDS)
                    os._exit(0)
                forked.write_text(str(worker))
                if crashes:
                    os._exit(0)
        finally:
            os._exit(0)
    os.waitpid(parent, 0)
    try:
        with identity_of_this_process(file):
            pass
    finally:
        os.kill(int(forked.read_text()), signal.SIGKILL)


def until_it_ends(averager: Averager) -> IdentityError:
    """Wait for other peers, as an optimizer does, until the averager ends; return its error."""
    until = time.monotonic() + WATCHDOG_SECONDS
    try:
        board = averager.board("progress")
        board.publish(b"later", now=True)
        while time.monotonic() < until:
            averager.members()
            time.sleep(0.2)
    except IdentityError as error:
        return error
    raise AssertionError("the later process has not ended")


def test_of_two_copies_of_a_key_the_later_peer_ends_and_both_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The entries of the earlier one stay: the later one withdraws nothing in its name."""
    file, copy = tmp_path / "identity.key", tmp_path / "copy.key"
    with (
        open_averager(config(), listen=LOOPBACK) as hub,
        open_averager(config(), listen=LOOPBACK, bootstrap=hub.addresses, identity=file) as earlier,
    ):
        shutil.copy(file, copy)
        board, seen = earlier.board("progress"), hub.board("progress")
        board.publish(b"earlier", now=True)
        with open_averager(config(), listen=LOOPBACK, bootstrap=hub.addresses, identity=copy) as later:
            assert later.peer_id == earlier.peer_id
            assert "its key file was copied" in str(until_it_ends(later))
        assert earlier.peer_id in seen.entries
        told = [found for found in caplog.records if "which began after this one" in found.message]
        assert [found.levelno for found in told] == [logging.ERROR]
        earlier.members()  # it has not ended
        board.publish(b"goes on", now=True)
        while (entry := seen.entries.get(earlier.peer_id)) is None or entry.value != b"goes on":
            seen.wait(seen.version, 1.0)
