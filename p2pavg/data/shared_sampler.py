"""Samples of one peer of a run whose peers take each sample of an epoch once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from p2pavg.data.order import MAX_NUMBER, SampleOrder, check_number, check_peer_id, length_of
from p2pavg.data.plan import EpochPlan, Piece

_BLOCK = 256  # samples that are computed together


class SharedSampler(Sampler[int]):
    """Samples of one peer: the peers of a run together take each sample of an epoch once.

    Give it to the optimizer's state, ``RunState(model, data=sampler)``: each update tells it what the members of the
    update have contributed, and peers that join late get the plan with the run's state. :class:`EpochPlan` has the
    rules. All peers of the run need one, for the same data. What a peer computes and does not contribute, because it
    dies or its batch comes too late, is taken by others. A sample counts as taken when its gradient was averaged, so
    the weights of contributions have to be samples: ``optimizer.step(samples=len(inputs))``.

    It never ends: an iteration goes on into the next epochs. A peer that begins again needs no state of its own.

    Args:
        dataset_or_length: the data set, of which only the length is used, or the length: 1 to 2^62. All peers need the
            same number of samples in the same order.
        peer_id: ``averager.peer_id``.
        seed: whole number below 2^63 in magnitude, the same for all peers.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, dataset_or_length: Sized | int, *, peer_id: str, seed: int = 0) -> None:
        length = length_of(dataset_or_length)
        if length < 1:
            raise ValueError("dataset_or_length must have at least one sample")
        check_number("seed", seed, 1 - MAX_NUMBER, MAX_NUMBER - 1)
        check_peer_id(peer_id)
        self._peer_id = peer_id
        self.plan = EpochPlan(SampleOrder(length, seed))
        """What the peers of the run take next."""
        self._ahead = 0
        """Places that this peer has taken, and that no update has covered yet."""
        self._changes = 0
        """Of the plan: updates, and plans that were loaded."""

    @property
    def epoch(self) -> int:
        """The epoch of this peer's next sample."""
        return next(self._places(self._ahead), (self.plan.begun + 1, 0, 0))[0]

    def __iter__(self) -> Iterator[int]:
        """Give this peer's next samples without end, as indices from 0 to the number of samples less one.

        Iterators of one sampler go on from the same place, so none repeats what another has given.
        """
        block: list[int] = []
        changes, at = -1, (0, 0)
        while True:
            if not block or changes != self._changes:
                changes = self._changes
                epoch, first, end = self._next_piece()
                # After most updates, this peer goes on where it was, and knows the next samples already.
                known = block if at == (epoch, first) else []
                count = min(end - first, _BLOCK)
                block = known[:count] or self.plan.order.samples(epoch, first, count)
                at = epoch, first
            self._ahead += 1
            at = at[0], at[1] + 1
            yield block.pop(0)

    def _next_piece(self) -> Piece:
        piece = next(self._places(self._ahead), None)
        if piece is not None:
            return piece
        # It has taken a whole epoch since the last update. What follows it takes a second time.
        return self.plan.begun + 1, self._ahead % self.plan.order.length, self.plan.order.length

    def _places(self, skipped: int) -> Iterator[Piece]:
        for epoch, first, end in self.plan.places(self._peer_id):
            if skipped < end - first:
                yield epoch, first + skipped, end
            skipped = max(0, skipped - (end - first))

    # ------------------------------------------------------------------ of the optimizer

    def took(self, contributed: Mapping[str, float]) -> None:
        """Note an update: the samples of each member that contributed any, by its id. The optimizer calls it."""
        own = round(contributed.get(self._peer_id, 0.0))
        self.plan.took(contributed)
        # A peer that was not in the update has lost its lane, and what it has taken is given to others.
        self._ahead = max(0, self._ahead - own) if own else 0
        self._changes += 1

    def saved(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return self.plan.saved()

    def load(self, plan: EpochPlan) -> None:
        """Go on with the plan of the run, which the optimizer has fetched."""
        self.plan, self._ahead = plan, 0
        self._changes += 1
