"""Open files, memory and GPU. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.tools.doctor.findings import Finding, fault, not_known, note, ok, warning

FEW_FILES = 256
"""With fewer open files, a peer holds some dozens of connections, and a DataLoader with workers may find no room."""
LITTLE_MEMORY = 512 * 2**20  # bytes; torch and a transport need about this much before the first vector

VECTORS_OF_A_ROUND = 3
"""Vectors of fp32 that a round needs beside the model: accumulator, result, and about one in encoded form."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The GPU as torch and the operating system see it."""

    torch: str
    """Version of torch."""
    built_for: str | None
    """Version of CUDA for which torch was built; ``None`` for a build without CUDA."""
    available: bool
    names: tuple[str, ...] = ()
    driver: bool = False
    """True if the system has a driver of NVIDIA."""
    bitsandbytes: str = ""
    """The error with which bitsandbytes could not be imported; empty if it could, or was not tried."""


def judge_open_files(hard: int | None, wanted: int) -> list[Finding]:
    """Judge the limit of open files.

    Args:
        hard: the hard limit, to which a peer raises its soft limit; ``None`` without a limit.
        wanted: files that a peer with all its connections, and the program around it, may open.
    """
    if hard is None:
        return [ok("open files", "no limit")]
    if hard >= wanted:
        return [ok("open files", f"{hard} may be open")]
    what = f"this process may open {hard} files"
    remedy = f"raise the hard limit to {wanted}: `ulimit -Hn {wanted}`, LimitNOFILE in a unit of systemd, or --ulimit"
    if hard < FEW_FILES:
        return [
            fault("open files", what, f"the hard limit is too low: a peer needs {FEW_FILES} at least", remedy)
        ]
    cause = f"the hard limit is below the {wanted} of a peer with all its connections, so it holds fewer"
    return [warning("open files", what, cause, remedy)]


def judge_memory(available: int, elements: int) -> list[Finding]:
    """Judge the free memory.

    Args:
        available: bytes that processes can still take.
        elements: length of the longest vector that the run averages; 0 if it is not known.
    """
    needed = LITTLE_MEMORY + VECTORS_OF_A_ROUND * 4 * elements
    what = f"{available / _GIB:.1f} GiB are free"
    if available >= needed:
        return [ok("memory", what)]
    if elements:
        cause = f"a round of {elements} elements needs about {needed / _GIB:.1f} GiB beside the model"
    else:
        cause = f"a peer needs about {needed / _GIB:.1f} GiB before its first round"
    return [fault("memory", what, cause, "end other programs, or take a machine with more memory")]


def judge_gpu(gpu: Gpu) -> list[Finding]:
    """Judge the GPU, and whether bitsandbytes can use it."""
    if gpu.available:
        return [_judge_bitsandbytes(gpu)]
    if not gpu.driver:
        return [note("gpu", "no GPU of NVIDIA", "torch and the system name none; averaging works on the CPU")]
    what = "torch does not use the GPU of this machine"
    if gpu.built_for is None:
        return [
            warning(
                "gpu",
                what,
                f"torch {gpu.torch} was built without CUDA",
                "install a build of torch with CUDA: https://pytorch.org/get-started/locally",
            )
        ]
    return [
        warning(
            "gpu",
            what,
            f"torch {gpu.torch} was built for CUDA {gpu.built_for} and finds no device: "
            "the driver is too old, or CUDA_VISIBLE_DEVICES hides the device",
            "run nvidia-smi, update the driver, and look at CUDA_VISIBLE_DEVICES",
        )
    ]


def _judge_bitsandbytes(gpu: Gpu) -> Finding:
    names = ", ".join(dict.fromkeys(gpu.names)) or "a GPU"
    if not gpu.bitsandbytes:
        return ok("gpu", f"{names}; bitsandbytes can be used")
    return fault(
        "gpu",
        f"{names}; bitsandbytes cannot be used, so tensors on the GPU cannot be averaged with blockwise8",
        f"importing it failed: {gpu.bitsandbytes}",
        "install a bitsandbytes for this version of CUDA, or choose another codec, such as fp16",
    )


def gpu_not_known(seconds: float) -> list[Finding]:
    """Return the finding for a GPU that did not answer in time."""
    return [not_known("gpu", f"torch and bitsandbytes did not answer within {seconds:.0f} s")]
