"""The messages to the service manager."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from p2pavg.tools.daemon.life import READY, notify, reloading


@pytest.mark.parametrize("abstract", [False, True])
def test_the_manager_hears_state_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"@p2pavg-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify(READY, "3 peers")
        assert manager.recv(100) == b"READY=1\nSTATUS=3 peers"
        notify("", "4 peers")
        assert manager.recv(100) == b"STATUS=4 peers"
        notify(reloading())
        assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)


def test_a_manager_that_is_gone_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING, "p2pavg"):
        notify(READY)
    assert "cannot tell the service manager" in caplog.text
