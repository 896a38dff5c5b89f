"""Error feedback: the part of a contribution that a lossy codec drops is added to the next contribution.

Source: Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 3; Karimireddy,
Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, Algorithm 2
(EF-SGD); with a sparse codec: Sarfi et al., "SparseLoCo", 2025 (arXiv 2508.15706), algorithm 1.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from p2pavg.allreduce.vector.accumulation import LIMIT, schema_of
from p2pavg_compression import Codec, resolve_codec

logger = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]

SPARSE_BETA = 0.95
"""The decay of the residual with a sparse codec, as SparseLoCo has it."""


class FeedbackState(TypedDict):
    """The dictionary that :meth:`ErrorFeedback.state_dict` returns."""

    shapes: list[list[int]]
    """Shapes of the tensors, in order; empty before the first call."""
    residual: torch.Tensor | None
    """float32, flat, on the tensors' device; ``None`` before the first call."""


class ErrorFeedback:
    """Compensates a codec's error in one contribution by the next ones.

    Let x be the given tensors, C encoding followed by decoding, and e the *residual*, 0 at first:

        p <- x + beta e is contributed; once it is delivered: e <- p - C(p)

    So after any number of contributions, with a beta of 1, the sum of all averaged values is the sum of all given
    values, less the last residual. Elements of this peer's own share are averaged unencoded and leave no residual. The
    exchange cuts the vector at multiples of the codec's granularity, so that C is the same for the whole vector and for
    its parts.

    **With a sparse codec**, such as :class:`~p2pavg_compression.TopK`, this peer's own share is encoded too, and the
    average keeps only some of the values that its contributors have sent. What it does not keep stays with those that
    sent it:

        e <- p - C(p) where the average is not 0; e <- p where it is 0

    The residual is then most of what training has learned since long ago. A beta below 1 forgets what has waited for
    too long; it takes the place of the outer optimizer's momentum.

    **The second encoding.** Each reducer encodes its share of the average, too. What that loses, the reducer alone
    knows. With a codec such as :class:`~p2pavg_compression.Ternary` it adds it to its own residual, times the whole
    weight of the round over its own, so that the next average makes up for it. (Tang et al. 2019, "DoubleSqueeze",
    arXiv 1905.05957, algorithm 1, where a server keeps it.)

    Two errors are not compensated: that of the second encoding with finer codecs, such as ``int8``; and that of a mean
    of several contributions, if more than one is accumulated for a round. An fp16 element beyond 65504 leaves a
    residual that only smaller ones use up.

    It keeps one float32 vector, and a second one from :meth:`compensate` to :meth:`delivered`. Both are on the tensors'
    device, or on the CPU if the tensors are on several devices. It is not thread-safe.

    Args:
        codec: the same as ``AveragingConfig.compression``: a name, an object, or ``None`` for fp32.
        beta: factor of the residual in the next contribution, above 0 and at most 1.

    Raises:
        ValueError: no codec of that name, the message lists those that are known; or ``beta`` is out of range.
    """

    def __init__(self, codec: str | Codec | None, *, beta: float = 1.0) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta <= 1:
            raise ValueError(f"beta must be a number above 0 and at most 1, got {beta!r}")
        self._codec = resolve_codec(codec)
        self._beta = float(beta)
        self._shapes: Shapes | None = None
        self._residual: torch.Tensor | None = None
        self._pending: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        """The pending contribution: as float32 before rounding to the tensors' dtypes, and rounded as returned."""

    @property
    def codec(self) -> Codec:
        """The codec whose error is compensated."""
        return self._codec

    @property
    def beta(self) -> float:
        """Factor of the residual in the next contribution."""
        return self._beta

    @torch.no_grad()
    def compensate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors plus the residual; contribute these instead.

        The residual stays until :meth:`delivered`. If the contribution fails, just call this again.

        Args:
            tensors: float32, float16 or bfloat16, with the shapes and order of the previous call. They are not changed.

        Returns:
            As many tensors of the same shapes, dtypes and devices, in new memory.

        Raises:
            TypeError: ``tensors`` is not a sequence.
            ValueError: a tensor cannot be averaged, has another shape than before, or holds, with its residual, NaN,
                infinity or a magnitude above the limit of accumulation (2^99). The message names it; nothing has
                changed.
        """
        if not isinstance(tensors, Sequence):
            raise TypeError(f"tensors must be a sequence of tensors, got {type(tensors).__name__}")
        schema, given = schema_of(tensors)
        if self._shapes is not None:
            _check_same(self._shapes, schema.shapes)
        total = torch.empty(schema.elements, dtype=torch.float32, device=schema.device)
        pieces = torch.split(total, schema.sizes)
        for piece, tensor in zip(pieces, given, strict=True):
            # In float32: in the tensors' own dtype, adding a small residual to a large value would lose it.
            piece.copy_(tensor.reshape(-1))
        if self._residual is not None:
            total.add_(self._residual.to(total.device), alpha=self._beta)
        # Before anything is kept: a residual with NaN would spoil every later contribution.
        _check_values(total, schema.sizes)
        returned = [_as_given(piece, tensor) for piece, tensor in zip(pieces, given, strict=True)]
        self._shapes, self._pending = schema.shapes, (total, returned)
        # Copies: the caller may change them, and `delivered` needs what was contributed.
        return [tensor.clone() for tensor in returned]

    @torch.no_grad()
    def delivered(
        self,
        start: int,
        stop: int,
        *further: tuple[int, int],
        averaged: Sequence[torch.Tensor] | None = None,
        left_out: torch.Tensor | None = None,
    ) -> None:
        """Note that the tensors from :meth:`compensate` are averaged; the codec's error becomes the residual.

        Args:
            start, stop: this peer's own share of the flat vector, :attr:`p2pavg.Success.share`, which was not encoded.
            further: further ranges that it reduced, :attr:`p2pavg.Success.taken_over`.
            averaged: the average of the tensors, :attr:`p2pavg.Success.averaged`; needed with a sparse codec.
            left_out: what the average lacks in these ranges, :attr:`p2pavg.Success.left_out`, times the whole weight
                of the round over this peer's.

        Raises:
            RuntimeError: no contribution is pending.
            ValueError: ``start`` and ``stop``, or one of ``further``, are not a range of the vector; ``left_out`` is
                not as long as they are together; or the codec is sparse, and ``averaged`` is missing or has other
                shapes than the tensors.
        """
        if self._pending is None:
            raise RuntimeError("nothing was compensated since the last delivery")
        total, returned = self._pending
        own = ((start, stop), *further)
        for first, last in own:
            if not 0 <= first <= last <= total.numel():
                raise ValueError(f"a share from {first} to {last} of a vector of {total.numel()} elements")
        sizes = [last - first for first, last in own]
        if left_out is not None and left_out.shape != (sum(sizes),):
            raise ValueError(
                f"left_out has the shape {tuple(left_out.shape)}, and the share {sum(sizes)} elements"
            )
        # As it was rounded to the tensors' dtype: the error of that stays in the residual, too.
        sent = torch.cat([tensor.reshape(-1).to(total) for tensor in returned])
        if self._codec.is_sparse:
            taken = self._taken(sent, averaged)
        else:
            taken = self._codec.decode(self._codec.encode(sent), sent.numel()).to(sent)
            for first, last in own:
                # This peer reduces these ranges itself, from its own values as they are.
                taken[first:last] = sent[first:last]
        # In place: the vector becomes the residual, and takes no memory of its own.
        self._residual, self._pending = total.sub_(taken), None
        if left_out is not None:
            for (first, last), left in zip(own, torch.split(left_out, sizes), strict=True):
                self._residual[first:last] += left.to(self._residual.device)

    def found_out(self, averaged: Sequence[torch.Tensor]) -> None:
        """Note later that the pending contribution, if there is one, was in this average.

        It counts with a sparse codec, whose residual would else be contributed twice. With others, what a share left
        unencoded is not known any more, and the residual stays as it was.
        """
        if self._codec.is_sparse and self._pending is not None:
            self.delivered(0, 0, averaged=averaged)

    def _taken(self, sent: torch.Tensor, averaged: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the part of a contribution that a sparse average contains."""
        if averaged is None or [tuple(tensor.shape) for tensor in averaged] != list(self._shapes or ()):
            raise ValueError(f"the codec {self._codec.name} needs the averaged tensors: give averaged=")
        average = torch.cat([tensor.reshape(-1).to(sent) for tensor in averaged])
        if torch.equal(average, sent):  # this peer went on alone: nothing was encoded
            return sent
        # What the average left out was lost on the way, so it counts as not sent.
        return self._codec.decode(self._codec.encode(sent), sent.numel()).to(sent).mul_(average != 0)

    def clear(self) -> None:
        """Discard the residual and the remembered shapes."""
        self._shapes = self._residual = self._pending = None

    def state_dict(self) -> FeedbackState:
        """Return the residual and the tensors' shapes. The residual is not a copy; later calls do not change it."""
        shapes = [] if self._residual is None else [list(shape) for shape in self._shapes or ()]
        return {"shapes": shapes, "residual": self._residual}

    def load_state_dict(self, state: FeedbackState) -> None:
        """Continue from a state, of any codec; its residual is copied.

        Raises:
            TypeError: ``state`` is not a mapping, its residual is not a tensor, or its shapes are not lists of
                integers.
            ValueError: an entry is missing or unknown; the residual is not finite, or not flat float32 of the shapes'
                length; or the shapes differ from those of the tensors seen here. Nothing is loaded then.
        """
        # All checks come first, so a state that is refused changes nothing.
        shapes, residual = _checked_state(state)
        if residual is None:
            self.clear()
            return
        if self._shapes is not None:
            _check_same(self._shapes, shapes)
        # A contribution that is pending has the residual of before in it.
        self._pending = None
        self._shapes, self._residual = shapes, residual.detach().clone()


def feedback_for(codec: Codec, given: ErrorFeedback | bool | None) -> ErrorFeedback | None:
    """Return the feedback of local updates with a codec.

    Args:
        given: the user's choice; ``None``: feedback with a codec that needs it, and else none.

    Raises:
        ValueError: the codec needs feedback, and the choice is none, or feedback of another codec.
        TypeError: the choice is neither feedback nor a truth value.
    """
    if given is not None and not isinstance(given, bool | ErrorFeedback):
        raise TypeError(f"feedback must be an ErrorFeedback, a bool or None, got {type(given).__name__}")
    if not codec.needs_feedback:
        if isinstance(given, ErrorFeedback):
            return given
        return ErrorFeedback(codec) if given else None
    if given is False:
        raise ValueError(
            f"the codec {codec.name} needs error feedback: without it, what the codec leaves out is lost. Leave"
            " feedback out, or use a finer codec such as blockwise8"
        )
    if isinstance(given, ErrorFeedback) and given.codec != codec:
        raise ValueError(
            f"feedback is for the codec {given.codec.name}, and the averager has the codec {codec.name}"
        )
    if isinstance(given, ErrorFeedback):
        return given
    # With a sparse codec the residual takes the place of momentum, so it has to decay. A dense one sends all soon.
    return ErrorFeedback(codec, beta=SPARSE_BETA if codec.is_sparse else 1.0)


def warn_of_momentum(codec: Codec, outer: torch.optim.Optimizer) -> None:
    """Log a warning if an outer optimizer has momentum beside the residual of a sparse codec."""
    if codec.is_sparse and any(group.get("momentum") for group in outer.param_groups):
        logger.warning(
            "the outer optimizer has momentum, and the codec %s keeps what it leaves out: together they overshoot, and"
            " training may diverge. Use p2pavg.optim.sparseloco, or momentum=0 and a rate of 2",
            codec.name,
        )


def _as_given(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shaped = values.view(like.shape)
    if like.dtype != torch.float32:
        largest = torch.finfo(like.dtype).max
        shaped = shaped.clamp(-largest, largest)  # float16 would turn a larger value into infinity
    return shaped.to(device=like.device, dtype=like.dtype)


def _check_same(before: Shapes, now: Shapes) -> None:
    if len(now) != len(before):
        raise ValueError(f"{len(now)} tensors were given, {len(before)} before")
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        if new != old:
            raise ValueError(f"tensor {position} has shape {new}, before it had {old}")


def _check_values(total: torch.Tensor, sizes: list[int]) -> None:
    # Minimum and maximum propagate NaN, which fails the comparison.
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
