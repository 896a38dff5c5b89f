"""One of the two machines of :mod:`tests.integration.punch.routers`: ask for punches, or take part in them."""

from __future__ import annotations

import json
import socket
import sys
from functools import partial

import trio

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.nat.punch import plan
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.plan import OwnSide, PunchProposal
from p2pavg.net.nat.punch.sockets import FreshPort
from p2pavg.net.transport import Buffer, PeerId, Stream, receive_message
from tests.integration.punch.peers import new_gate, shake_hands
from tests.unit.group.samples import SIGNERS


class SocketStream(Stream):
    """A stream over a connected socket."""

    def __init__(self, opened: socket.socket, remote: PeerId) -> None:
        self.remote = remote
        self._inner = trio.SocketStream(trio.socket.from_stdlib_socket(opened))

    async def send_all(self, data: Buffer) -> None:
        try:
            await self._inner.send_all(bytes(data))
        except trio.BrokenResourceError as error:
            raise StreamBrokenError(str(error)) from None

    async def receive_some(self, max_bytes: int) -> bytes:
        return bytes(await self._inner.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def reset(self) -> None:
        await self._inner.aclose()


class Machine:
    """One peer of one punch."""

    def __init__(self, stream: Stream, me: PeerId, outer_host: str) -> None:
        self._stream = stream
        self._me = me
        self._own = OwnSide(punchable=True, outer_hosts=(outer_host,))
        self.tries = 0
        self._puncher = Puncher(new_gate(), lambda: self._own, self._predict)

    async def _predict(self, port: FreshPort) -> int:
        self.tries += 1
        return port.port

    async def ask(self) -> dict[str, object]:
        use = partial(shake_hands, me=self._me, peer_id=self._stream.remote, initiator=True)
        try:
            await self._puncher.ask(self._stream, use, lambda _: None)
        except UnreachableError as error:
            return {"tries": self.tries, "error": str(error)}
        return {"tries": self.tries, "error": ""}

    async def answer(self) -> dict[str, object]:
        use = partial(shake_hands, me=self._me, peer_id=self._stream.remote, initiator=False)
        first = PunchProposal.decode(await receive_message(self._stream) or b"")
        made = await self._puncher.take_part(self._stream, first, use)
        return {"tries": self.tries, "made": made}


async def main(role: str, outer_host: str, seconds: str, *descriptors: str) -> None:
    plan.PUNCH_SECONDS = float(seconds)
    me, other = (SIGNERS[0], SIGNERS[1]) if role == "ask" else (SIGNERS[1], SIGNERS[0])
    for descriptor in descriptors:
        stream = SocketStream(socket.socket(fileno=int(descriptor)), other.peer_id)
        machine = Machine(stream, me.peer_id, outer_host)
        print(json.dumps(await (machine.ask() if role == "ask" else machine.answer())), flush=True)
        await stream.aclose()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
