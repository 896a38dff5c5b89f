"""The conformance suite of the transports over libp2p, on loopback."""

import socket
import sys
from contextlib import AbstractAsyncContextManager
from itertools import count
from pathlib import Path

import pytest

from p2pavg.net.gate.client import open_gate_transport
from p2pavg.net.gate.server import open_gate
from p2pavg.net.libp2p.transport import open_libp2p_transport
from p2pavg.net.transport import Transport
from p2pavg_dht import Ed25519Signer
from tests.integration import hosts
from tests.transport_conformance import CHECKS, Check


class OnLoopback:
    def __init__(self) -> None:
        self._seeds = (number.to_bytes(32, "big") for number in count(1))

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        listen = ["/ip4/127.0.0.1/tcp/0"] if listening else []
        return open_libp2p_transport(seed=next(self._seeds), listen=listen)

    def unused_address(self) -> str:
        with socket.socket() as bound:  # but not listening
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        return f"/ip4/127.0.0.1/tcp/{port}/p2p/{Ed25519Signer(next(self._seeds)).peer_id}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check) -> None:
    await check(OnLoopback())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a connection was acknowledged")
async def test_it_knows_whether_the_other_system_answers() -> None:
    made = OnLoopback()
    async with made.transport() as here, made.transport() as there:
        await here.dial(there.addresses[0], timeout=10.0)
        assert here.answers(there.peer_id, 60.0)
        assert there.answers(here.peer_id, 60.0)
        assert not here.answers(Ed25519Signer(bytes(32)).peer_id, 60.0), "a stranger"
        await there.disconnect(here.peer_id)
        await hosts.eventually(lambda: not here.answers(there.peer_id, 60.0))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a connection was acknowledged")
async def test_a_program_behind_a_gate_knows_it_too(tmp_path: Path) -> None:
    made, path = OnLoopback(), tmp_path / "gate"
    async with made.transport() as network, made.transport() as there:
        signer = Ed25519Signer(bytes(32))
        named = there.addresses[:1]
        async with (
            open_gate(network, signer, path, {"/echo"}, (b"",), named=named),
            open_gate_transport(path) as here,
        ):
            assert await here.dial(named[0], timeout=10.0) == there.peer_id
            await hosts.eventually(lambda: here.answers(there.peer_id, 5.0))
            await there.disconnect(network.peer_id)
            await hosts.eventually(lambda: not here.answers(there.peer_id, 5.0))
