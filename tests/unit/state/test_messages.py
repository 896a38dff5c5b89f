"""Messages of ``/p2pavg/state/2``: what is sent is read back, and no bytes do harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import pack
from p2pavg.state.messages import (
    FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_KIND,
    MAX_NUMBER,
    MAX_PIECES,
    MAX_RANGE,
    MAX_REFUSAL_BYTES,
    MAX_REQUEST_BYTES,
    MAX_WELCOME_BYTES,
    AskManifest,
    AskPieces,
    Cancel,
    Frame,
    FrameKind,
    Request,
    SessionHello,
    Welcome,
    encode_frame,
    encode_refusal,
    read_frame,
    read_reason,
    read_request,
    state_key,
)

BLOB = bytes(range(32))
REQUESTS: list[Request] = [
    AskManifest(MAX_NUMBER, MAX_KIND, BLOB),
    AskPieces(0, 0, BLOB, 0, 1),
    AskPieces(MAX_NUMBER, MAX_KIND, BLOB, MAX_PIECES - MAX_RANGE, MAX_RANGE),
    Cancel(7),
]


def test_the_wire_format_is_frozen() -> None:
    assert state_key("run").hex() == "51e01bec97f5b9084790a031b559890c0d0abd03af96ccf7ecb8466269f8463c"
    assert AskPieces(7, 1, BLOB, 3, 2).encode() == pack(1, 7, 1, BLOB, 3, 2)
    assert encode_frame(Frame(FrameKind.PIECE, 7, 3, 1 << 20)).hex() == "01000000070000000300100000"
    assert SessionHello(BLOB, b"c", b"").encode() == pack(1, BLOB, b"c", b"")


@pytest.mark.parametrize("ticket", [b"", BLOB])
def test_a_hello_is_read_back(ticket: bytes) -> None:
    hello = SessionHello(BLOB, b"c" * MAX_CERTIFICATE_BYTES, ticket)
    assert len(hello.encode()) <= MAX_HELLO_BYTES
    assert SessionHello.decode(hello.encode()) == hello


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_is_read_back(request_: Request) -> None:
    assert len(request_.encode()) <= MAX_REQUEST_BYTES
    assert read_request(request_.encode()) == request_


@pytest.mark.parametrize("reason", ["", "it does not hold this state", "…" * 1000])
def test_reasons_are_read_back_and_short(reason: str) -> None:
    welcome, refusal = Welcome(reason).encode(), encode_refusal(3, reason)
    assert len(welcome) <= MAX_WELCOME_BYTES
    assert Welcome.decode(welcome).refusal == reason[:200]
    frame, text = read_frame(refusal[:FRAME_BYTES]), refusal[FRAME_BYTES:]
    assert frame == Frame(FrameKind.REFUSAL, 3, 0, len(text))
    assert len(text) <= MAX_REFUSAL_BYTES
    assert read_reason(text) == reason[:200]


@pytest.mark.parametrize(
    "hello",
    [
        pack(2, BLOB, b"", b""),
        pack(1, BLOB[1:], b"", b""),
        pack(1, BLOB, b"c" * (MAX_CERTIFICATE_BYTES + 1), b""),
        pack(1, BLOB, b"", b"t"),
        pack(1, BLOB, b""),
        pack(True, BLOB, b"", b""),
    ],
)
def test_impossible_hellos_are_refused(hello: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SessionHello.decode(hello)


ASK = AskPieces(1, 1, BLOB, 0, 1)


@pytest.mark.parametrize(
    "data",
    [
        structs.replace(ASK, number=-1).encode(),
        structs.replace(ASK, number=MAX_NUMBER + 1).encode(),
        structs.replace(ASK, kind=-1).encode(),
        structs.replace(ASK, kind=MAX_KIND + 1).encode(),
        structs.replace(ASK, blob_id=BLOB[1:]).encode(),
        structs.replace(ASK, first=-1).encode(),
        structs.replace(ASK, count=0).encode(),
        structs.replace(ASK, count=-1).encode(),
        structs.replace(ASK, count=MAX_RANGE + 1).encode(),
        pack(3, 1, 1, BLOB, 0, 1),
        pack(0, 1, 1, BLOB, 0, 1),
        pack(2, 1, 1, BLOB),
        pack(1, 1, 1, BLOB, MAX_PIECES, 1),
        b"",
        b"\xc1",
    ],
)
def test_impossible_requests_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_request(data)


@pytest.mark.parametrize("text", [b"\xff", b"a\nb", b"\x1b[31m", "…".encode() * 201])
def test_reasons_that_are_no_short_text_are_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_reason(text)


@pytest.mark.parametrize("length", [0, 1, FRAME_BYTES - 1, FRAME_BYTES + 1])
def test_frames_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        read_frame(bytes(length))


@given(st.sampled_from([read_frame, read_reason]), st.binary())
def test_any_bytes_are_read_or_refused(reader: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        reader(data)
