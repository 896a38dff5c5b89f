"""A process that sends nonsense costs itself: the others train on, and the peer keeps running."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import pytest
import torch

import p2pavg
from p2pavg.allreduce.vector.accumulation import schema_of
from p2pavg.attached import combining, guest, rounds, serving
from p2pavg.attached.messages import MAX_MESSAGE_BYTES, VERSION, frame
from p2pavg.attached.settings import encode_config, encode_schema, on_cpu
from p2pavg.net.nat.reach import watcher
from tests.integration.optim.company import config

SCHEMA = encode_schema(on_cpu(schema_of([torch.ones(3)])[0]))
OPEN = frame("open", 0, encode_config(config(2)))
DECLARE = frame("declare", 0, SCHEMA)
STEP = (1, 1.0, (), b"", 0, 0, False, False, ())


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.settimeout(30.0)
        found.connect(address.removeprefix("unix:"))
        yield found


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer ends the connection, after any messages."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        return True
    return True


def check_that_the_peer_serves(address: str) -> None:
    with (
        p2pavg.attach(address, name="honest") as peer,
        peer.averager(config(2, match_timeout=1.0)) as averager,
    ):
        averager.accumulate([torch.ones(3)])
        assert isinstance(averager.step(wait=30.0), p2pavg.NoPeers)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        frame("open", 0, b""),
        frame("attach", VERSION),
        frame("attached", VERSION, "P", ()),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_connection_that_does_not_attach_is_closed(shared: str, data: bytes) -> None:
    with connected(shared) as connection:
        connection.sendall(data)
        assert is_closed(connection)
    check_that_the_peer_serves(shared)


@pytest.mark.parametrize(
    "data",
    [
        frame("attach", VERSION, "again"),
        frame("step", 0, *STEP),
        frame("close", 0),
        frame("say", 0, "progress", b"x", True),
        frame("open", -1, b""),
        frame("open", 0, b""),
        frame("open", 0, msgpack.packb([None] * 17)),
        OPEN + OPEN,
        OPEN + DECLARE + DECLARE,
        OPEN + frame("declare", 0, b"\xc1"),
        OPEN + frame("step", 0, *STEP),
        OPEN + frame("say", 0, "progress", b"x", True),
        OPEN + frame("board", 0, "x" * 100, 1.0),
        OPEN + frame("board", 0, "status", 1.0) + frame("say", 0, "status", b"x", True),
        OPEN + frame("board", 0, "progress", 1.0) + frame("say", 0, "progress", b"x" * 5000, True),
        OPEN + DECLARE + frame("step", 0, 1, -1.0, (), b"", 0, 0, False, False, ()),
        OPEN + DECLARE + frame("step", 0, 1, 1.0, (1,), b"", 0, 0, False, False, ()),
        OPEN + DECLARE + frame("step", 0, 2**64 - 1, 1.0, (), b"", 0, 0, False, False, ()),
        b"".join(
            [OPEN, *(frame("board", 0, f"topic {number}", 1.0) for number in range(17))],
        ),
    ],
)
def test_an_attached_process_that_breaks_the_protocol_is_dropped(shared: str, data: bytes) -> None:
    with connected(shared) as connection:
        connection.sendall(frame("attach", VERSION, "hostile") + data)
        assert is_closed(connection)
    check_that_the_peer_serves(shared)


def test_a_vector_larger_than_the_machine_is_refused(shared: str) -> None:
    huge = encode_schema(on_cpu(schema_of([torch.empty(1).expand(2**39)])[0]))
    with connected(shared) as connection:
        connection.sendall(frame("attach", VERSION, "greedy") + OPEN + frame("declare", 0, huge))
        received = b""
        while b"refused" not in received:
            received += connection.recv(2**16)
        assert b"this machine has" in received
    check_that_the_peer_serves(shared)


def test_a_process_of_another_version_hears_it(shared: str) -> None:
    with connected(shared) as connection:
        connection.sendall(frame("attach", VERSION + 1, "new"))
        assert b"install one" in connection.recv(2**16)
        assert is_closed(connection)


def test_more_processes_than_the_limit_are_turned_away(shared: str) -> None:
    found = []
    try:
        for number in range(64):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.append(connection)
            connection.settimeout(30.0)
            connection.connect(shared.removeprefix("unix:"))
            connection.sendall(frame("attach", VERSION, f"p{number}"))
            assert b"attached" in connection.recv(2**16)
        with connected(shared) as late:
            assert is_closed(late)
    finally:
        for connection in found:
            connection.close()
    check_that_the_peer_serves(shared)


@pytest.mark.long
def test_a_process_that_does_not_read_its_result_is_dropped(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result must not change while it reads, and the others must not wait for it for ever."""
    monkeypatch.setattr(rounds, "READ_SECONDS", 1.0)
    with (
        connected(shared) as connection,
        p2pavg.attach(shared, name="honest") as peer,
        peer.averager(config(2)) as averager,
    ):
        asks = frame("step", 0, 1, 1.0, (), b"", 0, 0, False, False, ())
        averager.accumulate([torch.ones(3)])  # from here on the peer waits for this process, too
        answered = frame("cancel", 0, 2, "no such step")  # its answer comes when the step before it was taken
        connection.sendall(frame("attach", VERSION, "deaf") + OPEN + DECLARE + asks + answered)
        heard = b""
        while b"cancelled" not in heard:
            heard += connection.recv(2**16)
        first = averager.step(wait=30.0)
        assert isinstance(first, p2pavg.Success)
        assert len(first.peers) == 2
        averager.accumulate([torch.ones(3)])
        assert isinstance(averager.step(wait=0.0), p2pavg.InProgress)
        assert is_closed(connection)


def test_only_processes_of_the_peers_user_are_served(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with connected(shared) as connection:
        with suppress(BrokenPipeError):  # the peer may have closed it already
            connection.sendall(frame("attach", VERSION, "a"))
        assert is_closed(connection)
    with (
        pytest.raises(p2pavg.AttachError, match="another user's process serves the socket"),
        p2pavg.attach(shared, timeout=10.0),
    ):
        pass


def test_a_process_that_reads_nothing_is_dropped(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "MAX_QUEUED_BYTES", 100_000)
    with connected(shared) as connection:
        connection.sendall(frame("attach", VERSION, "deaf") + OPEN + frame("board", 0, "recipes", 1.0))
        with p2pavg.attach(shared, name="honest") as peer, peer.averager(config(2)) as averager:
            board = averager.board("recipes")
            for number in range(300):
                board.publish(bytes(4000) + str(number).encode())
            assert is_closed(connection)
    check_that_the_peer_serves(shared)


def test_an_exception_in_one_run_costs_the_processes_of_that_run(
    shared: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They attach again by themselves, and their round is carried out then."""
    calls = 0

    def combine(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        combining.combine(*args)

    monkeypatch.setattr(rounds, "combine", combine)
    with (
        p2pavg.attach(shared, name="beside") as other,
        other.averager(config(2, run_id="another")),
        p2pavg.attach(shared, name="one") as one,
        one.averager(config(2)) as first,
        p2pavg.attach(shared, name="two") as two,
        two.averager(config(2)) as second,
    ):
        for averager, sibling in ((first, second), (second, first)):
            averager.accumulate([torch.ones(3)])
            averager.expect([sibling.peer_id])  # one of them attaches again before the other
            averager.step(wait=0.0)
        assert isinstance(first.step(wait=60.0), p2pavg.Success)
        assert isinstance(second.step(wait=60.0), p2pavg.Success)
    assert "run 'company' ends by an exception" in caplog.text
    assert "process one is dropped" in caplog.text
    assert "process beside is dropped" not in caplog.text


def test_an_exception_about_one_message_costs_its_process(
    shared: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    with connected(shared) as connection, monkeypatch.context() as patched:
        patched.setattr(serving, "read_schema", fail)
        connection.sendall(frame("attach", VERSION, "odd") + OPEN + DECLARE)
        assert is_closed(connection)
    assert "an exception while the attached process odd was served" in caplog.text
    check_that_the_peer_serves(shared)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peers look at the machine's addresses often."""
    monkeypatch.setattr(watcher, "LOOK_AGAIN_SECONDS", 0.05)


def test_a_machine_without_a_file_to_open_delays_an_attachment(
    often: None, shared: str, caplog: pytest.LogCaptureFixture
) -> None:
    awaited = ("cannot take a connection", "cannot look at this machine's addresses")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            connection.connect(shared.removeprefix("unix:"))
            until = time.monotonic() + 30.0
            while not all(text in caplog.text for text in awaited):
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connection.sendall(frame("attach", VERSION, "patient"))
        assert b"attached" in connection.recv(2**16)
