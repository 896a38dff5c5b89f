"""Views of bytes as tensors, without copies, and checks of a caller's arguments."""

from typing import Any

import numpy as np
import torch

from .codec import BytesLike

__all__ = ["CPU", "check_flat", "read_only_bytes", "typed", "writable_bytes"]

CPU = torch.device("cpu")


class _SharedMemory:
    """Exposes a buffer to numpy as writable, even if it is read-only.

    torch warns once in each process when it wraps read-only memory, and the warning cannot be switched off.
    Nothing here writes to a tensor made from a payload, so the warning would be noise. The array keeps this
    object alive, and this object keeps the buffer alive.
    """

    __slots__ = ("__array_interface__", "buffer")

    def __init__(self, buffer: memoryview) -> None:
        address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
        self.buffer = buffer
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def read_only_bytes(payload: BytesLike) -> torch.Tensor:
    """Return `payload` as a uint8 tensor (nbytes,) that shares its memory. Do not write to the tensor.

    Raises ValueError if `payload` is not contiguous.
    """
    view = _flat_view(payload, "payload")
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=CPU)
    return torch.from_numpy(np.asarray(_SharedMemory(view)))


def writable_bytes(out: memoryview | bytearray | None, nbytes: int) -> memoryview:
    """Return `out` as a flat view of bytes, or a new buffer of `nbytes` bytes.

    Raises ValueError if `out` is read-only, not contiguous or not `nbytes` bytes long.
    """
    if out is None:
        # Unlike bytearray(nbytes), numpy does not write zeros first.
        return np.empty(nbytes, dtype=np.uint8).data
    view = _flat_view(out, "out")
    if view.readonly:
        raise ValueError("out is read-only")
    if view.nbytes != nbytes:
        raise ValueError(f"out has {view.nbytes} bytes, the payload needs exactly {nbytes}")
    return view


def _flat_view(buffer: BytesLike, argument: str) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{argument} is not contiguous")
    if view.nbytes == 0:
        # memoryview.cast refuses shapes with a zero in them.
        return memoryview(b"") if view.readonly else memoryview(bytearray())
    return view.cast("B")


def typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes `raw` (uint8, 1-D) as numbers of `dtype`: a view, or a copy if they are not aligned."""
    return (raw if is_aligned(raw, dtype) else raw.clone()).view(dtype)


def is_aligned(raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the address of `raw` is aligned for numbers of `dtype`."""
    return raw.data_ptr() % dtype.itemsize == 0


def check_flat(tensor: torch.Tensor, argument: str, *, cuda: bool = False) -> None:
    """Raise ValueError unless `tensor` is float32, 1-D, contiguous, and on the CPU (or on a GPU, with `cuda`)."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(tensor).__name__}")  # noqa: TRY004 - as documented
    if tensor.dtype is not torch.float32:
        raise ValueError(f"{argument} must be float32, got {tensor.dtype}")
    if tensor.device.type not in (("cpu", "cuda") if cuda else ("cpu",)):
        where = "the CPU or a CUDA device" if cuda else "the CPU"
        raise ValueError(f"{argument} must be on {where}, is on {tensor.device}")
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{argument} must be one-dimensional and contiguous, has shape {tuple(tensor.shape)}"
        )
