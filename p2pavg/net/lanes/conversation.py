"""The negotiation of one lane, as its sender and its receiver read it from their stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.addresses import is_circuit
from p2pavg.net.framing import receive_message
from p2pavg.net.lanes.messages import MAX_MESSAGE_BYTES, LaneVerdict
from p2pavg.net.transport import PeerId, Stream


class SkippedWayError(UnreachableError):
    """A way to make a lane makes no sense between the two peers now. No time was lost with it."""


class LaneSearch:
    """One attempt to make a lane: the reasons of its failures, and a note if another attempt would be futile."""

    def __init__(self, peer_id: PeerId, addresses: Sequence[str]) -> None:
        self.peer_id = peer_id
        self.addresses = addresses
        self.reasons: list[str] = []
        self.answered = False
        """True once the other peer has said how it can be reached."""
        self.futile = False
        self.costly = False
        """True if a way was tried and has failed. It may have taken seconds, and another search would too."""

    def failed(self, error: UnreachableError) -> None:
        """Note that one of the ways has failed, or was skipped."""
        self.reasons.append(str(error))
        self.costly |= not isinstance(error, SkippedWayError)


def direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses without a relay. A lane through a relay would be slower than the stream beside it."""
    return tuple(address for address in addresses if not is_circuit(address))


async def next_message(stream: Stream) -> bytes:
    """Return the next message. Raises StreamBrokenError if the other side has closed the stream instead."""
    message = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    if message is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream early")
    return message


async def expect_verdict(stream: Stream, attempt: int) -> None:
    """Wait for the verdict of an attempt, and skip the verdicts of earlier ones.

    Raises:
        UnreachableError: the attempt has failed; the message is the receiver's reason.
    """
    while (verdict := LaneVerdict.decode(await next_message(stream))).attempt != attempt:
        if verdict.attempt > attempt:
            raise RemoteProtocolError(f"a verdict of attempt {verdict.attempt} instead of {attempt}")
    if verdict.reason:
        raise UnreachableError(f"the peer reported: {verdict.reason}")
