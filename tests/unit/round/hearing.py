"""Messages of members, and a member that keeps what the control streams report about the others."""

from __future__ import annotations

from p2pavg.consensus.votes import Vote


def framed(message: bytes) -> bytes:
    """Return a message as it goes over a stream."""
    return len(message).to_bytes(4, "big") + message


class Hearing:
    """Keeps the votes, and the reports about lost members; asks no one."""

    def __init__(self) -> None:
        self.lost_members: list[tuple[int, str, bool]] = []
        """Position, reason, and whether the member was hostile."""
        self.votes: list[Vote] = []

    def heard(self, position: int, vote: Vote) -> None:
        self.votes.append(vote)

    def lost(
        self,
        position: int,
        reason: str,
        *,
        hostile: bool = False,
        silent: bool = False,
        reachable: bool = False,
    ) -> None:
        self.lost_members.append((position, reason, hostile))

    def missing(self, position: int) -> None:
        pass
