"""Copies from the memory of a GPU to a payload in host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["copy_to_host", "default_stream"]


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Run the block on the default stream of `device`, after the work that is queued on the current stream.

    bitsandbytes launches its quantization kernels on the legacy default stream, whatever the current stream
    is. torch's other streams do not wait for that one. When the block ends, even by an error, the device has
    finished. So no kernel still reads memory that the caller may free on its own stream.
    """
    stream = torch.cuda.default_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` (contiguous, on a GPU) into the bytes `target` (uint8, CPU), and wait for the end.

    The copy goes through pinned memory, to which the GPU writes without another copy by the driver. torch
    caches pinned blocks, so only the first copy of each size pays for pinning.
    """
    staging = torch.empty(target.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
    staging.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
    torch.cuda.current_stream(source.device).synchronize()
    target.copy_(staging)
