"""Codecs do not depend on the global state of torch, and import only what they need."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from p2pavg_compression import KNOWN_CODECS, Codec, resolve_codec

CODECS = [resolve_codec(name) for name in KNOWN_CODECS]
VALUES = torch.linspace(-1, 1, 1001)


@pytest.fixture(params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    assert isinstance(request.param, Codec)
    return request.param


@pytest.fixture
def _strange_defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def round_trip(codec: Codec) -> torch.Tensor:
    payload = codec.encode(VALUES)
    decoded = codec.decode(payload, VALUES.numel())
    codec.accumulate(payload, decoded, -1.0)
    assert decoded.abs().max().item() < 1e-6
    return codec.decode(payload, VALUES.numel())


@pytest.mark.usefixtures("_strange_defaults")
def test_default_device_and_dtype_do_not_matter(codec: Codec) -> None:
    decoded = round_trip(codec)
    assert decoded.dtype is torch.float32
    assert decoded.device.type == "cpu"


def test_buffers_made_under_inference_mode_stay_usable(codec: Codec) -> None:
    """Without a guard, buffers that a thread made under inference_mode would be unusable outside of it."""

    def inside_then_outside() -> tuple[list[float], list[float]]:
        with torch.inference_mode():
            inside = round_trip(codec).tolist()
        return inside, round_trip(codec).tolist()

    with ThreadPoolExecutor(1) as a_new_thread:
        inside, outside = a_new_thread.submit(inside_then_outside).result()
    assert inside == outside


def test_parameters_can_be_encoded_and_decoded_into(codec: Codec) -> None:
    parameter = torch.nn.Parameter(VALUES.clone())
    payload = codec.encode(parameter)
    assert bytes(payload) == bytes(codec.encode(VALUES))
    assert codec.decode(payload, VALUES.numel(), parameter) is parameter
    codec.accumulate(payload, parameter, 1.0)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_decoded_tensor_does_not_share_the_payload(codec: Codec) -> None:
    payload = bytearray(codec.encode(VALUES))
    decoded = codec.decode(payload, VALUES.numel())
    before = decoded.clone()
    payload[:] = bytes(len(payload))
    assert torch.equal(decoded, before)


def test_bitsandbytes_and_numba_are_not_imported_for_little_work_on_the_cpu() -> None:
    script = """
import sys
import torch
from p2pavg_compression import KNOWN_CODECS, check_codec, resolve_codec
for codec in map(resolve_codec, KNOWN_CODECS):
    payload = codec.encode(torch.ones(10_000))
    codec.accumulate(payload, codec.decode(payload, 10_000), 1.0)
unwanted = {"bitsandbytes", "numba", "trio", "libp2p", "p2pavg", "p2pavg_dht"} & set(sys.modules)
assert not unwanted, unwanted
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120, env=environment)


def test_empty_tensor_with_an_unusual_device_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="must be on the CPU or a CUDA device, is on meta"):
        codec.encode(torch.empty(0, device="meta"))
    with pytest.raises(ValueError, match="out must be on the CPU, is on meta"):
        codec.decode(b"", 0, torch.empty(0, device="meta"))


def test_an_argument_that_is_no_tensor_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="values must be a tensor, got list"):
        codec.encode([1.0, 2.0])  # type: ignore[arg-type]


def test_buffers_that_are_not_contiguous_are_refused(codec: Codec) -> None:
    nbytes = codec.encoded_nbytes(VALUES.numel())
    every_second = memoryview(bytearray(2 * nbytes))[::2]
    with pytest.raises(ValueError, match="out is not contiguous"):
        codec.encode(VALUES, every_second)
    with pytest.raises(ValueError, match="payload is not contiguous"):
        codec.decode(every_second, VALUES.numel())


def test_buffers_of_other_item_sizes_are_read_as_bytes(codec: Codec) -> None:
    values = torch.linspace(-1, 1, 4096)
    payload = bytes(codec.encode(values))
    words = memoryview(bytearray(payload)).cast("I")
    assert torch.equal(codec.decode(words, 4096), codec.decode(payload, 4096))
