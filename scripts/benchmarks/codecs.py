"""The codecs alone: MB of fp32 that one core encodes and decodes per second, and the error.

Normally distributed values are encoded part by part, as in an exchange. ``reduce`` is a reducer's work on a part: it
averages four contributions, of which one is its own and not encoded, encodes the average and decodes it.
``bitsandbytes`` is that library's own CPU code, with the same format and block size as ``blockwise8``. Where numba is
installed, ``torch`` after a codec's name means torch's expressions, which do its work until numba has compiled it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.shares import MAX_PART_ELEMENTS
from p2pavg_compression import Codec, resolve_codec
from p2pavg_compression.blocks import BlockCodec
from p2pavg_compression.kernels import kernels
from scripts.benchmarks.figures import Report

NAME = "codecs"
CODECS = "fp32,fp16,bf16,blockwise8,int8"
BLOCK = 64
REDUCED = 4
"""Contributions to a part."""
Parts = list[torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--parts", type=int, default=2 if small else 64, help="of 1 MiB of fp32 each")
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--repeats", type=int, default=2 if small else 7)
    parser.add_argument("--no-bitsandbytes", action="store_true", default=small, help="its import takes long")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure in turn, and report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(arguments.parts * MAX_PART_ELEMENTS, generator=generator)
        out = torch.empty_like(values)
        works: dict[str, Work] = {}
        for name in arguments.codecs.split(","):
            codec = resolve_codec(name)
            works[name] = of_codec(codec, values, out)
            if compile_now(codec):
                works[f"{name} torch"] = of_codec(codec, values, out, compiled=False)
        if not arguments.no_bitsandbytes:
            works["bitsandbytes"] = of_bitsandbytes(values, out)
        measure(works, values, out, arguments.repeats, report)
    finally:
        torch.set_num_threads(threads)


Work = dict[str, Callable[[], object]]
"""Functions by name; after all of them, ``out`` holds the decoded values."""


def compile_now(codec: Codec) -> bool:
    """Compile a codec's loops. Return whether it has any."""
    if not isinstance(codec, BlockCodec) or not codec.has_kernel:
        return False
    return kernels.wait(codec.kind, codec.agrees_with) is not None


def of_codec(codec: Codec, values: torch.Tensor, out: torch.Tensor, *, compiled: bool = True) -> Work:
    """Return the work of one of this project's codecs."""
    parts, outs = split(values), split(out)
    payloads = [bytearray(codec.encoded_nbytes(part.numel())) for part in parts]

    sums = torch.zeros(MAX_PART_ELEMENTS)

    def encode() -> None:
        kernels.switch(compiled)
        for part, payload in zip(parts, payloads, strict=True):
            codec.encode(part, payload)

    def decode() -> None:
        for target, payload in zip(outs, payloads, strict=True):
            codec.decode(payload, target.numel(), target)

    def accumulate() -> None:
        for part, payload in zip(parts, payloads, strict=True):
            codec.accumulate(payload, sums[: part.numel()], 0.25)

    encoded = bytearray(codec.encoded_nbytes(MAX_PART_ELEMENTS))
    buffers = Buffers(2 * 4 * MAX_PART_ELEMENTS)

    def reduce() -> None:
        for part, payload, target in zip(parts, payloads, outs, strict=True):
            others = [PartContribution(str(index), 1.0, payload) for index in range(REDUCED - 1)]
            average_part(
                codec,
                [PartContribution("own", 1.0, part), *others],
                float(REDUCED),
                target,
                buffers=buffers,
                payload=memoryview(encoded)[: codec.encoded_nbytes(part.numel())],
            )

    # In this order: a reduction needs payloads, and the error is that of decoding.
    return {"encode": encode, "accumulate": accumulate, "reduce": reduce, "decode": decode}


def of_bitsandbytes(values: torch.Tensor, out: torch.Tensor) -> Work:
    """Return the work of bitsandbytes' own functions."""
    from bitsandbytes import functional  # takes seconds

    parts, outs = split(values), split(out)
    encoded = [functional.quantize_blockwise(part, blocksize=BLOCK) for part in parts]

    def encode() -> None:
        encoded[:] = [functional.quantize_blockwise(part, blocksize=BLOCK) for part in parts]

    def decode() -> None:
        for target, (codes, state) in zip(outs, encoded, strict=True):
            target.copy_(functional.dequantize_blockwise(codes, state))

    return {"encode": encode, "decode": decode}


def split(values: torch.Tensor) -> Parts:
    """Return views of the parts."""
    return list(torch.split(values, MAX_PART_ELEMENTS))


def measure(
    works: dict[str, Work], values: torch.Tensor, out: torch.Tensor, repeats: int, report: Report
) -> None:
    """Run each codec once as a warm-up, then all in turn, repeatedly."""
    rates: dict[tuple[str, str], list[float]] = {}
    errors: dict[str, float] = {}
    for number in range(repeats + 1):
        for name, work in works.items():
            for figure, function in work.items():
                began = time.perf_counter()
                function()
                rate = values.nbytes / 1e6 / (time.perf_counter() - began)
                if number:
                    rates.setdefault((name, figure), []).append(rate)
            errors[name] = float((out - values).norm() / values.norm())
    for (name, figure), found in rates.items():
        report.figure(NAME, figure, "MB/s", found, system=name)
    for name, error in errors.items():
        report.figure(NAME, "error", "relative L2", [error], system=name)
