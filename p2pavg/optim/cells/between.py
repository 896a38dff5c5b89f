"""The outer averages of one member of a cell: the shares that it holds, with their holders in the other cells."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.base.result import InProgress, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.group.places.gossip import SearchPlace
from p2pavg.optim.cells.cells import Cells, bounds_of, holders, outer_state
from p2pavg.optim.coordination.together import RoundCoordinator

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outer:
    """The outer average of one share."""

    averager: Averager
    values: torch.Tensor
    """The values that this peer contributed."""
    difference: torch.Tensor | None = None
    """The average minus the values; ``None`` while there is none."""
    ended: bool = False


class CrossCellAverager:
    """Averages the shares that this member holds with the other cells; not thread-safe.

    Args:
        base: averager of the whole run; the rounds use others of the same peer, one for each share.
        cells: the run's settings.
        elements: number of values that are mixed.
    """

    def __init__(self, base: Averager, cells: Cells, elements: int) -> None:
        self._base = base
        self._cells = cells
        self._elements = elements
        self._state = outer_state(cells, elements)
        self._averagers: dict[int, tuple[Averager, Callable[[], None]]] = {}
        self._outers: dict[int, _Outer] = {}
        self._until = 0.0

    @property
    def mixed(self) -> float:
        """The part of all values, 0 to 1, whose outer average this member has."""
        found = [share for share, outer in self._outers.items() if outer.difference is not None]
        sizes = [bounds_of(share, self._cells.shares, self._elements) for share in found]
        return sum(stop - start for start, stop in sizes) / max(self._elements, 1)

    def begin(self, tensors: Sequence[torch.Tensor], roster: Collection[str], live: int) -> None:
        """Begin the outer averages of the shares that this peer holds, in the background.

        Args:
            tensors: the values of this cell.
            roster: contributors of the update that led to them.
            live: number of cells, this one included, that are known to train.
        """
        self.forget()
        me = self._base.peer_id
        held = [share for share, peer in enumerate(holders(roster, self._cells.shares)) if peer == me]
        for share in self._averagers.keys() - set(held):
            self._averagers.pop(share)[1]()
        if live < 2:
            return
        self._until = time.monotonic() + self._cells.timeout
        for share in held:
            start, stop = bounds_of(share, self._cells.shares, self._elements)
            averager = self._averager_of(share)
            if stop > start and not self._is_busy(averager):
                outer = _Outer(averager, values_of(tensors, start, stop))
                averager.clear()
                averager.accumulate([outer.values], weight=1.0)
                self._outers[share] = outer
                self._poll(outer, 0.0, live)

    def wait(self, together: RoundCoordinator) -> None:
        """Wait for the outer averages that have begun, until ``timeout`` after their beginning; then give them up.

        Meanwhile the cell's coordination looks at the other members.
        """
        for share, outer in self._outers.items():
            while not outer.ended:
                left = self._until - time.monotonic()
                self._poll(outer, min(max(left, 0.0), LOOK_SECONDS), 2)
                together.poll_peers()
                if left <= 0 and not outer.ended:
                    outer.averager.cancel_matchmaking("the cell mixes without this share")
                    outer.ended = True
                    logger.info("share %d was not averaged with other cells in time", share)

    def add_differences(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the differences of this member's shares into tensors of zeros, shaped like the cell's."""
        for share, outer in self._outers.items():
            if outer.difference is not None:
                start, _ = bounds_of(share, self._cells.shares, self._elements)
                write(tensors, start, outer.difference)

    def forget(self) -> None:
        """Forget the averages that have begun: they are mixed, or belong to other parameters."""
        for outer in self._outers.values():
            if not outer.ended:
                outer.averager.cancel_matchmaking("this member forgets the average")
            outer.averager.clear()
        self._outers.clear()

    def close(self) -> None:
        """Close the averagers of the shares."""
        self._outers.clear()
        while self._averagers:
            self._averagers.popitem()[1][1]()

    def _poll(self, outer: _Outer, wait: float, live: int) -> None:
        meeting = SearchPlace(patience=self._cells.timeout / 2)
        result: RoundResult = outer.averager.step(
            wait=wait, state=self._state, group_size=max(live, 2), meeting=meeting
        )
        if isinstance(result, InProgress):
            return
        outer.ended = True
        if isinstance(result, Success):
            assert isinstance(result.averaged, list)
            difference = result.averaged[0] - outer.values
            if bool(difference.isfinite().all()):
                outer.difference = difference

    def _is_busy(self, averager: Averager) -> bool:
        """Return whether a round of an earlier mix still runs; collect its result, which is too late, if not."""
        if averager.round_state is None:
            return False
        return isinstance(averager.step(wait=0.0, state=self._state), InProgress)

    def _averager_of(self, share: int) -> Averager:
        if share not in self._averagers:
            config = self._base.config
            half = self._cells.timeout / 2
            mine = replace(
                config,
                run_id=f"{config.run_id}/share {share}",
                group_size=self._cells.count,
                min_group_size=2,
                match_timeout=half,
                exchange_timeout=min(config.exchange_timeout, self._cells.timeout),
                compression=None,  # values of parameters, of which a coarse codec would lose what training has moved
                robust=self._cells.robust,
            )
            self._averagers[share] = self._base.open_sibling(mine)
        return self._averagers[share][0]


@torch.no_grad()
def values_of(tensors: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return a range of the flat vector of tensors, float32, on the CPU."""
    parts, at = [], 0
    for tensor in tensors:
        low, high = max(start - at, 0), min(stop - at, tensor.numel())
        if low < high:
            parts.append(tensor.detach().reshape(-1)[low:high].to("cpu", torch.float32, copy=True))
        at += tensor.numel()
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")


@torch.no_grad()
def write(tensors: Sequence[torch.Tensor], start: int, values: torch.Tensor) -> None:
    """Write values, float32 on the CPU, into a range of the flat vector of contiguous tensors."""
    at, stop = 0, start + values.numel()
    for tensor in tensors:
        low, high = max(start - at, 0), min(stop - at, tensor.numel())
        if low < high:
            part = values[at + low - start : at + high - start]
            tensor.view(-1)[low:high].copy_(part)
        at += tensor.numel()
