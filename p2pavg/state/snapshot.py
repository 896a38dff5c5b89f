"""Snapshots: tensors and plain values as the bytes of a canonical safetensors file, and back. No I/O, no clock.

The same content gives the same bytes in every process, so the digests of the bytes name the content. The plain values
are one entry of the file's metadata.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from p2pavg.base.errors import StateError
from p2pavg.net.transport import Buffer
from p2pavg.state.layout import MAX_TENSORS, Layout, Spec, read_header, write_header
from p2pavg.state.values import MAX_VALUES_BYTES, pack_values, unpack_values
from p2pavg_compression.codec import read_only_bytes

VALUES_KEY = "p2pavg-values-2"
"""The entry of the metadata with the plain values: base64 of their canonical bytes."""
FORMER_VALUES_KEY = "p2pavg-values-1"
"""The same entry in files of version 0.2, whose values refer to every tensor. They are read, and no more written.
Version 0.2 would read the values of today as a state without tensors; the other name makes it refuse them."""


@dataclass(frozen=True)
class Content:
    """Content of a state."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name, on any device."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """None, bool, int, float, str, bytes, and lists, tuples and dicts of them, whose keys are str or int."""


@torch.no_grad()
def copy_of(content: Content) -> memoryview:
    """Return the content as the bytes of a file, in memory of its own.

    Each tensor is copied once, from wherever it is; no other work of its size is done. So training can go on while
    the bytes are hashed and sent.

    Raises:
        StateError: a tensor or a value cannot be saved; the message names it.
    """
    specs = specs_of(content.tensors)
    header, layout = write_header(specs, {VALUES_KEY: values_text(content.values)})
    # Unlike bytearray(size), numpy does not write zeros first; unlike torch, it asks for large pages.
    buffer = np.empty(layout.size, dtype=np.uint8)
    buffer[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    data = torch.from_numpy(buffer)
    for name, spec, begin in layout.places():
        _typed(data, spec, begin).copy_(content.tensors[name])
    return buffer.data


def read(buffer: Buffer, *, max_tensors: int = MAX_TENSORS) -> Content:
    """Return the content of a snapshot from any source.

    The tensors are views of the buffer: nothing of their size is allocated. Do not write to them.

    Raises:
        StateError: the bytes are no snapshot; the message says why.
    """
    layout = read_header(buffer, max_tensors=max_tensors)
    if len(layout.metadata) != 1:
        raise StateError(f"it is no snapshot: its metadata lack {VALUES_KEY!r}, or have more")
    return Content(tensors_in(buffer, layout), values_of(layout.metadata))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Return the dtypes and shapes of tensors that are to be saved.

    Raises:
        StateError: one is no dense tensor with data; the message names it.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise StateError(f"a tensor's name must be text, got {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise StateError(f"the tensor {name!r} is sparse or quantized, which cannot be saved")
        if tensor.is_meta:
            raise StateError(f"the tensor {name!r} is on the device 'meta' and has no data")
    return {name: Spec.of(tensor) for name, tensor in tensors.items()}


def values_text(values: Mapping[str, Any]) -> str:
    """Return plain values as the text of the entry :data:`VALUES_KEY`.

    Raises:
        StateError: a value cannot be saved; the message has its path.
    """
    return base64.b64encode(pack_values(values)).decode("ascii")


def values_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the plain values of a file, of this version or of 0.2, from its metadata.

    Raises:
        StateError: it has none, or they are not the canonical ones of any values.
    """
    text = metadata.get(VALUES_KEY, metadata.get(FORMER_VALUES_KEY))
    if text is None:
        raise StateError(f"it is no snapshot and no checkpoint: its metadata lack {VALUES_KEY!r}")
    if len(text) > MAX_VALUES_BYTES // 3 * 4 + 4:
        raise StateError(f"its values have {len(text)} characters, which is too long")
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise StateError("its values are no base64") from None
    if base64.b64encode(packed).decode("ascii") != text:
        raise StateError("its values are not in their canonical form")
    return unpack_values(packed)


def tensors_in(buffer: Buffer, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of a file as views of its bytes.

    Raises:
        StateError: the bytes of a tensor are no values of its dtype.
    """
    data = read_only_bytes(buffer)
    tensors = {name: _typed(data, spec, begin) for name, spec, begin in layout.places()}
    for name, tensor in tensors.items():
        # torch takes it for granted that a bool is 0 or 1, and does anything with other bytes.
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise StateError(f"the tensor {name!r} has bytes that are neither true nor false")
    return tensors


def _typed(data: torch.Tensor, spec: Spec, begin: int) -> torch.Tensor:
    if not spec.elements:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    return data[begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)
