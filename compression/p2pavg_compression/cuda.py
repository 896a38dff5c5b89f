"""From the memory of a GPU to a payload in host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["copy_to_host", "default_stream"]


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on the default stream of `device`, after all that the current stream has been given.

    bitsandbytes launches its quantization kernels on the legacy default stream whatever the current stream
    is, and torch's other streams do not wait for that one. On return the device has finished, also after an
    error, so that nothing still reads memory which the caller may free on its own stream.
    """
    stream = torch.cuda.default_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` (contiguous, on a GPU) into the bytes `target` (uint8, CPU), and wait for it.

    It goes through pinned memory, which the GPU reads and writes without a copy by the driver. torch caches
    pinned blocks, so that only the first copy of a size pays for pinning.
    """
    staging = torch.empty(target.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
    staging.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
    torch.cuda.current_stream(source.device).synchronize()
    target.copy_(staging)
