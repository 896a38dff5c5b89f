"""Parameters and optimizer states that are not finite after an inner step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from p2pavg.optim.ranks.shards import local_of


@torch.no_grad()
def are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether all values of the parameters are finite."""
    # One pass and one synchronisation; minimum and maximum propagate NaN. On a CPU this takes a sixteenth of the time
    # of a maximum norm, which was most of the time of a step.
    extremes = [
        torch.stack(torch.aminmax(parameter.detach())).float()
        for parameter in parameters
        if parameter.numel()
    ]
    if not extremes:
        return True
    devices = {found.device for found in extremes}
    found = torch.stack(extremes if len(devices) <= 1 else [pair.cpu() for pair in extremes])
    return bool(found.isfinite().all())


def destroyed(labels: Sequence[str], parameters: Sequence[torch.Tensor]) -> str:
    """Return the name of the first parameter that is not finite, and the number of the others.

    Args:
        labels: names of the parameters; there may be more of them.
    """
    pairs = zip(labels, parameters, strict=False)
    names = [label for label, parameter in pairs if not bool(parameter.isfinite().all())]
    more = f", like {len(names) - 1} other parameters," if len(names) > 1 else ""
    return f"{names[0] if names else 'a parameter'}{more}"


@torch.no_grad()
def mend(optimizer: Optimizer, *, fills_at_first_step: bool) -> None:
    """Remove NaN and infinity from an optimizer's state.

    Args:
        fills_at_first_step: true if the optimizer makes its state at its first step, and not at construction.
    """
    wrong = [tensor for tensor in _tensors_of(optimizer) if not bool(tensor.isfinite().all())]
    if wrong and fills_at_first_step:
        optimizer.state.clear()  # as before its first step
        return
    for tensor in wrong:  # a state made at construction, e.g. Adagrad's, is not made again if cleared
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    kept = (value for state in optimizer.state.values() for value in state.values())
    tensors = [value for value in kept if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return [local_of(tensor) for tensor in tensors]
