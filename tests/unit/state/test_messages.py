"""Messages of ``/p2pavg/state/1``: what is sent is read back, and no bytes do harm."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.encoding import pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.state import messages
from p2pavg.state.manifest import BlobManifest
from p2pavg.state.messages import (
    FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_KIND,
    MAX_NUMBER,
    MAX_PIECE_BYTES,
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
    Message,
    SessionHello,
    encode_frame,
    encode_hello,
    encode_refusal,
    encode_request,
    encode_welcome,
    read_frame,
    read_hello,
    read_reason,
    read_request,
    read_welcome,
    state_key,
)

BLOB = bytes(range(32))
REQUESTS: list[Message] = [
    AskManifest(MAX_NUMBER, MAX_KIND, BLOB),
    AskPieces(0, 0, BLOB, 0, 1),
    AskPieces(MAX_NUMBER, MAX_KIND, BLOB, MAX_PIECES - MAX_RANGE, MAX_RANGE),
    Cancel(7),
]


def test_the_wire_format_is_frozen() -> None:
    assert state_key("run").hex() == "51e01bec97f5b9084790a031b559890c0d0abd03af96ccf7ecb8466269f8463c"
    assert encode_request(AskPieces(7, 1, BLOB, 3, 2)) == pack(1, 7, 1, BLOB, 3, 2)
    assert encode_frame(Frame(FrameKind.PIECE, 7, 3, 1 << 20)).hex() == "01000000070000000300100000"
    assert encode_hello(SessionHello(BLOB, b"c", b"")) == pack(1, BLOB, b"c", b"")


@pytest.mark.parametrize("ticket", [b"", BLOB])
def test_a_hello_is_read_back(ticket: bytes) -> None:
    hello = SessionHello(BLOB, b"c" * MAX_CERTIFICATE_BYTES, ticket)
    assert len(encode_hello(hello)) <= MAX_HELLO_BYTES
    assert read_hello(encode_hello(hello)) == hello


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_is_read_back(request_: Message) -> None:
    assert len(encode_request(request_)) <= MAX_REQUEST_BYTES
    assert read_request(encode_request(request_)) == request_


@pytest.mark.parametrize("reason", ["", "it does not hold this state", "…" * 1000])
def test_reasons_are_read_back_and_short(reason: str) -> None:
    welcome, refusal = encode_welcome(reason), encode_refusal(3, reason)
    assert len(welcome) <= MAX_WELCOME_BYTES
    assert read_welcome(welcome) == reason[:200]
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
        read_hello(hello)


ASK = AskPieces(1, 1, BLOB, 0, 1)


@pytest.mark.parametrize(
    "request_",
    [
        replace(ASK, number=-1),
        replace(ASK, number=MAX_NUMBER + 1),
        replace(ASK, kind=-1),
        replace(ASK, kind=MAX_KIND + 1),
        replace(ASK, blob_id=BLOB[1:]),
        replace(ASK, first=-1),
        replace(ASK, first=MAX_PIECES),
        replace(ASK, count=0),
        replace(ASK, count=-1),
        replace(ASK, count=MAX_RANGE + 1),
    ],
)
def test_impossible_requests_are_refused(request_: AskPieces) -> None:
    with pytest.raises(RemoteProtocolError):
        read_request(encode_request(request_))


@pytest.mark.parametrize(
    "data", [pack(3, 1, 1, BLOB, 0, 1), pack(0, 1, 1, BLOB, 0, 1), pack(2, 1, 1, BLOB, 0, 0), b"", b"\xc1"]
)
def test_other_requests_are_refused(data: bytes) -> None:
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


@given(
    st.sampled_from(["read_hello", "read_welcome", "read_request", "read_frame", "read_reason"]), st.binary()
)
def test_any_bytes_are_read_or_refused(reader: str, data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        getattr(messages, reader)(data)


@given(st.sampled_from(REQUESTS), st.data())
def test_a_request_with_changed_bytes_is_read_or_refused(request_: Message, data: st.DataObject) -> None:
    changed = bytearray(encode_request(request_))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_request(bytes(changed))
    except RemoteProtocolError:
        return
    assert read_request(encode_request(found)) == found


@pytest.mark.parametrize(
    ("sizes", "digests"),
    [
        ([1], []),
        ([0], [BLOB]),
        ([-1], [BLOB]),
        ([MAX_PIECE_BYTES + 1], [BLOB]),
        ([1], [BLOB[1:]]),
    ],
)
def test_impossible_manifests_are_refused(sizes: list[int], digests: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        BlobManifest(sizes, digests)
