"""Comparison of a received state with the model that shall take it. No I/O, no clock.

A state may come from strangers, or from an older version of the model. Everything is checked here before any tensor of
the model changes, and an error says which tensor is wrong and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from p2pavg.base.errors import StateError
from p2pavg.state.layout import Spec
from p2pavg.state.snapshot import Content

EXTRA_ELEMENTS = 2**20  # of a tensor of an optimizer, beyond those of the model's largest tensor
NAMED = 3  # tensors that an error names of each kind
_BLOCK = 2**20  # elements that are converted at a time
_KINDS = {"parameter": "parameter", "anchor": "parameter", "buffer": "buffer"}


def check(
    content: Content, expected: Mapping[str, Spec], *, others: Sequence[str] = (), others_bytes: int = 0
) -> None:
    """Check that a state is one of this model, and that all of its numbers are finite.

    Args:
        expected: dtype and shape of each tensor that the state must have, such as ``parameter/head.bias``.
        others: prefixes of the names of other tensors that it may have, such as ``optimizer/``. Each has at most
            :data:`EXTRA_ELEMENTS` more elements than the largest expected one.
        others_bytes: the most that these tensors have together, in bytes.

    Raises:
        StateError: the state cannot be used; the message names up to three tensors of each kind of mistake.
    """
    found = content.tensors
    allowed = tuple(others)
    unknown = [name for name in found if name not in expected and not (allowed and name.startswith(allowed))]
    both = {name: (spec, Spec.of(found[name])) for name, spec in expected.items() if name in found}
    missing = {name: spec for name, spec in expected.items() if name not in found}
    mistakes = [
        *_one_sided("this model has", "the state lacks", missing),
        *_one_sided("the state has", "this model lacks", {name: Spec.of(found[name]) for name in unknown}),
    ]
    shapes = [
        f"{_named(name)} has the shape {own.shape} in this model and {other.shape} in the state"
        for name, (own, other) in both.items()
        if own.shape != other.shape
    ]
    if shapes:
        mistakes.append(f"{_listed(shapes)}: build this peer's model with the sizes that the run trains")
    dtypes = [
        f"{_named(name)} is {_short(own.dtype)} in this model and {_short(other.dtype)} in the state"
        for name, (own, other) in both.items()
        if own.dtype is not other.dtype
    ]
    if dtypes:
        mistakes.append(f"{_listed(dtypes)}: convert this peer's model to the dtypes that the run trains")
    if mistakes:
        raise StateError(". ".join(mistakes))
    _check_others({name: Spec.of(found[name]) for name in found.keys() - expected}, expected, others_bytes)
    if broken := [name for name, tensor in found.items() if not is_finite(tensor)]:
        raise StateError(
            f"NaN or infinite values are in {_listed(map(_named, broken))} of the state: "
            "the run has diverged, or the peer that gave the state has a fault. "
            "Take the state of another peer, or an older checkpoint"
        )


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity: one pass, without memory of the tensor's size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize > 1:
        return _is_finite(tensor)
    # torch has no minimum of the types of 8 bits.
    flat = tensor.reshape(-1)
    blocks = (flat[begin : begin + _BLOCK] for begin in range(0, flat.numel(), _BLOCK))
    return all(_is_finite(block.to(torch.float32)) for block in blocks)


def _is_finite(tensor: torch.Tensor) -> bool:
    lowest, highest = torch.aminmax(tensor)  # NaN is passed on
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())


def _one_sided(has: str, lacks: str, specs: Mapping[str, Spec]) -> list[str]:
    """Return the sentence on tensors that only the model or only the state has; none if there are no such tensors."""
    if not specs:
        return []
    return [
        f"{has} {_listed(f'{_a(name)} of shape {spec.shape}' for name, spec in specs.items())} "
        f"that {lacks}: the state was saved with another version of the model. "
        "Start this peer with the version that the run trains"
    ]


def _check_others(others: Mapping[str, Spec], expected: Mapping[str, Spec], most_bytes: int) -> None:
    most = max((spec.elements for spec in expected.values()), default=0) + EXTRA_ELEMENTS
    for name, spec in others.items():
        if spec.elements > most:
            raise StateError(
                f"the tensor {name!r} of the state has {spec.elements} elements; {most} is the most, "
                "which follows from this model's largest tensor"
            )
    total = sum(spec.nbytes for spec in others.values())
    if total > most_bytes:
        raise StateError(
            f"the state has {total} bytes besides the model's own tensors, {most_bytes} is the most"
        )


def _listed(items: Iterable[str]) -> str:
    named = list(items)
    more = len(named) - NAMED
    return ", ".join(named[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _split(name: str) -> tuple[str, str]:
    prefix, _, rest = name.partition("/")
    return (_KINDS[prefix], rest) if prefix in _KINDS and rest else ("tensor", name)


def _a(name: str) -> str:
    kind, own_name = _split(name)
    return f"a {kind} {own_name!r}"


def _named(name: str) -> str:
    kind, own_name = _split(name)
    return f"the {kind} {own_name!r}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
