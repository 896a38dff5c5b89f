"""A daemon ``p2pavg peer`` that begins to change the bytes that it relays when its standard input says "lie"."""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

from p2pavg.net.nat.relay.limits import Circuit
from p2pavg.net.nat.relay.service import RelayService
from p2pavg.net.transport import Stream

HONEST_PIECES = 20
"""Of so many pieces, one is changed: it is the middle of a message in most cases."""

_lies = threading.Event()
_carry = RelayService._carry


class Crooked:
    """The receiving side of a stream, with a bit changed now and then."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pieces = 0

    async def receive_some(self, max_bytes: int) -> bytes:
        """Return what was received, changed or not."""
        found = await self._stream.receive_some(max_bytes)
        self._pieces += _lies.is_set()
        if self._pieces <= HONEST_PIECES or not found:
            return found
        self._pieces = 0
        middle = len(found) // 2
        return found[:middle] + bytes([found[middle] ^ 1]) + found[middle + 1 :]


async def lie(service: RelayService, circuit: Circuit, one: Stream, *rest: Any) -> None:
    """Carry bytes like a relay, but change some."""
    await _carry(service, circuit, cast(Stream, Crooked(one)), *rest)


def _listen() -> None:
    for line in sys.stdin:
        if line == "lie\n":
            _lies.set()


def main() -> None:
    """Run the daemon."""
    from p2pavg.tools.cli.main import main as run

    RelayService._carry = lie  # type: ignore[assignment, method-assign]
    threading.Thread(target=_listen, daemon=True).start()
    run()


if __name__ == "__main__":
    main()
