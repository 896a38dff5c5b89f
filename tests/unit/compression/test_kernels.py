"""Compiled loops: the same bits as torch's expressions, in the background, and torch's expressions where they fail."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg_compression import MAX_MAGNITUDE, Blockwise8, CodecError, Int8, Ternary
from p2pavg_compression.blocks import BlockCodec
from p2pavg_compression.kernels import COMPILE_AFTER_ELEMENTS, Kernel, Kernels, import_loops, kernels

CODECS: list[BlockCodec] = [
    Blockwise8(),
    Blockwise8(block_size=1024),
    Int8(),
    Int8(block_size=64),
    Ternary(),
    Ternary(block_size=64),
    Ternary(block_size=1024),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@pytest.fixture
def compiled() -> Iterator[None]:
    """The kernels of this process, compiled and in use."""
    pytest.importorskip("numba")
    for codec in (Blockwise8(), Int8(), Ternary()):
        assert kernels.wait(codec.kind, codec.agrees_with) is not None
    kernels.switch(True)
    yield
    kernels.switch(True)


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what the kernels do, and what torch's expressions do."""
    found = []
    for on in (True, False):
        kernels.switch(on)
        try:
            found.append(work())
        except CodecError as error:
            found.append(str(error))
    kernels.switch(True)
    return found[0], found[1]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def outcome_of(work: Callable[[], bytes]) -> bytes | str:
    """Return what a decoder gives, or why it refuses."""
    try:
        return work()
    except CodecError as error:
        return str(error)


# Blocks of numbers of one magnitude, from denormal to the largest, with zeros of both signs.
numbers = st.one_of(
    st.floats(-1.0, 1.0, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-14, 2.0**-24, 2.0**-25])
)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Draw up to 3000 numbers in blocks of drawn magnitudes; some of the numbers are beyond the limit or not finite."""
    pattern = draw(st.lists(numbers, min_size=1, max_size=80))
    elements = draw(st.integers(1, 3000))
    values = torch.tensor((pattern * (elements // len(pattern) + 1))[:elements], dtype=torch.float64)
    values *= 1 + torch.arange(elements) % 7 / 7
    exponents = draw(st.lists(st.integers(-149, 99), min_size=1, max_size=8))
    scales = 2.0 ** torch.tensor(exponents, dtype=torch.float64)
    found = (values * scales[torch.arange(elements) // 64 % len(exponents)]).float()
    if draw(st.integers(0, 9)) == 0:
        bad = st.sampled_from([np.nan, np.inf, -np.inf, 2 * MAX_MAGNITUDE, -MAX_MAGNITUDE, MAX_MAGNITUDE])
        found[draw(st.integers(0, elements - 1))] = draw(bad)
    return found


@every_codec
@settings(max_examples=150, deadline=None)
@given(values=vectors(), weight=st.floats(-1024.0, 1024.0), offset=st.integers(0, 4))
@pytest.mark.usefixtures("compiled")
def test_kernels_give_the_bits_of_torch(
    codec: BlockCodec, values: torch.Tensor, weight: float, offset: int
) -> None:
    elements = values.numel()
    start = torch.linspace(-3, 3, elements)

    def work() -> tuple[bytes, bytes, bytes]:
        memory = memoryview(bytearray(offset + codec.encoded_nbytes(elements)))[offset:]  # aligned or not
        payload = codec.encode(values, memory)
        accumulator = start.clone()
        codec.accumulate(payload, accumulator, weight)
        return bytes(payload), bits(codec.decode(payload, elements)), bits(accumulator)

    ours, theirs = both(work)
    assert ours == theirs


@every_codec
@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.usefixtures("compiled")
def test_kernels_decode_arbitrary_bytes_as_torch_does(codec: BlockCodec, data: st.DataObject) -> None:
    elements = data.draw(st.integers(1, 700))
    nbytes = codec.encoded_nbytes(elements)
    payload = bytearray(data.draw(st.binary(min_size=nbytes, max_size=nbytes)))
    blocks = -(-elements // codec.block_size)
    scales = data.draw(st.lists(st.floats(0.0, 2.0**90, width=32), min_size=blocks, max_size=blocks))
    payload[: 4 * blocks] = np.array(scales, dtype=np.float32).tobytes()
    codes = -(-4 * blocks // 64) * 64
    payload[4 * blocks : codes] = bytes(codes - 4 * blocks)
    if isinstance(codec, Ternary):
        payload[codes:] = (byte % 243 for byte in payload[codes:])
    ours, theirs = both(lambda: outcome_of(lambda: bits(codec.decode(payload, elements))))
    assert ours == theirs


@every_codec
@pytest.mark.usefixtures("compiled")
def test_whole_parts_and_all_half_precision_numbers_encode_alike(codec: BlockCodec) -> None:
    halves = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    near = halves[halves.isfinite()].float()
    steps = torch.nextafter(near, torch.tensor(np.inf)), torch.nextafter(near, torch.tensor(-np.inf))
    middle = (near[1:] + near[:-1]) / 2  # ties between two numbers of half precision
    values = torch.cat([near, *steps, middle, torch.randn(524_288)])
    values = values.clamp(-1, 1).view(-1)
    values[:: codec.block_size] = 1.0  # so that x / scale is x
    ours, theirs = both(lambda: bytes(codec.encode(values)))
    assert ours == theirs


@pytest.mark.usefixtures("compiled")
def test_parameters_are_marked_as_written() -> None:
    """Autograd refuses a backward pass through values that were written over, also by a kernel."""
    codec, values = Blockwise8(), torch.linspace(-1, 1, 1000)
    payload = codec.encode(values)
    parameter = torch.nn.Parameter(values.clone())
    before = parameter._version
    codec.decode(payload, 1000, parameter)
    codec.accumulate(payload, parameter, 1.0)
    assert parameter._version > before + 1


class Fake:
    """A kernel and a proof that the test controls."""

    def __init__(self, load: Callable[[], ModuleType], agrees: bool = True) -> None:
        self.kernels = Kernels(load)
        self.agrees = agrees

    def proof(self, kernel: Kernel) -> bool:
        return self.agrees

    def find(self, elements: int) -> Kernel | None:
        return self.kernels.find("int8", elements, self.proof)

    def wait(self) -> Kernel | None:
        return self.kernels.wait("int8", self.proof)


def test_work_is_counted_before_numba_is_imported() -> None:
    loads: list[None] = []

    def load() -> ModuleType:
        loads.append(None)
        return import_loops()

    pytest.importorskip("numba")
    fake = Fake(load)
    assert fake.find(COMPILE_AFTER_ELEMENTS - 1) is None
    assert not loads
    assert fake.find(1) is None, "the caller waited for the compiler"
    assert fake.wait() is not None
    assert fake.find(1) is not None
    assert len(loads) == 1
    fake.kernels.switch(False)
    assert fake.find(1) is None


def missing() -> ModuleType:
    raise ModuleNotFoundError("No module named 'numba'", name="numba")


def broken() -> ModuleType:
    raise ImportError("Numba needs NumPy 2.5 or less")


def failing() -> ModuleType:
    raise RuntimeError("LLVM has no such processor")


@pytest.mark.parametrize(
    ("load", "agrees", "said"),
    [
        (missing, True, ""),
        (broken, True, "numba cannot be imported, so int8 is not compiled: Numba needs NumPy"),
        (failing, True, "numba failed, so int8 is not compiled"),
        (import_loops, False, "compiled loops round differently from torch here"),
    ],
    ids=["not installed", "wrong version", "fails", "rounds differently"],
)
def test_torch_does_the_work_where_nothing_is_compiled(
    load: Callable[[], ModuleType], agrees: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    if load is import_loops:
        pytest.importorskip("numba")
    fake = Fake(load, agrees)
    with caplog.at_level(logging.WARNING, logger="p2pavg_compression"):
        assert fake.wait() is None
        assert fake.find(COMPILE_AFTER_ELEMENTS) is None
        assert fake.find(COMPILE_AFTER_ELEMENTS) is None
    assert [said in record.message for record in caplog.records] == ([True] if said else [])


def test_loops_are_compiled_without_a_cache_where_none_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numba: Any = pytest.importorskip("numba")
    asked: list[bool] = []
    real = numba.njit

    def njit(signature: object, *, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(signature, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert Fake(import_loops).wait() is not None
    assert asked == [True, False] * 3


def test_nothing_is_compiled_where_numba_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, the loops would take minutes for each part."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert Fake(import_loops).wait() is None


def test_a_program_that_ends_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    assert Fake(import_loops).wait() is None


SCRIPT = """
import os, threading, torch
from p2pavg_compression import Blockwise8
from p2pavg_compression.kernels import kernels, import_loops, Kernels
began, go_on = threading.Event(), threading.Event()
def load():
    began.set()
    go_on.wait()
    return import_loops()
found = Kernels(load)
threading.Timer(0.5, go_on.set).start()
codec = Blockwise8()
thread = found._begin("blockwise8", codec.agrees_with)
began.wait()
child = os.fork()
if child == 0:
    # A fork in the midst of the import would leave its locks held here for ever.
    assert go_on.is_set()
    import numba
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_the_import_of_numba() -> None:
    pytest.importorskip("numba")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
