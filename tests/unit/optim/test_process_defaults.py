"""No tensor of the library depends on the process's default dtype or device, which programs may set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from p2pavg.optim import LocalUpdates
from p2pavg.optim.base.state import digest_of
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.population.weights import Weights
from p2pavg.state.snapshot import copy_of, read
from p2pavg_compression import KNOWN_CODECS, resolve_codec
from tests.unit.optim.fakes import Alone, Make, both, large_batch

ROOT = Path(__file__).parents[3]
FACTORIES = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"}
    | {"normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}
)
"""Functions of torch whose results have the default dtype or are on the default device."""
CODECS = tuple(KNOWN_CODECS)
DEFAULTS = ((torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float16, "meta"))


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


others = pytest.mark.parametrize(("dtype", "device"), DEFAULTS)


@pytest.mark.parametrize("room", ["p2pavg", "compression/p2pavg_compression"])
def test_each_tensor_that_is_made_has_its_dtype_and_device(room: str) -> None:
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {
            node.func
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and {"dtype", "device"} <= {key.arg for key in node.keywords}
        }
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)  # also those that are passed on, and called elsewhere
            if isinstance(node, ast.Attribute) and node not in told
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in FACTORIES
        ]
    assert found == []


def values(count: int) -> torch.Tensor:
    made = torch.randn(
        count, generator=torch.Generator("cpu").manual_seed(3), dtype=torch.float32, device="cpu"
    )
    return made.mul_(0.1)


def model(seed: int = 3) -> nn.Module:
    """Return a float32 model on the CPU."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    made = nn.Sequential(*layers).to_empty(device="cpu").float()
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.5, generator=generator)
            else:
                tensor.zero_()
    return made


def train(network: nn.Module, optimizer: Any, batches: int = 3) -> None:
    for index in range(batches):
        generator = torch.Generator("cpu").manual_seed(index)
        inputs = torch.randn(4, 3, generator=generator, dtype=torch.float32, device="cpu")
        optimizer.zero_grad()
        torch.autograd.backward(network(inputs).square().mean())
        assert optimizer.step(samples=4).updated


def coded(name: str) -> tuple[bytes, bytes]:
    codec = resolve_codec(name)
    payload = codec.encode(values(640))
    return bytes(payload), codec.decode(payload, 640).numpy().tobytes()


@others
@pytest.mark.parametrize("name", CODECS)
def test_codecs_give_the_same_bytes(dtype: torch.dtype, device: str, name: str) -> None:
    expected = coded(name)
    with defaults(dtype, device):
        assert coded(name) == expected


def trained(make: Make) -> bytes:
    network = model()
    optimizer = make(Alone(), SGD(network.parameters(), lr=0.1, momentum=0.9), model=network)
    train(network, optimizer)
    tensors = [*network.parameters(), *(b for b in network.buffers() if b.is_floating_point())]
    if isinstance(optimizer, LocalUpdates):
        tensors = [*tensors, *optimizer.anchor]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    return digest_of(tensors)


@others
@both
def test_training_gives_the_same_bits(dtype: torch.dtype, device: str, make: Make) -> None:
    expected = trained(make)
    with defaults(dtype, device):
        assert trained(make) == expected


def common(seed: int, batches: int) -> tuple[nn.Module, CommonState]:
    network = model(seed)
    inner = Adam(network.parameters(), lr=0.1)
    optimizer = large_batch(Alone(), inner, model=network, max_grad_norm=0.1)
    train(network, optimizer, batches)
    return network, CommonState(
        "parameter/", optimizer._parameters, optimizer._parts, inner, None, optimizer._training
    )


@others
def test_a_state_is_taken_from_a_snapshot(dtype: torch.dtype, device: str) -> None:
    with defaults(dtype, device):
        (donor, given), (joiner, own) = common(3, 2), common(4, 1)
        own.prepare(read(copy_of(given.content())))()
        assert digest_of(joiner.parameters()) == digest_of(donor.parameters())


@others
def test_a_member_of_a_population_takes_the_weights_of_another(dtype: torch.dtype, device: str) -> None:
    with defaults(dtype, device):
        one, two = model(3), model(4)
        donor = Weights(one, Adam(one.parameters(), lr=0.1), None, ["lr"])
        taker = Weights(two, Adam(two.parameters(), lr=0.1), None, ["lr"])
        taker.prepare(read(copy_of(donor.content([])))).take()
        assert digest_of(one.parameters()) == digest_of(two.parameters())
