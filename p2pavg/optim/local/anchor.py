"""The anchor of local updates: the parameters after the last outer step, and the outer optimizer that steps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from p2pavg.optim.base.recipe import Settings, hyperparameters
from p2pavg.optim.local.local_options import Fragment, Piece, elements_in
from p2pavg.optim.local.outer import AutoSGD, NormOf
from p2pavg.optim.ranks.shards import local_of

Outer = Callable[[list[torch.Tensor]], Optimizer]
"""Factory of the outer optimizer for the anchor's tensors, e.g. ``functools.partial(torch.optim.SGD, lr=1.0)``."""
Change = Callable[[Sequence[torch.Tensor], Optimizer], None]
"""Steps an optimizer of these tensors."""


class Anchor:
    """Float32 copies of the parameters after the last outer step, the same bits for all peers.

    It is stepped fragment by fragment: the outer optimizer has a tensor for each *piece* of a fragment, a view of the
    copy of a parameter, or of a range of its elements. With one fragment the pieces are the copies themselves.

    Args:
        parameters: this peer's parameters, which its inner steps move away from the anchor.
        outer: factory of the outer optimizer.
        fragments: of the parameters; see :func:`~p2pavg.optim.local.local_options.fragments_of`.
        offload: keep the copies, and so the outer optimizer's state, in the memory of the CPU.

    Raises:
        ValueError: ``outer`` makes an optimizer of other tensors than it is given.
    """

    @torch.no_grad()
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        outer: Outer,
        fragments: Sequence[Fragment],
        *,
        offload: bool = False,
    ) -> None:
        if isinstance(outer, Optimizer) or not callable(outer):
            raise TypeError(
                "outer must be a function that makes an optimizer of a list of tensors, such as lambda tensors:"
                f" torch.optim.SGD(tensors, lr=0.7), got {type(outer).__name__}"
            )
        self._parameters = parameters
        self._fragments = fragments
        self.tensors = [_copy_of(local_of(parameter), offload=offload) for parameter in parameters]
        """In the order of the parameters."""
        self._pieces = [[_piece_of(self.tensors[p.position], p) for p in fragment] for fragment in fragments]
        given = [piece for pieces in self._pieces for piece in pieces]
        with torch.enable_grad():
            self.optimizer = outer(given)
        if not isinstance(self.optimizer, Optimizer) or isinstance(self.optimizer, torch.optim.LBFGS):
            made = type(self.optimizer).__name__
            raise TypeError(f"outer must make a torch.optim.Optimizer that needs no closure, got {made}")
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if [id(tensor) for tensor in stepped] != [id(tensor) for tensor in given]:
            raise ValueError("outer must make an optimizer of exactly the tensors that it is given")
        self._length = max(elements_in(fragment) for fragment in fragments)

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return len(self._fragments)

    @property
    def numbers(self) -> Settings:
        """The outer optimizer's present hyperparameters."""
        return hyperparameters(self.optimizer)

    @property
    def rate(self) -> float | None:
        """The rate of the last outer step, or of the next one if the rate is fixed; ``None`` if there is none."""
        if isinstance(self.optimizer, AutoSGD):
            return self.optimizer.rate
        rate = self.optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes, dtypes and devices of what is averaged; their values mean nothing."""
        if self.fragments == 1:
            return self.tensors
        return [torch.zeros(1, device=self._device, dtype=torch.float32).expand(self._length)]

    @property
    def _device(self) -> torch.device:
        devices = {tensor.device for tensor in self.tensors}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    # ------------------------------------------------------------------ the whole anchor

    @torch.no_grad()
    def take(self) -> None:
        """Set the anchor to the present parameters."""
        for anchor, parameter in zip(self.tensors, self._parameters, strict=True):
            anchor.copy_(local_of(parameter))

    @torch.no_grad()
    def give(self) -> None:
        """Set the parameters to the anchor."""
        for parameter, anchor in zip(self._parameters, self.tensors, strict=True):
            local_of(parameter).copy_(anchor)

    @torch.no_grad()
    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the anchor to saved tensors; raise ValueError as :meth:`check`."""
        self.check(tensors)
        for anchor, saved in zip(self.tensors, tensors, strict=True):
            anchor.copy_(saved)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if saved tensors have other shapes than the parameters."""
        if [tuple(t.shape) for t in tensors] != [tuple(t.shape) for t in self.tensors]:
            raise ValueError("state: its anchor is of other parameters")

    @torch.no_grad()
    def pull(self, strength: float) -> None:
        """Add ``strength * (parameter - anchor)`` to each gradient."""
        if not strength:
            return
        for parameter, anchor in zip(self._parameters, self.tensors, strict=True):
            if parameter.grad is not None:
                local, gradient = local_of(parameter), local_of(parameter.grad)
                away = local.float() - anchor.to(local.device)
                gradient.add_(away.to(gradient.dtype), alpha=strength)

    # ------------------------------------------------------------------ one fragment

    @torch.no_grad()
    def away(self, fragment: int) -> list[torch.Tensor]:
        """Return anchor - parameters of each piece, float32: the pseudo-gradients."""
        # Relative to the anchor in the parameters' dtype: its rounding error is not progress.
        return [
            anchor.to(parameter.dtype).float() - parameter.to(anchor.device).float()
            for anchor, parameter in zip(self._pieces[fragment], self._present(fragment), strict=True)
        ]

    @torch.no_grad()
    def copy(self, fragment: int) -> list[torch.Tensor]:
        """Return a copy of the present parameters of each piece, on the anchor's device."""
        return [
            parameter.to(anchor.device, copy=True)
            for anchor, parameter in zip(self._pieces[fragment], self._present(fragment), strict=True)
        ]

    @torch.no_grad()
    def since(self, fragment: int, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a :meth:`copy` minus the present parameters, float32."""
        return [
            old.float() - parameter.to(old.device).float()
            for old, parameter in zip(before, self._present(fragment), strict=True)
        ]

    def contribution(self, fragment: int) -> list[torch.Tensor]:
        """Return the pseudo-gradients of a fragment as they are averaged.

        With several fragments they are one vector, which is as long as the longest fragment.
        """
        away = self.away(fragment)
        if self.fragments == 1:
            return away
        vector = torch.zeros(self._length, device=self._device, dtype=torch.float32)
        at = 0
        for piece in away:
            vector[at : at + piece.numel()].copy_(piece.reshape(-1))
            at += piece.numel()
        return [vector]

    def step(self, fragment: int, averaged: Sequence[torch.Tensor], change: Change, norm_of: NormOf) -> float:
        """Take a fragment's outer step with an average as the gradient; return the average's L2 norm.

        Args:
            averaged: with the shapes of :attr:`like`.
            change: steps the outer optimizer.
            norm_of: returns the norm of tensors, over all ranks of this peer.
        """
        pieces = self._pieces[fragment]
        gradients = list(averaged)
        if self.fragments > 1:
            sizes = [piece.numel() for piece in pieces]
            cut = torch.split(averaged[0][: sum(sizes)], sizes)
            gradients = [
                gradient.view(piece.shape).to(piece.device)
                for gradient, piece in zip(cut, pieces, strict=True)
            ]
        for piece, gradient in zip(pieces, gradients, strict=True):
            piece.grad = gradient
        norm = norm_of(gradients)
        if isinstance(self.optimizer, AutoSGD):
            self.optimizer.norm_of = norm_of  # the rate is that of all ranks, which hold parts of the tensors
        change(pieces, self.optimizer)
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def settle(self, fragment: int, away: Sequence[torch.Tensor]) -> None:
        """Set a fragment's parameters to the anchor minus pseudo-gradients; to the anchor itself if there are none."""
        for index, (piece, anchor) in enumerate(
            zip(self._fragments[fragment], self._pieces[fragment], strict=True)
        ):
            self._put(piece, anchor - away[index] if away else anchor)

    @torch.no_grad()
    def mix(self, fragment: int, share: float) -> None:
        """Set a fragment's parameters to ``share * parameters + (1 - share) * anchor``."""
        pieces = zip(self._fragments[fragment], self._pieces[fragment], self._present(fragment), strict=True)
        for piece, anchor, parameter in pieces:
            self._put(piece, torch.lerp(anchor, parameter.to(anchor.device).float(), share))

    def _present(self, fragment: int) -> list[torch.Tensor]:
        """Return the present parameters of each piece; some may be copies."""
        return [_piece_of(local_of(self._parameters[p.position]), p) for p in self._fragments[fragment]]

    def _put(self, piece: Piece, values: torch.Tensor) -> None:
        """Set the parameters of a piece."""
        parameter = local_of(self._parameters[piece.position])
        if values.shape == parameter.shape:
            parameter.copy_(values)
        elif parameter.is_contiguous():
            parameter.view(-1)[piece.start : piece.stop].copy_(values)
        else:
            flat = parameter.reshape(-1)  # a copy in the order of the anchor's memory
            flat[piece.start : piece.stop] = values.to(flat)
            parameter.copy_(flat.view(parameter.shape))


def _copy_of(parameter: torch.Tensor, *, offload: bool) -> torch.Tensor:
    """Return a float32 copy whose elements lie in the order of the indices."""
    shape, device = parameter.shape, torch.device("cpu") if offload else parameter.device
    pinned = offload and parameter.is_cuda  # the copies from and to the device are then direct
    copy = torch.empty(shape, dtype=torch.float32, device=device, pin_memory=pinned)
    return copy.copy_(parameter.detach())


def _piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of a tensor: the tensor itself if it is whole, and else a flat view, or a copy if none can be."""
    if (piece.start, piece.stop) == (0, math.prod(tensor.shape)):
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().reshape(-1)[piece.start : piece.stop]
