"""Contents of states: one of every dtype, and hypothesis strategies."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from hypothesis import strategies as st

from p2pavg.state.layout import DTYPES
from p2pavg.state.snapshot import Content


def of_every_dtype() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype, of shapes with and without elements, contiguous and not."""
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype).T for name, dtype in DTYPES.items()}
    tensors |= {f"one/{name}": torch.ones((), dtype=dtype) for name, dtype in DTYPES.items()}
    tensors |= {f"none/{name}": torch.empty((0, 4), dtype=dtype) for name, dtype in DTYPES.items()}
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    return one.dtype is other.dtype and one.shape == other.shape and raw(one) == raw(other)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, with equal types, and floats and tensors to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other)
    if type(one) is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def same_content(one: Content, other: Content) -> bool:
    """Return whether two contents have the same tensors and values."""
    return same(dict(one.tensors), dict(other.tensors)) and same(dict(one.values), dict(other.values))


integers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
names = st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
plain = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | texts | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts | integers, inner, max_size=4)
    ),
    max_leaves=10,
)
values = st.dictionaries(texts, plain, max_size=4)


@st.composite
def tensor(draw: st.DrawFn) -> torch.Tensor:
    """Draw a small tensor of any dtype, with any bits."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte % 2 for byte in data)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


contents = st.builds(Content, st.dictionaries(names, tensor(), max_size=5), values)
