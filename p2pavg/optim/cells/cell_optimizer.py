"""Synchronous training of more peers than one group holds: cells that step together, and average with each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager, check_meets_all
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import Lineage, checked_amount, checked_count
from p2pavg.optim.base.torch_optimizer import TorchOptimizer
from p2pavg.optim.catching_up.run_state import StateOption, run_state_of
from p2pavg.optim.cells.cell_choice import CellBoard
from p2pavg.optim.cells.cell_member import CellMember
from p2pavg.optim.cells.cells import Cells

logger = logging.getLogger(__name__)


class CellOptimizer(TorchOptimizer):
    """An :class:`AveragedOptimizer` for runs of any size: cells of up to 64 peers, which average with each other.

    The peers of a cell take every update together, as with :class:`AveragedOptimizer`, and hold the same bits. After
    every ``cells.every`` updates, the cells average their parameters and averaged buffers: member j of each cell
    averages a share with its counterparts in the other cells, and the cell takes the result as one more update, the
    *mix*. It follows the update before it in the same step; if it does not come about then, the next steps try it
    again, and leave their batches out. :attr:`StepReport.mixed` says how much of the parameters it moved, and
    :attr:`StepReport.consensus_distance` how far the cell was from the others. The state of the inner optimizer and its
    schedule stay the cell's own.

    A peer chooses its cell when this object is made, which takes a few seconds, and fetches the cell's state if the
    cell trains already. If its cell has fewer than ``min_group_size`` peers for ``cells.patience`` seconds, it moves to
    another cell and fetches that one's state.

    Args:
        inner: as for :class:`AveragedOptimizer`.
        averager: averager of the whole run. This object opens others of the same peer, for its cell and for shares.
        cells: the cells; the same for all peers of the run.
        target_batch_size: number of samples, of all peers of a cell together, for one update.
        state: as for :class:`AveragedOptimizer`, but for ``False``: peers change cells. In its ``directory``, each cell
            has a folder, and a peer that begins again takes the cell of the newest one.
        peers_to_start: number of peers of the whole run that a peer waits for before it chooses its cell, for
            ``sync_timeout`` at most, unless the run trains already; two cells' worth of ``min_group_size`` if not
            given.
        sync_timeout: as for :class:`AveragedOptimizer`.
        options: the other arguments of :class:`AveragedOptimizer`, but for ``overlap``, ``process_group`` and
            ``min_peers``.

    Raises:
        TypeError: ``cells`` is no :class:`Cells`, or as for :class:`AveragedOptimizer`.
        ValueError: an argument cannot be used with cells or is out of range, or all cells are full; the message says
            what to do.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        averager: Averager,
        *,
        cells: Cells,
        target_batch_size: float,
        state: StateOption = None,
        peers_to_start: int | None = None,
        sync_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        check_averager(averager)
        check_meets_all(averager)
        _check_company(averager, cells, options)
        run_state = run_state_of(state)
        if run_state is None:
            raise ValueError("state must not be False: a peer fetches its cell's state when it changes cells")
        # Two optimizers would write their checkpoints into the same folders.
        run_state.claim()
        timeout = checked_amount("sync_timeout", sync_timeout)
        least = averager.config.min_group_size
        to_start = 2 * least if peers_to_start is None else checked_count("peers_to_start", peers_to_start)
        self.cells = cells
        """The cells of the run."""
        self._averager = averager
        self._given = run_state
        self._inner = inner
        self._options = {**options, "target_batch_size": target_batch_size, "sync_timeout": sync_timeout}
        self._small_since: float | None = None
        self._board = CellBoard(averager, cells)
        # A peer that begins again goes on where its checkpoints are, and only a newcomer chooses.
        cell = self._remembered()
        if cell is None:
            cell = self._board.choose(peers_to_start=to_start, timeout=timeout)
        self._member = self._join(cell, continues=True)
        self._become_optimizer()

    def _remembered(self) -> int | None:
        """Return the cell of the newest checkpoints, if there are any."""
        folder = self._given.directory
        if folder is None or not folder.is_dir():
            return None
        paths = [(cell, folder / _name(cell)) for cell in range(self.cells.count)]
        # A peer that has moved has folders of several cells. The newest one is of the last cell.
        kept = [(path.stat().st_mtime, cell) for cell, path in paths if path.is_dir()]
        return max(kept)[1] if kept else None

    def _join(self, cell: int, *, continues: bool) -> CellMember:
        """Become a member of a cell.

        Args:
            continues: from this peer's newest checkpoint of the cell. A peer that moves has newer values in its loop
                than an old checkpoint has, and fetches the cell's state.
        """
        self._board.publish(cell, 0)
        with ExitStack() as stack:
            # If the member cannot be made, the others must not count on it in this cell.
            stack.callback(self._board.leave)
            config = replace(self._averager.config, run_id=f"{self._averager.config.run_id}/cell {cell}")
            averager, close = self._averager.open_sibling(config)
            stack.callback(close)
            # The caller knows the averager that it gave, and hears there of the rounds of the cell, too.
            averager.subscribe(self._averager.events.pass_on)
            member = CellMember(
                self._inner,
                averager,
                base=self._averager,
                cells=self.cells,
                cell=cell,
                board=self._board,
                state=self._given.inside(_name(cell), continues=continues),
                **self._options,
            )
            stack.pop_all()  # it is this object's from now on
        self._close_averager = close
        return member

    def _move(self, cell: int) -> None:
        """Become a member of another cell."""
        self._member.leave()
        self._member.close()
        self._close_averager()
        # Only now: in two cells at once, this peer would keep both waiting.
        self._member = self._join(cell, continues=False)

    # ------------------------------------------------------------------ as an optimizer

    @property
    def _stepped(self) -> Optimizer:
        return self._member.inner

    @property
    def cell(self) -> int:
        """This peer's cell, from 0 on."""
        return self._member.cell

    @property
    def epoch(self) -> int:
        """Number of updates that the cell's parameters have taken, mixes included."""
        return self._member.epoch

    @property
    def lineage(self) -> Lineage:
        """The lineage of the cell's parameters."""
        return self._member.lineage

    @property
    def is_pending(self) -> bool:
        """True if the next backward pass adds to the present gradients: see ``accumulate``."""
        return self._member.is_pending

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as in every torch optimizer."""
        self._member.zero_grad(set_to_none)

    def note(self, metrics: Mapping[str, float]) -> None:
        """See :meth:`AveragedOptimizer.note`."""
        self._member.note(metrics)

    def leave(self) -> None:
        """Stop taking part, so that the others do not wait for this peer, until :meth:`step` is called again."""
        self._board.leave()
        self._member.leave()

    def finish(self) -> None:
        """End this peer's training as :meth:`AveragedOptimizer.finish` does; use it if the averager stays open."""
        self._board.leave()
        self._member.finish()

    def _step_once(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        report = self._step_member(samples, metrics)
        if isinstance(report.result, Success):
            self._board.updated(self.cell, report.result)
        report = replace(report, cell=self.cell, differs=(*report.differs, *self._differences()))
        self._keep(report)  # also if the move raises
        self._move_if_small(report)
        return report

    def _step_member(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        # A scaler sets these on the optimizer that it was given, for one step. The member looks for them on
        # itself.
        told = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        for name, value in told.items():  # a GradScaler's word
            setattr(self._member, name, value)
        try:
            return self._member.step(samples=samples, metrics=metrics)
        finally:
            for name in told:
                # A later step without a scaler must not find them.
                delattr(self._member, name)

    def _differences(self) -> tuple[str, ...]:
        others = self._board.others
        if not others:
            return ()
        return (
            f"{others} {'peer' if others == 1 else 'peers'} of the run {'has' if others == 1 else 'have'} other cells;"
            " give the same count, every, shares and delay on all peers",
        )

    # ------------------------------------------------------------------ another cell

    def _move_if_small(self, report: StepReport) -> None:
        """Move to another cell if this one has been too small to train for long."""
        now = time.monotonic()
        # A peer that still fetches the cell's state takes no update, so its reports say little about the
        # cell.
        if report.peers >= self._averager.config.min_group_size or report.catching_up is not None:
            self._small_since = None
            return
        if self._small_since is None:
            self._small_since = now
        # Newcomers that read this come to fill the cell. This peer moves only if none does.
        self._board.publish(self.cell, report.peers)
        if now < self._small_since + self.cells.patience:
            return
        other = self._board.refuge(self.cell)
        # It looks again with the next report: there may be a place later.
        if other is None:
            return
        logger.warning(
            "cell %d has had fewer than %d peers for %.0f s: this peer moves to cell %d, and fetches its state",
            self.cell,
            self._averager.config.min_group_size,
            now - self._small_since,
            other,
        )
        self._small_since = None
        self._move(other)

    # ------------------------------------------------------------------ saved states

    def _state_dict(self) -> dict[str, Any]:
        return self._member.state_dict() | {"cell": self.cell}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        cell = state.get("cell")
        if isinstance(cell, bool) or not isinstance(cell, int) or not 0 <= cell < self.cells.count:
            raise ValueError(f"state: it is of no cell of this run: {cell!r}")
        # The state goes to a member of the cell of which it is.
        if cell != self.cell:
            self._move(cell)
        self._member.load_state_dict({name: value for name, value in state.items() if name != "cell"})


def _name(cell: int) -> str:
    return f"cell-{cell}"


def _check_company(averager: Averager, cells: object, options: Mapping[str, Any]) -> None:
    """Raise an error for options, or an averager, that cannot be used with cells."""
    if not isinstance(cells, Cells):
        raise TypeError(f"cells must be p2pavg.optim.Cells(count=...), got {type(cells).__name__}")
    for name in ("overlap", "process_group", "min_peers"):
        if options.get(name) not in (None, False):
            raise ValueError(f"{name} cannot be used with cells")
    config = averager.config
    if config.participation is not None:
        raise ValueError(
            "a config with participation cannot be used with cells: each member of a mix contributes"
        )
    if config.robust is not None:
        raise ValueError(
            "a config with robust cannot be used with cells: in a mix, one member alone has each share, and a robust"
            " rule would take it for a lie. Cells(robust=...) is for the averages between cells"
        )
    if config.max_norm is not None:
        raise ValueError(
            "a config with max_norm cannot be used with cells: in a mix, most members contribute zeros, and the"
            " others would be shortened to that"
        )
    if cells.timeout >= config.match_timeout:
        raise ValueError(
            f"cells: timeout is {cells.timeout:g} s, and must be below the config's match_timeout of"
            f" {config.match_timeout:g} s: a member that waits for its share would be left out of the mix"
        )
