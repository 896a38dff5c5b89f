"""Program of a test: map a port of this machine, greet each connection, and print what the mapper tells and logs.

It ends when its standard input does. ``python -m tests.nat.mapping_work CHECK_SECONDS [PROTOCOL]``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import trio

from p2pavg.net.nat.reach import mapping
from p2pavg.net.nat.reach.facts import Mapped
from p2pavg.net.nat.reach.gateway import NatPmp, Pcp
from p2pavg.net.nat.reach.mapping import MappingClient, PortMapper
from p2pavg.net.nat.reach.upnp import Upnp

GREETING = b"hello"


def router_of_another_version() -> NatPmp:
    """Return what is known of a router that speaks PCP."""
    found = NatPmp()
    found.other_version = True
    return found


CLIENTS: dict[str, Callable[[], MappingClient]] = {
    "NAT-PMP": NatPmp,
    "PCP": lambda: Pcp(router_of_another_version()),
    "UPnP": Upnp,
}


def tell(found: Mapped | None) -> None:
    """Print one line for each mapping, and for the loss of one."""
    print("lost" if found is None else f"{found.protocol} {found.host} {found.port}", flush=True)


async def greet(stream: trio.SocketStream) -> None:
    """Send the greeting and close."""
    async with stream:
        await stream.send_all(GREETING)


async def main() -> None:
    """See the top of this file."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log: %(message)s")
    mapping.CHECK_MAPPING_SECONDS = float(sys.argv[1])
    mapping.RETRY_SECONDS = float(sys.argv[1]) / 5  # type: ignore[attr-defined]
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, greet, 0, host="0.0.0.0"))
        clients = [CLIENTS[name]() for name in sys.argv[2:]] or None
        nursery.start_soon(PortMapper(tell, clients).run, listeners[0].socket.getsockname()[1])
        async with trio.lowlevel.FdStream(0) as given:
            await given.receive_some(1)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
