"""The peer, as its averagers and auxiliaries see it."""

from __future__ import annotations

from typing import Protocol

from p2pavg.allreduce.lobby import Lobby
from p2pavg.context import PeerContext
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.records.greeting import Greeter
from p2pavg_dht import RecordNode


class Host(Protocol):
    """The part of :class:`p2pavg.Peer` that averagers and auxiliaries use."""

    @property
    def id(self) -> str: ...
    @property
    def addresses(self) -> list[str]: ...
    @property
    def context(self) -> PeerContext: ...
    @property
    def records(self) -> RecordNode: ...
    @property
    def lobby(self) -> Lobby: ...
    @property
    def greeter(self) -> Greeter: ...

    def is_registered(self, key: bytes) -> bool:
        """Return whether a matchmaker answers under a ready key."""

    def register(self, key: bytes, matchmaker: Matchmaker, *, run_id: str | None = None) -> None:
        """Let a matchmaker answer the peers that ask about a ready key.

        Args:
            run_id: the run of an averager, which counts as one run more; ``None`` for an auxiliary.

        Raises:
            BusyError: another matchmaker of this peer answers under the key.
        """

    def unregister(self, key: bytes, *, run_id: str | None = None) -> bool:
        """Take a matchmaker back. Return whether it was the last averager of its run."""
