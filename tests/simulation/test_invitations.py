"""Invitation links on a simulated network: which peers a delegate admits, and what it tells the others."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pavg.base.errors import ConfigError, InvitationError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.messages import pack
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from p2pavg.runs.membership.certificate import Certificate, Role, read_certificate
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import revoke
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.membership.tokens import InvitationLink, Token, make_token, token_key
from p2pavg.runs.records.invitations import (
    MAX_STREAMS,
    PROTOCOL,
    AdmissionAnswer,
    Delegate,
    Invitations,
    TokenRequest,
    redeem,
)
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.simulation import EPOCH, run_on_loop, simulated_clock
from p2pavg_dht import Ed25519Signer
from tests.unit.runs.membership.runs import SECRET, Authority, signer

RUN = Authority()
OTHER_RUN = Authority(b"b" * 32)
SEED = bytes([3]) * 32
DELEGATE = Ed25519Signer(SEED)
ALICE, BOB = signer(1), signer(2)
RUN_FILE = RunFile(run_id="lab", authority=RUN.public, secret=SECRET)
DAY = 86400.0


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(latency=(0.01, 0.02))


@pytest.fixture
def used_file(tmp_path: Path) -> Path:
    return tmp_path / "delegate.key.used"


def make_delegate(used_file: Path, **changed: Any) -> Delegate:
    fields: dict[str, Any] = {
        "roles": [Role.CONTRIBUTOR, Role.DELEGATE],
        "max_weight": 50.0,
        "not_before": EPOCH - DAY,
        "expires": EPOCH + 10 * DAY,
    }
    access = RUN.access(DELEGATE, **(fields | changed))
    return Delegate(RUN_FILE, Membership(access, DELEGATE.peer_id), SEED, used_file)


def make_link(
    transport: Transport, number: int = 0, *, authority: bytes = RUN.public, **changed: Any
) -> InvitationLink:
    fields: dict[str, Any] = {
        "serial": number.to_bytes(16, "big"),
        "roles": frozenset({Role.CONTRIBUTOR}),
        "max_weight": 10.0,
        "begins": EPOCH,
        "expires": EPOCH + DAY,
        "certificate_expires": EPOCH + 5 * DAY,
    }
    key = token_key(SEED, authority)
    return InvitationLink(transport.addresses[0], make_token(key, Token(**(fields | changed))))


@asynccontextmanager
async def online(network: MemoryNetwork, delegate: Delegate) -> AsyncIterator[Transport]:
    async with network.transport(DELEGATE) as transport:
        invitations = Invitations(delegate, wall_clock=simulated_clock, run_in_thread=run_on_loop)
        transport.serve(PROTOCOL, invitations.serve)
        yield transport


async def ask(network: MemoryNetwork, who: Ed25519Signer, link: InvitationLink) -> Certificate:
    async with network.transport(who) as transport:
        run, found = await redeem(transport, link, now=simulated_clock())
        assert run == RUN_FILE
        return found


async def refused(network: MemoryNetwork, who: Ed25519Signer, link: InvitationLink) -> str:
    with pytest.raises(InvitationError) as error:
        await ask(network, who, link)
    return str(error.value)


async def test_a_link_admits_a_peer_and_the_same_peer_again(network: MemoryNetwork, used_file: Path) -> None:
    async with online(network, make_delegate(used_file)) as transport:
        link = make_link(transport)
        first = await ask(network, ALICE, link)
        assert (first.peer_id, first.roles, first.max_weight) == (
            ALICE.peer_id,
            frozenset({Role.CONTRIBUTOR}),
            10.0,
        )
        assert await ask(network, ALICE, link) == first
        assert await refused(network, BOB, link) == "this link was used already by another peer"
        assert await ask(network, BOB, make_link(transport, 1)) != first
    assert os.listdir(used_file.parent) == [used_file.name], "a draft was left behind"
    assert os.stat(used_file).st_mode & 0o077 == 0


async def test_two_peers_with_one_link_at_once(network: MemoryNetwork, used_file: Path) -> None:
    outcomes: dict[str, str] = {}

    async def try_it(who: Ed25519Signer, link: InvitationLink) -> None:
        try:
            outcomes[who.peer_id] = (await ask(network, who, link)).peer_id
        except InvitationError as error:
            outcomes[who.peer_id] = str(error)

    async with online(network, make_delegate(used_file)) as transport, trio.open_nursery() as nursery:
        for who in (ALICE, BOB):
            nursery.start_soon(try_it, who, make_link(transport))
    assert sorted(name == admitted for name, admitted in outcomes.items()) == [False, True]


async def test_a_delegate_that_starts_again_remembers(network: MemoryNetwork, used_file: Path) -> None:
    delegate = make_delegate(used_file)
    async with online(network, delegate) as transport:
        link = make_link(transport)
        first = await ask(network, ALICE, link)
    async with online(network, delegate) as transport:
        link = InvitationLink(transport.addresses[0], link.token)
        assert await refused(network, BOB, link) == "this link was used already by another peer"
        assert await ask(network, ALICE, link) == first


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"expires": EPOCH - 1.0}, "this link expired on 2027-01-15 07:59:59 UTC"),
        ({"authority": OTHER_RUN.public}, "this delegate has not made this link"),
        ({"max_weight": 51.0}, "this delegate can no longer grant what the link says"),
        ({"roles": frozenset([Role.SOURCE])}, "its delegate may not grant the role source"),
    ],
)
async def test_other_links_are_refused_with_a_sentence(
    network: MemoryNetwork, used_file: Path, changed: dict[str, Any], reason: str
) -> None:
    async with online(network, make_delegate(used_file)) as transport:
        assert reason in await refused(network, ALICE, make_link(transport, **changed))
    assert os.listdir(used_file.parent) == []


async def test_a_delegate_whose_certificate_has_expired_admits_no_peer(
    network: MemoryNetwork, used_file: Path
) -> None:
    async with online(network, make_delegate(used_file, expires=EPOCH + 60.0)) as transport:
        assert (await ask(network, ALICE, make_link(transport))).expires == EPOCH + 60.0
        await trio.sleep(60.0)
        reason = await refused(network, BOB, make_link(transport, 1))
        assert reason.startswith("this delegate admits no peer: its certificate expired on 2027-01-15")


async def test_a_revoked_delegate_admits_no_peer(network: MemoryNetwork, used_file: Path) -> None:
    delegate = make_delegate(used_file)
    own = read_certificate(delegate.membership.access.certificate).identifier
    async with online(network, delegate) as transport:
        delegate.membership.known.learn(revoke(RUN.sign, authority=RUN.public, number=1, identifiers=[own]))
        reason = await refused(network, ALICE, make_link(transport))
        assert reason == "this delegate admits no peer: its certificate was revoked"


async def test_no_peer_is_admitted_while_its_use_cannot_be_written(
    network: MemoryNetwork, used_file: Path
) -> None:
    folder = used_file.with_name("gone")
    async with online(network, make_delegate(folder / "used")) as transport:
        link = make_link(transport)
        assert "cannot note that the link is used" in await refused(network, ALICE, link)
        assert "cannot note that the link is used" in await refused(network, ALICE, link)
        os.mkdir(folder)
        assert (await ask(network, ALICE, link)).peer_id == ALICE.peer_id
        assert os.listdir(folder) == ["used"]


def test_only_a_delegate_serves_links(used_file: Path) -> None:
    with pytest.raises(ConfigError, match="does not have the role delegate; ask the run's operator"):
        make_delegate(used_file, roles=[Role.CONTRIBUTOR])


def test_a_damaged_file_of_used_links_stops_the_delegate(used_file: Path) -> None:
    used_file.write_text("damaged\n")
    with pytest.raises(ConfigError, match=r"delegate\.key\.used: line 1 is damaged"):
        Invitations(make_delegate(used_file), wall_clock=simulated_clock, run_in_thread=run_on_loop)


class TestLimits:
    async def test_silent_peers_lose_their_streams_and_their_places(
        self, network: MemoryNetwork, used_file: Path
    ) -> None:
        async with online(network, make_delegate(used_file)) as transport, trio.open_nursery() as nursery:
            for number in range(MAX_STREAMS):
                nursery.start_soon(stay_silent, network, signer(100 + number), transport.addresses[0])
            await trio.sleep(1.0)
            with pytest.raises(UnreachableError, match="the delegate gave no answer"):
                await ask(network, ALICE, make_link(transport))
            await trio.sleep(REPLY_SECONDS)
            assert (await ask(network, ALICE, make_link(transport))).peer_id == ALICE.peer_id
            nursery.cancel_scope.cancel()

    async def test_one_peer_has_one_stream(self, network: MemoryNetwork, used_file: Path) -> None:
        async with online(network, make_delegate(used_file)) as transport, network.transport(ALICE) as alice:
            await alice.dial(transport.addresses[0], timeout=5.0)
            first, second = [await open_to_delegate(alice) for _ in range(2)]
            await trio.sleep(1.0)
            with pytest.raises(StreamBrokenError):
                await second.receive_some(1)
            await send_message(first, TokenRequest(make_link(transport).token).encode())
            assert await receive_message(first) is not None

    @pytest.mark.parametrize("request_bytes", [b"\x00", pack(1, b""), pack(2, "text"), bytes(1000)])
    async def test_a_malformed_request_loses_its_stream(
        self, network: MemoryNetwork, used_file: Path, request_bytes: bytes
    ) -> None:
        async with online(network, make_delegate(used_file)) as transport, network.transport(ALICE) as alice:
            await alice.dial(transport.addresses[0], timeout=5.0)
            stream = await open_to_delegate(alice)
            await send_message(stream, request_bytes)
            with pytest.raises(StreamBrokenError):
                await receive_message(stream)
            assert (await redeem(alice, make_link(transport), now=EPOCH))[0] == RUN_FILE


class TestHostileDelegates:
    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (b"\x00", "the delegate's answer is damaged"),
            (pack(2, "", "", b""), "answer is damaged: version is missing"),
            (pack(2, "", RUN_FILE.text, b""), "answer is damaged"),
            (pack(2, "no\x1b[2J\nway", "", b""), "answer is damaged"),
            (pack(2, "no way", "", b""), r"^no way(\n|$)"),
            (pack(2, "a" * 301, "", b""), "answer is damaged"),
        ],
    )
    async def test_a_damaged_answer(self, network: MemoryNetwork, answer: bytes, reason: str) -> None:
        with pytest.raises(InvitationError, match=reason):
            await ask_liar(network, answer)

    @pytest.mark.parametrize(
        ("found", "reason"),
        [
            (RUN.certify(BOB.peer_id), "its certificate is for another peer"),
            (OTHER_RUN.certify(ALICE.peer_id), "its certificate is of another run"),
            (RUN.certify(ALICE.peer_id, sign=BOB.sign), "its certificate is forged"),
            (RUN.certify(ALICE.peer_id, not_before=1.0, expires=2.0), "its certificate expired"),
            (RUN.certify(ALICE.peer_id), "another peer has signed it"),
        ],
    )
    async def test_a_certificate_that_is_not_valid(
        self, network: MemoryNetwork, found: Certificate, reason: str
    ) -> None:
        with pytest.raises(InvitationError, match=f"a certificate that is not valid: {reason}"):
            await ask_liar(network, AdmissionAnswer(run_file=RUN_FILE.text, certificate=found.data).encode())

    async def test_a_clock_that_is_slow_by_an_hour_is_named(self, network: MemoryNetwork) -> None:
        found = RUN.certify(
            ALICE.peer_id, not_before=simulated_clock() + 3600.0, expires=simulated_clock() + 1e5
        )
        with pytest.raises(InvitationError, match=r"this machine.s clock, which says .* is wrong") as error:
            await ask_liar(network, AdmissionAnswer(run_file=RUN_FILE.text, certificate=found.data).encode())
        assert "set the clock" in error.value.remedy

    @pytest.mark.parametrize("answer", [None, bytes(8193)], ids=["none", "too long"])
    async def test_no_answer_or_one_that_is_too_long(
        self, network: MemoryNetwork, answer: bytes | None
    ) -> None:
        with pytest.raises(UnreachableError, match="the delegate gave no answer"):
            await ask_liar(network, answer)


async def ask_liar(network: MemoryNetwork, answer: bytes | None) -> None:
    async def lie(stream: Stream) -> None:
        await receive_message(stream)
        if answer is None:
            await trio.sleep_forever()
        else:
            await send_message(stream, answer)
            await stream.aclose()

    async with network.transport(DELEGATE) as transport:
        transport.serve(PROTOCOL, lie)
        await ask(network, ALICE, InvitationLink(transport.addresses[0], b"token"))


async def open_to_delegate(transport: Transport) -> Stream:
    return await transport.open_stream(DELEGATE.peer_id, PROTOCOL, timeout=5.0)


async def stay_silent(network: MemoryNetwork, who: Ed25519Signer, address: str) -> None:
    async with network.transport(who) as transport:
        await transport.dial(address, timeout=5.0)
        await open_to_delegate(transport)
        await trio.sleep_forever()
