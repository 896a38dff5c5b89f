"""Samples of one peer of a run whose peers take each sample of an epoch once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from p2pavg.data.order import order_of
from p2pavg.data.plan import EpochPlan, Piece

logger = logging.getLogger(__name__)

_BLOCK = 256  # samples that are computed together


class SharedSampler(Sampler[int]):
    """Samples of one peer: the peers of a run together take each sample of an epoch once.

    Give it to the optimizer's state, ``AveragedOptimizer(..., state=RunState(model, data=sampler))``: each update tells
    it what the members of the update have contributed, and peers that join late get the plan with the run's state.
    :class:`EpochPlan` has the rules. All peers of the run need one, for the same data. What a peer computes and does
    not contribute, because it dies or its batch comes too late, is taken by others. A sample counts as taken when its
    gradient was averaged, so the weights of contributions have to be samples: ``optimizer.step(samples=len(inputs))``.

    It never ends: an iteration goes on into the next epochs, and a new iteration where the last batch was stepped. A
    peer that begins again needs no state of its own. A loader that fetches ahead (``num_workers``) may hold as many
    samples as this peer contributes to a few updates; a warning says when it holds more. Not safe for use by several
    threads at once.

    Args:
        dataset_or_length: the data set, of which only the length is used, or the length: 1 to 2^62. All peers need the
            same number of samples in the same order.
        peer_id: ``averager.peer_id``.
        seed: whole number below 2^63 in magnitude, the same for all peers.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, dataset_or_length: Sized | int, *, peer_id: str, seed: int = 0) -> None:
        self.plan = EpochPlan(order_of(dataset_or_length, seed, peer_id))
        """The samples that the peers of the run take next."""
        self.peer_id = peer_id
        """The peer whose samples these are."""
        self._given = 0
        """Samples that were given out, and not stepped yet: a loader may hold them."""
        self._stepped = 0
        """Samples that were stepped, and that no update has covered yet."""
        self._block: list[int] = []
        """The samples that follow, of one piece, in the plan as it was after ``_changes`` changes."""
        self._place = (0, 0)
        """Epoch and place of the first of them."""
        self._changes, self._block_changes = 0, -1
        self._has_warned = False

    @property
    def epoch(self) -> int:
        """The epoch of this peer's next sample."""
        return self._next_piece()[0]

    def __iter__(self) -> Iterator[int]:
        """Give this peer's next samples without end, as indices from 0 to the number of samples less one."""
        # Samples that an earlier iteration has given out, and that were not stepped, are lost with it.
        self._given, self._block = 0, []
        while True:
            yield self._next()

    def _next(self) -> int:
        if not self._block or self._changes != self._block_changes:
            epoch, first, end = self._next_piece()
            # After most updates, this peer goes on where it was, and knows the next samples already.
            known = self._block if self._place == (epoch, first) else []
            count = min(end - first, _BLOCK)
            self._block = known[:count] or self.plan.order.samples(epoch, first, count)
            self._place, self._block_changes = (epoch, first), self._changes
        self._given += 1
        self._place = self._place[0], self._place[1] + 1
        return self._block.pop(0)

    def _next_piece(self) -> Piece:
        skipped = self._stepped + self._given
        for epoch, first, end in self.plan.places(self.peer_id):
            if skipped < end - first:
                return epoch, first + skipped, end
            skipped -= end - first
        # It has taken a whole epoch since the last update. What follows it takes a second time.
        length = self.plan.order.length
        return self.plan.begun + 1, skipped % length, length

    # ------------------------------------------------------------------ of the optimizer

    def stepped(self, samples: float) -> None:
        """Note a batch that the loop has stepped. The optimizer calls it."""
        count = round(samples)
        self._given = max(0, self._given - count)
        self._stepped += count

    def took(self, contributed: Mapping[str, float], pending: float) -> None:
        """Note an update. The optimizer calls it.

        Args:
            contributed: samples of each member that contributed any, by its id.
            pending: samples that this peer has accumulated, and that are not in the update.
        """
        self.plan.took(contributed)
        self._stepped = round(pending)
        self._changes += 1
        room = self.plan.room(self.peer_id)
        if room and self._given > room and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the data loader holds %d samples, and this peer's part of the plan %d: samples are missed and"
                " repeated. Let it fetch less ahead (num_workers, prefetch_factor)",
                self._given,
                room,
            )

    def saved(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return self.plan.saved()

    def load(self, plan: EpochPlan) -> None:
        """Go on with the plan of the run, which the optimizer has fetched."""
        self.plan, self._stepped, self._block = plan, 0, []
        self._changes += 1
