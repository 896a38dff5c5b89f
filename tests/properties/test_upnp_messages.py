"""Messages of UPnP with untrusted input: no bytes raise another error, and none lead to another host."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.nat.reach.upnp_messages import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Location,
    RefusedActionError,
    get_request,
    read_action_answer,
    read_http,
    read_location,
    read_search_answer,
    read_services,
)

GATEWAY = "192.168.1.1"
HERE = Location(GATEWAY, 5000, "/root.xml")

urls = st.text(max_size=80) | st.builds(
    lambda scheme, host, rest: f"{scheme}{host}{rest}",
    st.sampled_from(["http://", "https://", "//", "/", "", "http:/", "HTTP://", "file://", "ftp://"]),
    st.sampled_from(
        [GATEWAY, f"{GATEWAY}:80", "127.0.0.1", f"a@{GATEWAY}", f"{GATEWAY}.x", "[::1]", f"{GATEWAY}:0", ""]
    ),
    st.text(alphabet="/?#:@ \r\nx%", max_size=12),
)
packets = st.binary(max_size=300) | st.builds(
    lambda url, kind: f"HTTP/1.1 200 OK\r\nST: {kind}\r\nLocation: {url}\r\n\r\n".encode(),
    urls,
    st.just("urn:schemas-upnp-org:device:InternetGatewayDevice:1") | st.text(max_size=20),
)
documents = st.binary(max_size=200) | st.builds(
    lambda kind, url, base: (
        f"<root><URLBase>{base}</URLBase><service><serviceType>{kind}</serviceType>"
        f"<controlURL>{url}</controlURL></service></root>"
    ).encode(),
    st.sampled_from(["urn:schemas-upnp-org:service:WANIPConnection:1", "urn:x", "<!DOCTYPE x>"]),
    urls,
    urls,
)
codes = st.sampled_from(["718", "\u0663", "-1", "", "99999", "x"])
errors = st.builds(
    lambda code, text: (
        f"<e><errorCode>{code}</errorCode><errorDescription>{text}</errorDescription></e>".encode()
    ),
    codes,
    st.text(alphabet="ab\x85 ", max_size=300),
)


@given(urls, urls)
def test_an_address_is_at_the_router_and_fits_into_one_line(url: str, base: str) -> None:
    try:
        found = read_location(url, GATEWAY, base)
    except RemoteProtocolError:
        return
    assert found.host == GATEWAY
    assert 0 < found.port < 1 << 16
    assert get_request(found).count(b"\r\n") == 4
    assert len(get_request(found).split(b"\r\n")[0].split(b" ")) == 3


@given(packets)
def test_answers_to_searches_lead_to_the_router(packet: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert read_search_answer(packet, GATEWAY).host == GATEWAY


@given(documents)
def test_descriptions_lead_to_the_router(document: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert all(service.control.host == GATEWAY for service in read_services(document, HERE))


@given(st.sampled_from([200, 404, 500]), documents | errors)
def test_answers_to_actions_are_read_or_refused(status: int, document: bytes) -> None:
    refused: list[RefusedActionError] = []
    try:
        read_action_answer(status, document)
    except RefusedActionError as error:
        refused.append(error)
    except RemoteProtocolError:
        pass
    for each in refused:
        assert str(each).partition("\n")[0].isprintable()  # the remedy is a line of its own
        assert 0 <= each.code < 10_000


heads = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.0 500 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"",
    ]
)
bodies = st.binary(max_size=40) | st.lists(st.binary(max_size=9), max_size=5).map(
    lambda chunks: b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in [*chunks, b""])
)


@given(heads, bodies, st.lists(st.integers(1, 9), max_size=30))
def test_an_answer_is_the_same_in_any_pieces(head: bytes, body: bytes, cuts: list[int]) -> None:
    def read(pieces: list[bytes]) -> object:
        received = b""
        try:
            for piece in [*filter(None, pieces), b""]:
                received += piece
                if (answer := read_http(received, ended=not piece)) is not None:
                    return answer
        except RemoteProtocolError as error:
            return str(error)
        raise AssertionError("an answer that has ended was read or refused")

    whole, pieces, at = head + body, [], 0
    for cut in cuts:
        pieces.append(whole[at : at + cut])
        at += cut
    pieces.append(whole[at:])
    assert read(pieces) == read([whole])


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
)
def test_no_answer_is_longer_than_its_bound(start: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="of more than"):
        any(
            read_http(start + b"x" * count, ended=False)
            for count in range(0, MAX_HEAD_BYTES + MAX_BODY_BYTES + 4096, 4096)
        )


def test_chunks_may_be_followed_by_fields() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert read_http(head + b"5\r\nhello\r\n0\r\nX: y\r\n\r\n", ended=True) == (200, b"hello")
