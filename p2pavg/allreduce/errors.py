"""Faults in what a member contributes to a part. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.errors import RemoteProtocolError


class BadContributionError(RemoteProtocolError):
    """A member's part cannot be averaged."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"{peer_id} sent {reason}")
        self.peer_id = peer_id


class UndecodableError(BadContributionError):
    """A member's part does not decode."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(peer_id, f"a part that does not decode: {reason}")


class FalseNormError(BadContributionError):
    """A member's values are longer than it signed."""

    def __init__(self, peer_id: str, length: float, signed: float) -> None:
        super().__init__(
            peer_id, f"values of a norm of {length:g} or more, after it signed a norm of {signed:g}"
        )
