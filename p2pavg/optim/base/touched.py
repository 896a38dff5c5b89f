"""Changes of parameters between two updates: by the loop, or by an update that was interrupted. No I/O, no clock.

Peers hold the same bits because each of them changes its parameters by updates alone. A digest of all parameters finds
other changes, but only every few updates, since it reads them all. Torch counts the in-place changes of each tensor: to
compare these numbers costs less than a microsecond for a tensor, so it is done in every step. It does not see a change
through ``parameter.data``, which torch does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TouchedCheck:
    """Notices changes of some tensors that are not noted by :meth:`note`; the first note begins it.

    Args:
        tensors: the parameters; none, to notice only updates that were interrupted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._marks: list[tuple[int, int]] | None = None
        self._updates = False

    def begin_update(self) -> None:
        """Note that an update begins, which ends with :meth:`note`."""
        self._updates = True

    def note(self) -> None:
        """Note that the present values are those that the run's updates have made."""
        self._marks, self._updates = self._present(), False

    def forget(self) -> None:
        """Note that the parameters are about to be replaced: whatever they are next is right."""
        self._marks, self._updates = None, False

    @property
    def was_interrupted(self) -> bool:
        """True if the last update has not ended: its call was interrupted, or raised an error."""
        return self._updates

    def touched(self) -> int | None:
        """Return the position of the first tensor that was changed otherwise; ``None`` if there is none."""
        if self._marks is None:
            return None
        pairs = zip(self._marks, self._present(), strict=True)
        return next((position for position, (before, now) in enumerate(pairs) if before != now), None)

    def _present(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]
