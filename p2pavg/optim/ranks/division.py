"""The division of a model among the ranks of one peer: which rank holds which part. No I/O, no clock, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """The dimensions of a peer's mesh of ranks, as ``torch.distributed.device_mesh`` has them.

    Args:
        names: names of the dimensions.
        sizes: number of ranks along each of them.
        stages: name of the dimension along which the ranks hold different layers; ``None`` if there is none.
        copies: name of the dimension along which the ranks hold the same parameters; ``None`` if there is none.

    Raises:
        ValueError: a name is none of the mesh, or stands for two things.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stages: str | None = None
    copies: str | None = None

    def __post_init__(self) -> None:
        for argument in ("stages", "copies"):
            name = getattr(self, argument)
            if name is not None and name not in self.names:
                raise ValueError(
                    f"{argument} is {name!r}, and mesh has the dimensions {', '.join(self.names)}: give one of these"
                )
        if self.stages is not None and self.stages == self.copies:
            raise ValueError(
                f"copies is {self.copies!r}, as stages is: ranks of different stages hold different parameters."
                " Name another dimension, or leave one of both out"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> str:
        """The mesh as a text, such as ``pp 2 x dp 2``."""
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))

    def stage(self, coordinates: Sequence[int]) -> int:
        """Return the number of a rank's stage."""
        return self._along(self.stages, coordinates)

    def copy(self, coordinates: Sequence[int]) -> int:
        """Return the number of the copy of the model that a rank holds a part of."""
        return self._along(self.copies, coordinates)

    def part(self, coordinates: Sequence[int]) -> str:
        """Return a text that ranks share if they hold the same part, such as ``pp 0 of 2, tp 1 of 2``.

        Dimensions of one rank are left out, so it is empty if no part is divided.
        """
        return ", ".join(
            f"{name} {at} of {size}"
            for name, size, at in zip(self.names, self.sizes, coordinates, strict=True)
            if name != self.copies and size > 1
        )

    def groups(self) -> list[list[int]]:
        """Return the positions of each copy's ranks in the flattened mesh, copy by copy."""
        found: dict[int, list[int]] = {}
        for position, coordinates in enumerate(self._all()):
            found.setdefault(self.copy(coordinates), []).append(position)
        return [found[copy] for copy in sorted(found)]

    def _along(self, name: str | None, coordinates: Sequence[int]) -> int:
        return 0 if name is None else coordinates[self.names.index(name)]

    def _all(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of all ranks, the last dimension first."""
        for position in range(self.ranks):
            found = []
            for size in reversed(self.sizes):
                position, at = divmod(position, size)
                found.append(at)
            yield tuple(reversed(found))
