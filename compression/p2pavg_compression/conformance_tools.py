"""Helpers of the conformance suite: sample vectors, and assertions without a test framework."""

from collections.abc import Callable

import torch

from .codec import MAX_MAGNITUDE, Codec

__all__ = ["lengths", "raises", "require", "require_vector", "same_bits", "sample"]


def sample(elements: int, seed: int = 0) -> torch.Tensor:
    """Return a reproducible float32 vector (elements,) over many orders of magnitude; every seventh is zero."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    normal = torch.randn(2, elements, dtype=torch.float32, generator=generator, device="cpu")
    values = normal[0] * torch.exp(2 * normal[1])
    values[::7] = 0.0
    return values


def lengths(codec: Codec) -> tuple[int, ...]:
    """Return vector lengths: no element, one, less than a block, whole blocks, a short last block."""
    step = codec.granularity
    return tuple(
        sorted({0, 1, 2, max(step - 1, 1), step, step + 1, 3 * step, 5 * step + (step + 1) // 2, 1000})
    )


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless `condition` holds. Unlike `assert`, it also works under `python -O`."""
    if not condition:
        raise AssertionError(message)


def raises(error: type[Exception], what: str, call: Callable[..., object], *args: object) -> None:
    """Require that `call(*args)` raises `error`. Other exceptions propagate."""
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"{what} did not raise {error.__name__}")


def require_vector(decoded: torch.Tensor, elements: int) -> None:
    """Require that a decoded vector is float32 (elements,), on the CPU, and within MAX_MAGNITUDE."""
    require(decoded.dtype is torch.float32, f"decoded numbers are {decoded.dtype}, not float32")
    require(decoded.shape == (elements,), f"decoded shape is {tuple(decoded.shape)}, expected ({elements},)")
    require(decoded.device.type == "cpu", f"decoded numbers are on {decoded.device}, not on the CPU")
    in_bounds = bool((decoded.abs() <= MAX_MAGNITUDE).all())
    require(in_bounds, "decoded numbers are not all finite and within MAX_MAGNITUDE")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two float32 vectors agree in every bit, including the signs of zeros."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
