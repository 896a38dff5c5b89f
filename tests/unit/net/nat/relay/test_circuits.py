"""The first messages of a circuit, at the relay, the peer that asks and the peer behind: each answer is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.nat.relay.messages import (
    Connect,
    Connected,
    Incoming,
    RelayMessage,
    RelayPing,
    RelayRefusal,
    decode,
)
from p2pavg.net.nat.relay.reservations import Reservations
from p2pavg.net.nat.relay.service import _ask_for_circuit
from p2pavg.net.transport import LENGTH_BYTES, Buffer, Stream
from p2pavg_dht import Ed25519Signer

RELAY, SOURCE = (Ed25519Signer(bytes([number]) * 32).peer_id for number in (1, 2))


class Scripted(Stream):
    """A stream of a relay on which one message comes, or the end."""

    def __init__(self, message: RelayMessage | None, *, relayed: bool = False) -> None:
        self.remote, self.relayed = RELAY, relayed
        data = b"" if message is None else message.encode()
        self._left = len(data).to_bytes(LENGTH_BYTES, "big") + data if data else b""
        self.sent: list[RelayMessage] = []
        self.was_reset = False

    async def send_all(self, data: Buffer) -> None:
        self.sent.append(decode(bytes(data)[LENGTH_BYTES:]))

    async def receive_some(self, max_bytes: int) -> bytes:
        found, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return found

    async def aclose(self) -> None: ...

    async def reset(self) -> None:
        self.was_reset = True


class TestAsking:
    async def test_a_peer_that_consents_carries_the_circuit(self) -> None:
        stream = Scripted(Connected())
        await _ask_for_circuit(stream, Connect(SOURCE))
        assert stream.sent == [Connect(SOURCE)]
        assert not stream.was_reset

    @pytest.mark.parametrize(
        ("answer", "error", "reason"),
        [
            (RelayRefusal("no place"), UnreachableError, "no place"),
            (RelayPing(), RemoteProtocolError, "answered with RelayPing"),
            (None, StreamBrokenError, "without an answer"),
        ],
        ids=["refusal", "another message", "end"],
    )
    async def test_without_consent_the_stream_is_reset(
        self, answer: RelayMessage | None, error: type[Exception], reason: str
    ) -> None:
        stream = Scripted(answer)
        with pytest.raises(error, match=reason):
            await _ask_for_circuit(stream, Connect(SOURCE))
        assert stream.was_reset

    async def test_no_circuit_leads_through_another_one(self) -> None:
        stream = Scripted(Connected(), relayed=True)
        with pytest.raises(UnreachableError, match="only reached through a relay"):
            await _ask_for_circuit(stream, Connect(SOURCE))
        assert stream.was_reset
        assert not stream.sent


class Behind:
    """A peer behind a router with a reservation at the relay, or at none."""

    def __init__(self, *relays: str) -> None:
        self.hosted: list[str] = []
        transport: Any = SimpleNamespace(serve=lambda *_: None)
        connections: Any = SimpleNamespace(host_circuit=self._host_circuit)
        watcher: Any = None
        self.reservations = Reservations(transport, connections, watcher)
        self.reservations._held = dict.fromkeys(relays, ())

    async def _host_circuit(self, _: Stream, peer_id: str) -> None:
        self.hosted.append(peer_id)


class TestAccepting:
    async def test_a_circuit_of_an_own_relay_is_hosted(self) -> None:
        peer, stream = Behind(RELAY), Scripted(Incoming(SOURCE))
        await peer.reservations._accept_circuit(stream)
        assert stream.sent == [Connected()]
        assert peer.hosted == [SOURCE]

    @pytest.mark.parametrize(("relays", "relayed"), [((), False), ((RELAY,), True)])
    async def test_any_other_is_refused(self, relays: tuple[str, ...], relayed: bool) -> None:
        """A stranger could otherwise have this peer host a connection that no relay has counted."""
        peer, stream = Behind(*relays), Scripted(Incoming(SOURCE), relayed=relayed)
        await peer.reservations._accept_circuit(stream)
        assert stream.sent == [RelayRefusal("this peer has no reservation there")]
        assert not peer.hosted

    async def test_another_first_message_breaks_the_protocol(self) -> None:
        peer = Behind(RELAY)
        with pytest.raises(RemoteProtocolError, match="began with RelayPing"):
            await peer.reservations._accept_circuit(Scripted(RelayPing()))
        assert not peer.hosted
