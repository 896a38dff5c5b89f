"""Punches that two peers coordinate on a stream: successes, refusals, retries, limits, and hostile peers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.limits.dial_policy import HOST_FAILURES, NOT_REACHED
from p2pavg.net.nat.punch import meeting, plan, service
from p2pavg.net.nat.punch.meeting import RefusedPunchError
from p2pavg.net.nat.punch.plan import (
    PROTOCOL,
    TRIES,
    Endpoint,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
)
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import watched
from tests.integration.lanes.company import descriptors
from tests.integration.punch.peers import (
    BEHIND_A_ROUTER,
    BEHIND_A_SYMMETRIC_ROUTER,
    Side,
    new_gate,
    two_sides,
)

BOUND = 20.0


@watched
async def test_two_peers_connect_and_the_asker_is_the_initiator() -> None:
    async with two_sides() as (here, there):
        before = descriptors()
        await here.service.connect(there.peer_id, timeout=BOUND)
        assert here.adopted == [(there.peer_id, True)]
        assert there.adopted == [(here.peer_id, False)]
        assert descriptors() == before


@watched
async def test_the_next_try_has_new_ports() -> None:
    async with two_sides() as (here, there):
        ports = []

        async def wrong_at_first(version: int, port: int) -> int:
            ports.append(port)
            return port if len(ports) > 1 else 65535

        there.router.outer_port = wrong_at_first
        await here.service.connect(there.peer_id, timeout=BOUND)
        assert len(set(ports)) == 2
        assert here.adopted == [(there.peer_id, True)]


@watched
async def test_the_last_try_ends_with_the_reasons_of_both_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sides() as (here, there):

        async def wrong(version: int, port: int) -> int:
            return 65535

        here.router.outer_port = there.router.outer_port = wrong
        monkeypatch.setattr(plan, "PUNCH_SECONDS", 0.3)
        with pytest.raises(UnreachableError, match=rf"try 1: .*refused.*the peer reported.*try {TRIES}: "):
            await here.service.connect(there.peer_id, timeout=BOUND)


class TestRefusals:
    @watched
    async def test_a_peer_behind_a_symmetric_router_asks_for_nothing(self) -> None:
        async with two_sides() as (here, there):
            here.router.reachability = BEHIND_A_SYMMETRIC_ROUTER
            with pytest.raises(RefusedPunchError, match=r"this peer takes part in no punch: .*symmetric"):
                await here.service.connect(there.peer_id, timeout=BOUND)

    @watched
    async def test_a_peer_behind_a_symmetric_router_refuses_at_once(self) -> None:
        async with two_sides() as (here, there):
            there.router.reachability = BEHIND_A_SYMMETRIC_ROUTER
            with pytest.raises(RefusedPunchError, match=r"the peer takes part in no punch: .*symmetric"):
                await here.service.connect(there.peer_id, timeout=BOUND)

    @watched
    async def test_peers_of_different_families_do_not_try(self) -> None:
        async with two_sides() as (here, there):
            there.router.reachability = replace(BEHIND_A_ROUTER, punch_hosts=("2001:db8::1",))
            with pytest.raises(RefusedPunchError, match=r"outer addresses are of IPv6, .* IPv4"):
                await here.service.connect(there.peer_id, timeout=BOUND)

    @watched
    async def test_a_stranger_is_refused(self) -> None:
        async with two_sides() as (here, there):
            there.transport.is_connected = lambda peer_id: False  # type: ignore[method-assign]  # noqa: ARG005
            with pytest.raises(RefusedPunchError, match="nothing to do with each other"):
                await here.service.connect(there.peer_id, timeout=BOUND)
            with pytest.raises(UnreachableError, match="nothing to do with each other"):
                await here.service.ask_to_dial(there.peer_id, ["/ip4/127.0.0.1/tcp/1"], timeout=BOUND)
            assert not there.dialled

    @watched
    async def test_a_peer_that_cannot_predict_its_port_refuses_without_the_reasons(self) -> None:
        async def unknown(version: int, port: int) -> int:
            raise UnreachableError("no peer could be asked")

        async with two_sides() as (here, there):
            there.router.outer_port = unknown
            with pytest.raises(RefusedPunchError, match=rf"takes part in no punch: {NOT_REACHED}\n"):
                await here.service.connect(there.peer_id, timeout=BOUND)

    @watched
    async def test_of_two_punches_at_once_one_goes_on(self) -> None:
        async with two_sides() as (here, there):
            ended: list[str] = []

            async def connect(me: Side, other: Side) -> None:
                try:
                    await me.service.connect(other.peer_id, timeout=BOUND)
                except RefusedPunchError as error:
                    ended.append(str(error))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(connect, here, there)
                nursery.start_soon(connect, there, here)
            (refusal,) = ended
            assert "under way" in refusal
            assert len(here.adopted) == len(there.adopted) == 1


async def hostile_stream(here: Side, there: Side) -> Stream:
    return await here.transport.open_stream(there.peer_id, PROTOCOL, timeout=BOUND)


async def answered(stream: Stream) -> PunchAnswer:
    return PunchAnswer.decode(await receive_message(stream) or b"")


class TestHostileAskers:
    """A peer names the endpoints to which the other one connects."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "169.254.169.254"])
    @watched
    async def test_endpoints_that_the_dial_gate_refuses_get_no_packet(self, host: str) -> None:
        """The refusal does not say why: it would tell a stranger in which private networks the machine is."""
        async with two_sides() as (here, there):
            there.puncher.gate = new_gate(loopback=False)
            stream = await hostile_stream(here, there)
            await send_message(stream, PunchProposal(1, (Endpoint(host, 4001),)).encode())
            assert (await answered(stream)).refusal == NOT_REACHED

    @watched
    async def test_an_answer_with_such_an_endpoint_ends_the_punch(self) -> None:
        async with two_sides() as (here, there):
            here.puncher.gate = new_gate(loopback=False)
            with pytest.raises(RefusedPunchError, match="this machine itself"):
                await here.service.connect(there.peer_id, timeout=BOUND)
            assert not here.adopted

    @watched
    async def test_failed_tries_use_up_the_budget_of_failed_dials(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After that, a third party gets no more connections, whichever peer asks."""
        monkeypatch.setattr(plan, "UPGRADE_SECONDS", 0.02)
        reasons = []
        async with two_sides() as (here, there):
            with socket.create_server(("127.0.0.1", 0)) as third_party:
                victim = Endpoint("127.0.0.1", third_party.getsockname()[1])
                for _ in range(HOST_FAILURES + 3):
                    stream = await hostile_stream(here, there)
                    await send_message(stream, PunchProposal(1, (victim,)).encode())
                    assert (await answered(stream)).endpoint is not None
                    await send_message(stream, Sync().encode())
                    reasons.append(PunchVerdict.decode(await receive_message(stream) or b"").reason)
                    await stream.reset()
                assert connections_of(third_party) == HOST_FAILURES
            assert set(reasons) == {NOT_REACHED}, "the third party must not learn which service answers there"
            assert not there.adopted

    @watched
    async def test_tries_of_one_peer_are_limited(self) -> None:
        async with two_sides() as (here, there):
            taken = 0
            for _ in range(meeting.PEER_TRIES + 3):
                stream = await hostile_stream(here, there)
                await send_message(stream, PunchProposal(1, (Endpoint("127.0.0.1", 4001),)).encode())
                taken += not (await answered(stream)).refusal
                await stream.reset()
                await until(lambda: not there.puncher._under_way)
            assert taken == meeting.PEER_TRIES

    @watched
    async def test_a_try_without_a_signal_holds_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "ALL_TRIES_SECONDS", 0.2)
        async with two_sides() as (here, there):
            before = descriptors()
            stream = await hostile_stream(here, there)
            await send_message(stream, PunchProposal(1, (Endpoint("127.0.0.1", 4001),)).encode())
            await answered(stream)
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
            assert descriptors() == before
            assert not there.puncher._under_way

    @pytest.mark.parametrize("attempts", [(2,), (1, 1), (1, 3)], ids=str)
    @watched
    async def test_tries_out_of_order_break_the_stream(
        self, attempts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan, "PUNCH_SECONDS", 0.02)
        async with two_sides() as (here, there):
            stream = await hostile_stream(here, there)
            for attempt in attempts[:-1]:
                await send_message(stream, PunchProposal(attempt, (Endpoint("127.0.0.1", 4001),)).encode())
                await answered(stream)
                await send_message(stream, Sync().encode())
                assert PunchVerdict.decode(await receive_message(stream) or b"").reason
            await send_message(stream, PunchProposal(attempts[-1], (Endpoint("127.0.0.1", 4001),)).encode())
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)

    @watched
    async def test_an_answer_for_another_family_is_an_error_of_the_protocol(self) -> None:
        async def lie(stream: Stream) -> None:
            await receive_message(stream)
            await send_message(stream, PunchAnswer("", Endpoint("2001:db8::1", 4001)).encode())
            await receive_message(stream)

        async with two_sides() as (here, there):
            there.transport.serve(PROTOCOL, lie)
            with pytest.raises(UnreachableError, match="which was not proposed"):
                await here.service.connect(there.peer_id, timeout=BOUND)

    @watched
    async def test_a_connection_that_the_other_peer_reports_as_failed_is_closed(self) -> None:
        made: list[socket.socket] = []

        async def succeed(plain: socket.socket) -> socket.socket:
            made.append(plain)
            return plain

        async def fail(plain: socket.socket, peer_id: str, *, initiator: bool) -> None:
            plain.close()
            raise UnreachableError("no place")

        async with two_sides() as (here, there):
            there.adopt_socket = fail  # type: ignore[method-assign]
            stream = await hostile_stream(here, there)
            with pytest.raises(UnreachableError, match=r"(try \d: the peer reported: no connection(; )?){3}"):
                await here.puncher.ask(stream, succeed)
        assert [each.fileno() for each in made] == [-1] * TRIES


class TestSilence:
    @watched
    async def test_a_silent_peer_costs_the_callers_timeout(self) -> None:
        async def say_nothing(stream: Stream) -> None:
            await trio.sleep_forever()

        async with two_sides() as (here, there):
            there.transport.serve(PROTOCOL, say_nothing)
            before = descriptors()
            with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
                await here.service.connect(there.peer_id, timeout=0.2)
            assert descriptors() == before
            assert not here.service._asking

    @watched
    async def test_a_handshake_that_never_ends_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "UPGRADE_SECONDS", 0.1)

        async def hang(plain: socket.socket, peer_id: str, *, initiator: bool) -> None:
            with plain:
                await trio.sleep_forever()

        async with two_sides() as (here, there):
            here.adopt_socket = there.adopt_socket = hang  # type: ignore[method-assign]
            with pytest.raises(UnreachableError, match=r"handshake took longer.*the peer reported"):
                await here.service.connect(there.peer_id, timeout=BOUND)


class TestDialMe:
    @watched
    async def test_the_other_peer_dials_until_an_address_answers(self) -> None:
        async with two_sides() as (here, there):
            await here.service.ask_to_dial(there.peer_id, ["/dead/1", "/good/2", "/good/3"], timeout=BOUND)
            assert there.dialled == [(here.peer_id, "/dead/1"), (here.peer_id, "/good/2")]

    @watched
    async def test_a_failure_is_reported_in_one_fixed_word(self) -> None:
        """Reasons tell what answers at an address: a stranger could scan the networks of the peer that dials."""
        async with two_sides() as (here, there):
            with pytest.raises(UnreachableError, match=rf"reported: {NOT_REACHED}\n"):
                await here.service.ask_to_dial(there.peer_id, ["/dead/1", "/dead/2"], timeout=BOUND)
            assert len(there.dialled) == 2

    @pytest.mark.parametrize(
        ("asker", "relayed", "dials"),
        [("192.168.7.9", False, 1), ("203.0.113.5", False, 0), ("", False, 0), ("192.168.7.9", True, 0)],
    )
    @watched
    async def test_a_private_address_is_dialled_for_an_asker_in_that_network_only(
        self, asker: str, relayed: bool, dials: int
    ) -> None:
        async with two_sides() as (here, there):
            there.gate.policy.trust_address("192.168.7.1")
            serve = there.service._serve

            async def as_seen(stream: Stream) -> None:
                stream.remote_host, stream.relayed = asker, relayed
                await serve(stream)

            there.transport.serve(PROTOCOL, as_seen)
            await here.service.ask_to_dial(
                there.peer_id, ["/ip4/192.168.7.200/tcp/80/dead", "/good/1"], timeout=BOUND
            )
            assert len(there.dialled) == 1 + dials

    @watched
    async def test_dials_count_as_tries(self) -> None:
        async with two_sides() as (here, there):
            for _ in range(meeting.PEER_TRIES):
                await here.service.ask_to_dial(there.peer_id, ["/good/1"], timeout=BOUND)
            with pytest.raises(UnreachableError, match="asked for too many"):
                await here.service.ask_to_dial(there.peer_id, ["/good/1"], timeout=BOUND)

    @watched
    async def test_a_dial_that_hangs_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "REPLY_SECONDS", 0.1)

        async def hang(peer_id: str, address: str) -> None:
            await trio.sleep_forever()

        async with two_sides() as (here, there):
            there.dial_one = hang  # type: ignore[method-assign]
            with pytest.raises(UnreachableError, match=rf"reported: {NOT_REACHED}\n"):
                await here.service.ask_to_dial(there.peer_id, ["/good/1"], timeout=BOUND)


def connections_of(listening: socket.socket) -> int:
    listening.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.005)
