"""The number of samples of a batch, for frameworks that call ``step`` themselves. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def batch_size_of(batch: object) -> int:
    """Return the number of samples of a batch: the length of its first tensor that has one.

    Args:
        batch: a tensor, or tensors in mappings, tuples and lists, also nested.

    Raises:
        ValueError: there is no such tensor.
    """
    found = _first_length(batch)
    if found is None:
        raise ValueError(
            f"the number of samples of a {type(batch).__name__} is not known: it has no tensor with a first dimension."
            " Give the optimizer batch_size= or samples_of="
        )
    return found


def _first_length(batch: object) -> int | None:
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((found for part in parts if (found := _first_length(part)) is not None), None)


class SampleCounter:
    """Counts the samples that a model is trained on, by its calls in training mode with gradients.

    Give its method :meth:`take` to an optimizer as ``samples_of=``. It counts each call of the model, so a loop that
    calls the model several times for a batch needs ``batch_size=`` instead.

    Args:
        model: the module that the loop calls.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._samples = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def take(self) -> int:
        """Return the number of samples since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()

    def _count(self, model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if model.training and torch.is_grad_enabled():
            self._samples += batch_size_of([*args, kwargs])
