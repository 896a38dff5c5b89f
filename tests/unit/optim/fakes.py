"""Helpers: an averager and its boards without a network, and optimizers that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch

import p2pavg
from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.base.result import InProgress, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, fedavg
from p2pavg.optim.local.recipes import Inner
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.runs.records.board import Entry
from p2pavg.state.choice import StateNews
from p2pavg.state.donor.shelf import Shelf
from p2pavg.telemetry.hub import Events

GROUP = "00" * 32
RUNS = InProgress(ready_peers=2, target_size=2, reason="it runs")


class Board:
    """A board with another peer at this peer's progress, or with an entry that the test sets."""

    version = 0

    def __init__(self) -> None:
        self.mine = b""
        self.other: bytes | None = None
        self.withdrawn = False

    def publish(self, value: bytes, *, now: bool = False) -> None:
        self.mine, self.withdrawn = value, False

    def withdraw(self) -> None:
        self.withdrawn = True

    def poll(self) -> None:
        """Ask no other peer."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {"other": Entry(self.other or self.mine, 1, 1e12)}

    def wait(self, version: int, timeout: float) -> None:
        raise AssertionError("nothing is to be waited for")


class EmptyBoard(Board):
    """A board without entries of other peers."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {}

    def wait(self, version: int, timeout: float) -> None:
        """Return at once: nothing comes."""


class NoStates:
    """The states of a run in which no other peer offers or wants one."""

    average_bytes = 100
    version = 0
    is_working = False
    history = None

    def __init__(self) -> None:
        self.shelf = Shelf(2**24)

    def news(self) -> dict[str, StateNews]:
        return {}

    def deciding(self, news: Mapping[str, StateNews], companions: object) -> frozenset[str]:
        return frozenset()

    def publish(self, *, wants: bool, epoch: int) -> None:
        """Tell no peer."""

    def took(self, group_id: bytes, epoch: int, after: bytes, numbers: bytes) -> None:
        self.shelf.begin(epoch)


class Alone:
    """An averager whose average is this peer's own contribution, at once by default."""

    peer_id = "me"

    def __init__(self, **changes: Any) -> None:
        self.config = p2pavg.AveragingConfig(**({"run_id": "run"} | changes))
        self.progress_board = Board()
        self.boards: dict[str, Board] = {"progress": self.progress_board}
        self.events = Events()
        self.round_state: bytes | None = None
        self.runs_for = 0
        """Number of calls during which a round is in progress."""
        self._accumulation = Accumulation()
        self._left = 0
        self._taken: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accumulation, {"accumulate": "add"}.get(name, name))

    def board(self, topic: str, look_seconds: float = 1.0, *, lasts: float | None = None) -> Board:
        """Return a board; on one whose entries last, no other peer has published any."""
        return self.boards.setdefault(topic, Board() if lasts is None else EmptyBoard())

    def share_states(self, settings: ShareSettings) -> NoStates:
        return NoStates()

    def on_end(self, ending: object) -> None:
        """Need no end."""

    def cancel_matchmaking(self, reason: str) -> bool:
        """Return false: no group is looked for."""
        return False

    def is_connected(self, peer_id: str) -> bool:
        """Return false: no other peer is there."""
        return False

    def expect(self, peers: object) -> None:
        """Need no hint."""

    def catch_up(self) -> None:
        """Need no turn: there is no event loop."""

    def step(self, *, state: bytes, **_: Any) -> RoundResult:
        if self.round_state is None:
            self._taken = self._accumulation.take()
            self.round_state, self._left = state, self.runs_for
        if self._left:
            self._left -= 1
            return RUNS
        self.round_state = None
        averaged = self.taken()
        self._accumulation.release(self._taken)
        return Success(
            averaged=averaged,
            peers=("me", "other"),
            weights={"me": self._taken.weight},
            total_weight=self._taken.weight,
            compression_ratio=1.0,
            bytes_sent=0,
            bytes_received=0,
            duration=0.0,
            exchange_duration=0.0,
            group_id=GROUP,
            share=(0, 0),
            metrics=self._taken.metrics.means,
        )

    def taken(self) -> list[torch.Tensor]:
        """Return the average of the running round."""
        averaged = self._taken.schema.unflatten(self._taken.mean.clone())
        assert isinstance(averaged, list)
        return averaged


# Without states, a peer that is behind says so at once: most tests have no other peer that could give one.
def large_batch(averager: Alone, inner: Inner, **options: Any) -> AveragedOptimizer:
    given: dict[str, Any] = {"target_batch_size": 4, "peers_to_start": 2, "state": False}
    return AveragedOptimizer(inner, cast(Averager, averager), **(given | options))


def local(averager: Alone, inner: Inner, **options: Any) -> LocalUpdates:
    given: dict[str, Any] = {"sync_every": 1, "peers_to_start": 2, "state": False}
    return fedavg(inner, cast(Averager, averager), **(given | options))


def mixed(averager: Alone, inner: Inner, **options: Any) -> LocalUpdates:
    """Make local updates with the options that one batch and one parameter can have."""
    return local(averager, inner, **({"offload": True, "alpha": 0.0} | options))


Make = Callable[..., AveragedOptimizer | LocalUpdates]
both = pytest.mark.parametrize("make", [large_batch, local, mixed])


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))
