"""What a lossy codec leaves out of one contribution goes into the next one.

Source: Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 3; Karimireddy,
Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, Algorithm 2
(EF-SGD).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from p2pavg.vector.accumulation import LIMIT, schema_of
from p2pavg_compression import Codec, resolve_codec

Shapes = tuple[tuple[int, ...], ...]


class FeedbackState(TypedDict):
    """What :meth:`ErrorFeedback.state_dict` returns."""

    shapes: list[list[int]]
    """Of the tensors, in order; empty before the first."""
    residual: torch.Tensor | None
    """float32, flat, on the tensors' device; ``None`` before the first call."""


class ErrorFeedback:
    """Error feedback: a codec's error in one contribution is made up for in the next ones.

    With x what is given, C the codec there and back, and e the *residual*, 0 at first:

        p <- x + e, which is contributed;   when others have it:   e <- p - C(p)

    So after any number of contributions, all that the others averaged is all that was given but for the last residual.
    Elements of this peer's own share are averaged as they are, and leave no residual. The exchange cuts the vector at
    multiples of the codec's granularity, so that C is the same for the whole vector and for its parts.

    Not made up for: the second encoding of a round, of the average by each share's reducer; and what the codec leaves
    out of the mean of several contributions, where more than one is accumulated for a round. An fp16 element beyond
    65504 leaves a residual that only smaller ones use up.

    It keeps one float32 vector, and another one from :meth:`compensate` to :meth:`delivered`, on the tensors' device
    (on the CPU when they are spread over several). Not for several threads at once.

    Args:
        codec: as in ``AveragingConfig.compression``, and the same: a name, an object, or ``None`` for fp32.

    Raises:
        ValueError: no codec of that name; the message lists those that are known.
    """

    def __init__(self, codec: str | Codec | None) -> None:
        self._codec = resolve_codec(codec)
        self._shapes: Shapes | None = None
        self._residual: torch.Tensor | None = None
        self._pending: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        """What is to be contributed, as float32 before it was rounded to the tensors' dtypes, and as it was given."""

    @property
    def residual_norm(self) -> float:
        """L2 norm of what is still to be made up for, in the tensors' units; 0 before the first call."""
        if self._residual is None:
            return 0.0
        return float(torch.linalg.vector_norm(self._residual, dtype=torch.float64).item())

    @torch.no_grad()
    def compensate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors with the residual added: to be contributed in their place.

        The residual stays until :meth:`delivered`; where the contribution came to nothing, just call this again.

        Args:
            tensors: float32, float16 or bfloat16, of the shapes of the call before, in its order. Not changed.

        Returns:
            As many tensors, each of the shape, dtype and device given; new memory.

        Raises:
            TypeError: not a sequence.
            ValueError: a tensor that cannot be averaged, of another shape than before, or which with its residual holds
                NaN, infinity or a magnitude beyond what can be accumulated (2^99); the message names it, and nothing
                has changed.
        """
        if not isinstance(tensors, Sequence):
            raise TypeError(f"tensors must be a sequence of tensors, got {type(tensors).__name__}")
        schema, given = schema_of(tensors)
        if self._shapes is not None:
            _check_same(self._shapes, schema.shapes)
        total = torch.empty(schema.elements, dtype=torch.float32, device=schema.device)
        pieces = torch.split(total, schema.sizes)
        for piece, tensor in zip(pieces, given, strict=True):
            piece.copy_(tensor.reshape(-1))
        if self._residual is not None:
            total.add_(self._residual.to(total.device))
        _check_values(total, schema.sizes)
        returned = [_as_given(piece, tensor) for piece, tensor in zip(pieces, given, strict=True)]
        self._shapes, self._pending = schema.shapes, (total, returned)
        return [tensor.clone() for tensor in returned]

    @torch.no_grad()
    def delivered(self, start: int, stop: int) -> None:
        """What :meth:`compensate` returned last is averaged: what the codec left out of it is the new residual.

        Args:
            start, stop: this peer's own share of the flat vector, :attr:`p2pavg.Success.share`, which was not encoded.

        Raises:
            RuntimeError: nothing is to be delivered.
            ValueError: not a range of the vector.
        """
        if self._pending is None:
            raise RuntimeError("nothing was compensated since the last delivery")
        total, returned = self._pending
        if not 0 <= start <= stop <= total.numel():
            raise ValueError(f"a share from {start} to {stop} of a vector of {total.numel()} elements")
        sent = torch.cat([tensor.reshape(-1).to(total) for tensor in returned])
        decoded = self._codec.decode(self._codec.encode(sent), sent.numel()).to(sent)
        decoded[start:stop] = sent[start:stop]
        self._residual, self._pending = total.sub_(decoded), None

    def clear(self) -> None:
        """Forget the residual, and of which shapes the tensors were."""
        self._shapes = self._residual = self._pending = None

    def state_dict(self) -> FeedbackState:
        """The residual and the tensors' shapes. The residual is not a copy; later calls do not change it."""
        shapes = [] if self._residual is None else [list(shape) for shape in self._shapes or ()]
        return {"shapes": shapes, "residual": self._residual}

    def load_state_dict(self, state: FeedbackState) -> None:
        """Go on from a state, of any codec; a residual is copied.

        Raises:
            TypeError: not a mapping, a residual that is not a tensor, or shapes that are not lists of integers.
            ValueError: an entry is missing or unknown, the residual is not flat float32 of the shapes' length or not
                finite, or the shapes are not those of the tensors seen here. Nothing was loaded then.
        """
        shapes, residual = _checked_state(state)
        if residual is None:
            self.clear()
            return
        if self._shapes is not None:
            _check_same(self._shapes, shapes)
        self._pending = None
        self._shapes, self._residual = shapes, residual.detach().clone()


def _as_given(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shaped = values.view(like.shape)
    if like.dtype != torch.float32:
        largest = torch.finfo(like.dtype).max
        shaped = shaped.clamp(-largest, largest)  # float16 would make infinity of more
    return shaped.to(device=like.device, dtype=like.dtype)


def _check_same(before: Shapes, now: Shapes) -> None:
    if len(now) != len(before):
        raise ValueError(f"{len(now)} tensors were given, {len(before)} before")
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        if new != old:
            raise ValueError(f"tensor {position} has shape {new}, before it had {old}")


def _check_values(total: torch.Tensor, sizes: list[int]) -> None:
    # A NaN comes through minimum and maximum, and fails the comparison.
    if total.numel() == 0 or bool((torch.stack(torch.aminmax(total)).abs() <= LIMIT).all()):
        return
    first = int((~(total.abs() <= LIMIT)).nonzero()[0].item())
    position = bisect_right(list(itertools.accumulate(sizes)), first)
    value = float(total[first].item())
    what = f"a magnitude above {LIMIT:g}" if math.isfinite(value) else "NaN or Inf"
    raise ValueError(f"tensor {position}, together with its residual, holds {what}; nothing was changed")


def _checked_state(state: object) -> tuple[Shapes, torch.Tensor | None]:
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping, got {type(state).__name__}")
    if set(state) != {"shapes", "residual"}:
        raise ValueError(f"state must have the entries shapes and residual, got {sorted(map(str, state))}")
    shapes, residual = _checked_shapes(state["shapes"]), state["residual"]
    if residual is None:
        if shapes:
            raise ValueError("state has shapes but no residual")
        return shapes, None
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual must be a tensor, got {type(residual).__name__}")
    if not shapes:
        raise ValueError("state has a residual but no shapes")
    elements = sum(map(math.prod, shapes))
    if residual.dtype != torch.float32 or residual.shape != (elements,):
        found = f"{residual.dtype} of shape {tuple(residual.shape)}"
        raise ValueError(f"residual must be torch.float32 of shape ({elements},), got {found}")
    if not bool(residual.isfinite().all()):
        raise ValueError("residual holds NaN or Inf")
    return shapes, residual


def _checked_shapes(shapes: object) -> Shapes:
    if not isinstance(shapes, list | tuple):
        raise TypeError(f"shapes must be a list of shapes, got {type(shapes).__name__}")
    for position, shape in enumerate(shapes):
        if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
            raise TypeError(f"shape {position} must be a list of integers, got {shape!r}")
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {position} has a negative size: {shape!r}")
    return tuple(tuple(shape) for shape in shapes)
