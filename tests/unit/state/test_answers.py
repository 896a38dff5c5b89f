"""Frames of donors are checked against what was asked, before anything is allocated or kept."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError, StateError, StreamBrokenError
from p2pavg.base.threads.workers import ToLoop
from p2pavg.state.joiner.answers import DonorRefusedError, DonorRequest, PendingRequests, WrongPieceError
from p2pavg.state.messages import Frame, FrameKind, encode_frame, encode_refusal

PIECES = [b"first", b"second piece", b"3"]


class AtOnce(ToLoop):
    """Calls at once what is to be called on the event loop."""

    def __init__(self) -> None:
        pass

    def __call__(self, function: Callable[..., object], *args: object) -> None:
        function(*args)


class Owner:
    """Keeps what its requests hear, or raises an error for each piece."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.kept: dict[int, bytes] = {}
        self.indices: list[int] = []
        self.errors: list[Exception | None] = []

    def take(self, index: int, piece: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self.kept[index] = bytes(piece)

    def came(self, _request: DonorRequest, index: int) -> None:
        self.indices.append(index)

    def ended(self, _request: DonorRequest, error: Exception | None) -> None:
        self.errors.append(error)


class Reading:
    """A session's answers, and what its requests have heard."""

    def __init__(self, error: Exception | None = None) -> None:
        self.answers = PendingRequests(AtOnce())
        self.owner = Owner(error)
        self.largest = 0

    def ask_pieces(self, pieces: Sequence[bytes] = PIECES, owner: Owner | None = None) -> DonorRequest:
        sizes = [len(piece) for piece in pieces]
        request = DonorRequest(self.answers.next_number(), owner or self.owner, first=10, sizes=sizes)
        self.answers.expect(request)
        return request

    def ask_manifest(self, most: int = 1000) -> DonorRequest:
        request = DonorRequest(self.answers.next_number(), self.owner, max_manifest_bytes=most)
        self.answers.expect(request)
        return request

    def receive(self, data: bytes) -> None:
        """Read bytes as from a stream that ends after them."""
        rest = memoryview(data)
        for buffer in self.answers.read():
            self.largest = max(self.largest, len(buffer))
            if len(rest) < len(buffer):
                return
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]


def framed(number: int, index: int, piece: bytes) -> bytes:
    return encode_frame(Frame(FrameKind.PIECE, number, index, len(piece))) + piece


def test_pieces_are_kept_in_their_order() -> None:
    reading = Reading()
    number = reading.ask_pieces().number
    reading.receive(b"".join(framed(number, 10 + place, piece) for place, piece in enumerate(PIECES)))
    assert reading.owner.kept == dict(enumerate(PIECES, 10))
    assert reading.owner.indices == [10, 11, 12]
    assert reading.owner.errors == [None]
    assert not reading.answers.waits


def test_a_manifest_is_kept() -> None:
    reading, data = Reading(), bytes(range(200)) * 1000
    request = reading.ask_manifest(len(data))
    reading.receive(encode_frame(Frame(FrameKind.MANIFEST, request.number, 0, len(data))) + data)
    assert request.manifest == data
    assert reading.owner.errors == [None]


def test_a_refusal_ends_a_request() -> None:
    reading = Reading()
    number = reading.ask_pieces().number
    reading.receive(framed(number, 10, PIECES[0]) + encode_refusal(number, "it is gone"))
    (error,) = reading.owner.errors
    assert isinstance(error, DonorRefusedError)
    assert str(error) == "it is gone"
    assert reading.owner.indices == [10]


def test_the_memory_of_a_manifest_grows_with_what_arrives() -> None:
    reading = Reading()
    number = reading.ask_manifest(1 << 30).number
    reading.receive(encode_frame(Frame(FrameKind.MANIFEST, number, 0, 1 << 30)) + bytes(1000))
    assert reading.largest <= 64 * 1024


def test_an_answered_request_is_held_no_longer() -> None:
    """Its sink may hold a whole average, and the next answer may be long in coming."""
    reading = Reading()
    request = reading.ask_pieces(PIECES[:1])
    buffers, rest = reading.answers.read(), framed(request.number, 10, PIECES[0])
    buffer = next(buffers)
    while rest:
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]
        buffer = next(buffers)
    gone = weakref.ref(request)
    del request
    assert gone() is None


DAMAGE: dict[str, bytes] = {
    "a piece of another size": framed(1, 10, b"firs"),
    "a piece out of order": framed(1, 11, PIECES[1]),
    "an earlier piece": framed(1, 9, PIECES[0]),
    "an unknown request": framed(2, 10, PIECES[0]),
    "a manifest": encode_frame(Frame(FrameKind.MANIFEST, 1, 0, 5)) + b"first",
    "a piece too much": b"".join(framed(1, 10 + place, piece) for place, piece in enumerate([*PIECES, b"x"])),
    "a refusal with an index": encode_frame(Frame(FrameKind.REFUSAL, 1, 1, 1)) + b"x",
    "the announcement of a refusal that is too long": encode_frame(Frame(FrameKind.REFUSAL, 1, 0, 801)),
    "an end with a length": encode_frame(Frame(FrameKind.END, 0, 0, 1)) + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_not_asked_is_refused(damage: str) -> None:
    reading = Reading()
    assert reading.ask_pieces().number == 1
    with pytest.raises(RemoteProtocolError):
        reading.receive(DAMAGE[damage])


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Frame(FrameKind.MANIFEST, 1, 0, 1001), "a manifest of 1001 bytes, 1000 are allowed"),
        (Frame(FrameKind.MANIFEST, 1, 0, 0), "a manifest of 0 bytes, 1000 are allowed"),
        (Frame(FrameKind.PIECE, 1, 0, 1), "a piece that was not asked for"),
    ],
)
def test_other_answers_to_a_request_for_a_manifest_are_refused(frame: Frame, reason: str) -> None:
    reading = Reading()
    reading.ask_manifest(1000)
    with pytest.raises(RemoteProtocolError, match=reason):
        reading.receive(encode_frame(frame) + bytes(2000))


def test_a_wrong_piece_ends_the_session_and_its_request_says_why() -> None:
    reading = Reading(WrongPieceError("sent nonsense"))
    request = reading.ask_pieces()
    with pytest.raises(WrongPieceError):
        reading.receive(framed(request.number, 10, PIECES[0]))
    assert [str(error) for error in reading.owner.errors] == ["sent nonsense"]
    reading.answers.fail(StreamBrokenError("the session ended"))
    assert len(reading.owner.errors) == 1, "a request ends once"


def test_a_full_disk_ends_the_request_and_not_the_session() -> None:
    reading, disk = Reading(), Owner(StateError("the disk is full"))
    full, other = reading.ask_pieces(owner=disk), reading.ask_pieces()
    reading.receive(
        b"".join(
            framed(request.number, 10 + place, piece)
            for request in (full, other)
            for place, piece in enumerate(PIECES)
        )
    )
    assert [str(error) for error in (*disk.errors, *reading.owner.errors)] == ["the disk is full", "None"]
    assert reading.owner.kept == dict(enumerate(PIECES, 10))


def test_nothing_of_a_cancelled_request_is_kept() -> None:
    reading = Reading()
    request = reading.ask_pieces()
    request.cancelled = True
    reading.receive(framed(request.number, 10, PIECES[0]) + encode_refusal(request.number, "as you like"))
    assert reading.owner.kept == {}
    assert not reading.answers.waits


def test_the_end_of_a_session_ends_all_requests() -> None:
    reading = Reading()
    for _ in range(3):
        reading.ask_pieces()
    reading.answers.fail(StreamBrokenError("gone"))
    assert [str(error) for error in reading.owner.errors] == ["gone"] * 3


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_wait_for_more(data: bytes) -> None:
    reading = Reading()
    reading.ask_pieces()
    reading.ask_manifest()
    with contextlib.suppress(RemoteProtocolError):
        reading.receive(data)
    assert reading.largest <= 64 * 1024
