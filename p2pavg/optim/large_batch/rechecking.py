"""Computes other peers' gradients again, where this peer was drawn to, and says what differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.group.recheck import Recheck, compare

logger = logging.getLogger(__name__)

Recompute = Callable[[str, int, float], Sequence[torch.Tensor | None]]
"""Returns the gradients of another peer for the parameters of ``inner``, in their order, at the present parameters: of
the mean loss over the samples that the peer takes for an update. Its arguments are the peer's id, the number of updates
before, and the number of samples."""


class Rechecker:
    """The spot checks of one optimizer.

    Args:
        recompute: ``None``: there are none.
        averager: of the run; it is told what differs.
        overlap: true if gradients may be of other parameters than the present ones, or this process has a part of them.

    Raises:
        TypeError: ``recompute`` is no function.
        ValueError: only one of ``recompute`` and the config's ``recheck`` is given, or they cannot be used here.
    """

    def __init__(self, recompute: Recompute | None, averager: Averager, *, overlap: bool) -> None:
        if recompute is not None and not callable(recompute):
            raise TypeError(
                f"recompute must be a function of a peer's id, an update and samples, got {type(recompute).__name__}"
            )
        if (recompute is None) != (averager.config.recheck == 0.0):
            raise ValueError(
                "recompute and AveragingConfig(recheck=...) need each other: the one computes a gradient again, the"
                " other says how often"
            )
        if recompute is not None and overlap:
            raise ValueError("recompute cannot be used with overlap or a process_group")
        self._recompute, self._averager = recompute, averager

    def check(self, success: Success, epoch: int, parameters: Sequence[torch.Tensor]) -> tuple[Recheck, ...]:
        """Compute again what this peer was drawn for in a round; return the comparisons.

        Args:
            epoch: updates before this one, whose parameters are the present ones.
            parameters: those that are trained. Their ``.grad`` is dropped.
        """
        if self._recompute is None:
            return ()
        found = []
        for drawn in success.drawn:
            # The program's own random numbers go on as if there had been no check.
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                given = self._recompute(drawn.peer_id, epoch, drawn.weight)
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(parameters, given, strict=True)
            ]
            try:
                recheck = compare(drawn, gradients, self._averager.config.codec)
            except RemoteProtocolError as error:
                # It was decoded once, in the average, so this is a fault of this program and no one's lie.
                logger.error("a contribution could not be checked: %s", error)  # noqa: TRY400 - one line is enough
                continue
            found.append(recheck)
            if recheck.differs:
                self._averager.rechecked(recheck.peer_id, recheck.why)
        return tuple(found)
