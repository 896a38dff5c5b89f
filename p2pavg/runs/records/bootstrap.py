"""Dials of bootstrap addresses, and the words about those that do not answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from p2pavg.base.errors import BootstrapError, UnreachableError
from p2pavg.base.limits import ASK_AGAIN_SECONDS, GLANCE_SECONDS
from p2pavg.base.threads.waits import told_while_waiting
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.transport import Transport

logger = logging.getLogger(__name__)

_NO_ANSWER = "no answer"


class BootstrapDials:
    """Dials of all bootstrap addresses, until one of them answers.

    Args:
        addresses: of peers in the network, each ending in ``/p2p/<peer id>``. An address that is given twice counts
            once.
        each: bound of one dial, in seconds.
        seconds: bound of all dials together.
    """

    def __init__(
        self, transport: Transport, addresses: Sequence[str], *, each: float, seconds: float
    ) -> None:
        self._transport = transport
        self._reasons = dict.fromkeys(addresses, "")
        self._each = each
        self._seconds = seconds
        self._reached: list[str] = []

    async def until_one_answers(self) -> None:
        """Dial until one address has answered, and warn of those that have not.

        Raises:
            BootstrapError: none answered in time; the message names each address with its reason.
        """
        with trio.move_on_after(self._seconds):
            async with told_while_waiting(logger, self._progress):
                pause = GLANCE_SECONDS
                while not await self._dial_all():
                    await trio.sleep(pause)  # its process may be starting too
                    pause = min(2 * pause, ASK_AGAIN_SECONDS)
        if not self._reached:
            raise BootstrapError(
                f"no bootstrap peer could be reached within {self._seconds:.0f} s: {self._failures()}"
            )
        for address, reason in self._reasons.items():
            if address not in self._reached:
                logger.warning("the bootstrap address %s is dead: %s", address, reason or _NO_ANSWER)

    async def _dial_all(self) -> bool:
        async with trio.open_nursery() as nursery:
            for address in self._reasons:
                nursery.start_soon(self._dial_one, address)
        return bool(self._reached)

    async def _dial_one(self, address: str) -> None:
        try:
            await self._transport.dial(address, timeout=self._each)
        except UnreachableError as error:
            self._reasons[address] = reason_at(address, str(error))
        else:
            self._reached.append(address)

    def _progress(self, seconds: float) -> str:
        count = len(self._reasons)
        return (
            f"dialling {count} bootstrap address{'es' if count > 1 else ''} for {seconds:.0f} s, at most"
            f" {self._seconds:.0f} s: {self._failures()}"
        )

    def _failures(self) -> str:
        return "; ".join(f"{address} ({reason or _NO_ANSWER})" for address, reason in self._reasons.items())


def reason_at(address: str, text: str) -> str:
    """Return the reason in a transport's error, without the address and the peer id that it repeats."""
    _, peer_id = parse_peer_address(address)
    for repeated in (f"no connection to {peer_id}: ", f"{address}: ", f"{address} "):
        text = text.replace(repeated, "")
    return text.replace("no connection to within", "no answer within")
