"""Compiled loops, in place of torch's expressions, where numba is installed (the extra `numba`).

They give the same bits in half to a third of the time: see `loops.py`. Importing numba takes a second or two, and
compiling several, which numba saves to a cache on the disk. So a thread does it in the background, once this process
has encoded and decoded enough to gain from it. Torch's expressions do the work until then, and for good if something
fails. Because both give the same bits, the moment of the change does not matter. The thread compares the two on this
host before it offers a kernel, since torch has different code for each kind of processor.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from .codec import CPU

# The signed dynamic 8-bit data type, and the tables that encode and decode it.
#
# Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (2022), section
# 1.3, and Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016). There are 256 levels in [-1, 1].
# Each decade has half as many levels as the decade above it: 64, 32, ... 1, over seven decades and both signs, and 0
# and 1 beside them. So small numbers keep their magnitude, and large numbers their precision.

_DECADES = 7


def dynamic_levels() -> NDArray[np.float32]:
    """Return the 256 levels in ascending order, float32 (256,).

    On hosts where torch uses AVX2 or better, they equal `bitsandbytes.functional.create_dynamic_map()` bit for
    bit. On other hosts, the levels of bitsandbytes differ by up to two units in the last place, because
    torch.linspace rounds differently without a fused multiply-add. Peers must decode to the same bits, so this
    function computes the fused rounding explicitly.
    """
    levels = [np.float32(0.0), np.float32(1.0)]
    for decade in range(_DECADES):
        edges = _linspace_from_tenth_to_one(2**decade + 1)
        centers = (edges[:-1] + edges[1:]) / np.float32(2.0)
        magnitudes = np.float32(10.0 ** (decade - _DECADES + 1)) * centers
        levels.extend((*magnitudes, *-magnitudes))
    return np.array(sorted(levels), dtype=np.float32)


def _linspace_from_tenth_to_one(steps: int) -> NDArray[np.float32]:
    """Return torch.linspace(0.1, 1, steps) as with a fused multiply-add. Each half counts from its own end.

    float64 holds the product and the sum exactly (24 bits times at most 6, over few binades). So the
    conversion to float32 is the only rounding.
    """
    first, last = np.float32(0.1), np.float32(1.0)
    step = np.float64((last - first) / np.float32(steps - 1))
    index = np.arange(steps)
    rising = np.float64(first) + step * index
    falling = np.float64(last) - step * (steps - 1 - index)
    return np.where(index < steps // 2, rising, falling).astype(np.float32)


def codes_of_halves(levels: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the code of the nearest of ascending levels for each of the 65,536 half-precision numbers.

    NaN counts as 0.
    """
    halves = np.arange(65_536, dtype=np.uint16).view(np.float16).astype(np.float64)
    # The mean of two float32 is exact in float64.
    midpoints = (levels[:-1].astype(np.float64) + levels[1:].astype(np.float64)) / 2
    return np.searchsorted(midpoints, np.nan_to_num(halves, nan=0.0)).astype(np.uint8)


def _level_pairs(levels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the two levels, as one 64-bit number, of each pair of codes, read as one 16-bit number."""
    pair = np.arange(65_536)
    return np.stack((levels[pair & 0xFF], levels[pair >> 8]), axis=1).view(np.int64).reshape(-1)


_levels = dynamic_levels()

LEVELS = torch.tensor(_levels, dtype=torch.float32, device=CPU)
"""float32 (256,): the level of each code."""

LEVEL_PAIRS = torch.tensor(_level_pairs(_levels), dtype=torch.int64, device=CPU)
"""int64 (65536,), 512 KiB: the levels of each pair of codes. Looking up pairs is twice as fast as single codes."""

CODE_OF_HALF = torch.tensor(codes_of_halves(_levels), dtype=torch.uint8, device=CPU)
"""uint8 (65536,), 64 KiB: the code of each half-precision number, by its bits."""

ZERO_CODE = int(np.flatnonzero(_levels == 0.0)[0])

# The ternary codec's constants; see `ternary.py`.

TERNARY_SHARE: Final = 0.85
"""An element that is at most so many times the mean magnitude of its block is sent as 0."""

_reciprocals = np.concatenate([[np.inf], np.arange(1, 4097)]) ** -1.0

RECIPROCALS = torch.tensor(_reciprocals, dtype=torch.float32, device=CPU)
"""float32 (4097,): 1 / n, and 0 for 0. A product with it rounds alike everywhere, and a quotient may not."""


logger = logging.getLogger(__name__)

COMPILE_AFTER_ELEMENTS: Final = 1 << 24
"""The elements after which compiling pays: a process that exchanges less than one vector of 64 MB is not worth it.

In a round of 16 M elements, a member of four encodes and decodes 44 M."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled functions of one kind of codec. `block` is the number of elements in a block."""

    encode: Callable[[Floats, int, Floats, Bytes], bool]
    """(values, block, scales, codes): write scales and codes. Return False if a number must not be encoded."""
    decode: Callable[[Floats, Bytes, int, Floats], None]
    """(scales, codes, block, out): write the decoded numbers."""
    accumulate: Callable[[Floats, Bytes, int, Floats, float], None]
    """(scales, codes, block, accumulator, weight): add the decoded numbers times the weight."""


Proof = Callable[[Kernel], bool]
"""Returns whether a kernel gives the bits of torch's expressions on this host."""


class Kernels:
    """The kernels of this process, and the thread that compiles them.

    `load`: imports the loops and returns their module. Raises ImportError if numba is not installed.
    """

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load
        self._ready: dict[str, Kernel] = {}
        self._seen: dict[str, int] = {}  # elements, while a kernel is not compiled
        self._begun: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._on = True

    def find(self, kind: str, elements: int, proof: Proof) -> Kernel | None:
        """Return the kernel of a kind of codec if there is one by now; have it compiled when that pays.

        `elements`: that are now encoded or decoded.
        """
        kernel = self._ready.get(kind)
        if kernel is None and kind not in self._begun:
            # Threads may lose each other's counts, which only delays the compilation.
            self._seen[kind] = seen = self._seen.get(kind, 0) + elements
            if seen >= COMPILE_AFTER_ELEMENTS:
                self._begin(kind, proof)
        return kernel if self._on else None

    def switch(self, on: bool) -> None:
        """Use kernels, or torch's expressions only, from now on. For comparisons of the two."""
        self._on = on

    def wait(self, kind: str, proof: Proof) -> Kernel | None:
        """Compile a kernel now, and wait for it. Return None if there is none; the log says why."""
        self._begin(kind, proof).join()
        return self._ready.get(kind)

    def _begin(self, kind: str, proof: Proof) -> threading.Thread:
        with self._lock:
            thread = self._begun.get(kind)
            if thread is None:
                # No daemon: a program must not end in the midst of the compiler. It waits for a function at most.
                thread = threading.Thread(target=self._compile, args=(kind, proof), name="p2pavg-compile")
                self._begun[kind] = thread
                thread.start()
        return thread

    def _compile(self, kind: str, proof: Proof) -> None:
        try:
            candidates = compile_kernels(kind, self._load)
            agreeing = [kernel for kernel in candidates if proof(kernel)]
        except ImportError as error:
            if error.name == "numba":
                logger.debug("%s is not compiled: numba is not installed", kind)
            else:
                logger.warning("numba cannot be imported, so %s is not compiled: %s", kind, error)
        except Exception as error:  # noqa: BLE001 - of the compiler; torch's expressions do the work
            logger.warning("numba failed, so %s is not compiled: %r", kind, error)
        else:
            if agreeing:
                logger.debug("%s is compiled", kind)
                self._ready[kind] = agreeing[0]
            elif candidates:
                logger.warning("compiled loops round differently from torch here, so %s uses torch", kind)


# Locks of imports and of numba's compiler that are held at a fork stay locked in the child, such as a worker of a
# DataLoader. So a fork waits for the current step.
_step = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_step.acquire, after_in_parent=_step.release, after_in_child=_step.release)


def compile_kernels(kind: str, load: Callable[[], ModuleType]) -> list[Kernel]:
    """Compile the kernel of a kind of codec, or read it from numba's cache.

    Return two kernels, of which the first rounds fused multiply-adds once. Return none if numba's compiler is switched
    off, or if the program ends meanwhile.
    """
    with _step:
        loops = load()
        numba = import_module("numba")
    if numba.config.DISABLE_JIT:
        logger.info("NUMBA_DISABLE_JIT is set, so %s is not compiled", kind)
        return []
    compiled: list[Callable[..., Any]] = []
    for name in ("encode", "decode", "accumulate"):
        if not threading.main_thread().is_alive():
            return []
        function = getattr(loops, f"{name}_{kind}")
        with _step:
            compiled.append(_compiled(numba, function, _signature(numba.types, function.__name__)))
    makers: dict[str, Callable[..., Kernel]] = {"blockwise8": _blockwise8, "int8": _int8, "ternary": _ternary}
    make = makers[kind]
    return [make(*compiled, fuse) for fuse in (True, False)]


def _compiled(numba: ModuleType, function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    options = {"nogil": True, "fastmath": False, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(signature, cache=True, **options)(function)  # type: ignore[no-any-return]
    except (RuntimeError, OSError) as error:
        # No folder for the cache is writable, the disk is full, or a file of the cache is damaged.
        logger.debug("%s is compiled without a cache: %s", function.__name__, error)
        return numba.njit(signature, **options)(function)  # type: ignore[no-any-return]


def _signature(types: Any, name: str) -> Any:
    floats, codes = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
    signed = types.Array(types.int8, 1, "C")
    signatures = {
        "encode_blockwise8": types.boolean(floats, codes, types.intp, floats, codes),
        "decode_blockwise8": types.void(floats, codes, floats, types.intp, floats),
        "accumulate_blockwise8": types.void(floats, codes, floats, types.intp, floats, types.boolean),
        "encode_ternary": types.boolean(floats, floats, types.float32, types.intp, floats, codes),
        "decode_ternary": types.void(floats, codes, types.intp, floats),
        "accumulate_ternary": types.void(floats, codes, types.float32, types.intp, floats, types.boolean),
        "encode_int8": types.boolean(floats, types.intp, floats, codes),
        "decode_int8": types.void(floats, signed, types.intp, floats),
        "accumulate_int8": types.void(floats, signed, types.float32, types.intp, floats, types.boolean),
    }
    return signatures[name]


Compiled = Callable[..., Any]


def _blockwise8(encode: Compiled, decode: Compiled, accumulate: Compiled, fuse: bool) -> Kernel:
    table, levels = CODE_OF_HALF.numpy(), LEVELS.numpy()

    def add(scales: Floats, codes: Bytes, block: int, accumulator: Floats, weight: float) -> None:
        # torch multiplies the levels with the weight first, too.
        accumulate(scales, codes, levels * np.float32(weight), block, accumulator, fuse)

    return Kernel(
        lambda values, block, scales, codes: encode(values, table, block, scales, codes),
        lambda scales, codes, block, out: decode(scales, codes, levels, block, out),
        add,
    )


def _int8(encode: Compiled, decode: Compiled, accumulate: Compiled, fuse: bool) -> Kernel:
    def add(scales: Floats, codes: Bytes, block: int, accumulator: Floats, weight: float) -> None:
        accumulate(scales, codes.view(np.int8), np.float32(weight), block, accumulator, fuse)

    return Kernel(
        encode, lambda scales, codes, block, out: decode(scales, codes.view(np.int8), block, out), add
    )


def _ternary(encode: Compiled, decode: Compiled, accumulate: Compiled, fuse: bool) -> Kernel:
    reciprocals = RECIPROCALS.numpy()

    def write(values: Floats, block: int, scales: Floats, codes: Bytes) -> bool:
        return bool(encode(values, reciprocals, np.float32(TERNARY_SHARE / block), block, scales, codes))

    def add(scales: Floats, codes: Bytes, block: int, accumulator: Floats, weight: float) -> None:
        accumulate(scales, codes, np.float32(weight), block, accumulator, fuse)

    return Kernel(write, decode, add)


def import_loops() -> ModuleType:
    """Import numba and the loops. Return the loops."""
    for name in ("numba", "llvmlite"):
        # numba describes each step of a compilation at the level DEBUG, in thousands of lines.
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.INFO)
    return import_module(".loops", __package__)


kernels = Kernels(import_loops)
"""The kernels of this process."""
