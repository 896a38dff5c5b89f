"""Helpers: tensors of several shapes, and the vector that they form."""

from __future__ import annotations

import torch

from p2pavg.optim import ErrorFeedback
from p2pavg_compression import Codec

SHAPES = [(30, 7), (5,), (), (0, 3), (2, 1, 400)]
ELEMENTS = 1016
NO_SHARE = (0, 0)


def tensors(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def flat(of: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in of])


def residual_of(feedback: ErrorFeedback) -> torch.Tensor:
    residual = feedback.state_dict()["residual"]
    assert residual is not None
    return residual


def residual_norm(feedback: ErrorFeedback) -> float:
    """Return the length of the residual in the tensors' units; 0 before the first delivery."""
    residual = feedback.state_dict()["residual"]
    return 0.0 if residual is None else float(torch.linalg.vector_norm(residual, dtype=torch.float64))


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.numel())


def contribute(
    feedback: ErrorFeedback, given: list[torch.Tensor], share: tuple[int, int] = NO_SHARE
) -> list[torch.Tensor]:
    """Contribute to a round that succeeds; return the contribution."""
    contributed = feedback.compensate(given)
    feedback.delivered(*share)
    return contributed


def averaged(
    codec: Codec, contributed: list[torch.Tensor], share: tuple[int, int] = NO_SHARE
) -> torch.Tensor:
    """Return a contribution as it is averaged: decoded by the others, unencoded in the peer's own share."""
    sent = flat(contributed)
    counted = there_and_back(codec, sent).clone()
    counted[slice(*share)] = sent[slice(*share)]
    return counted
