"""The accumulated mean, compared with float64."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.base.result import Tensors

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 1, 4)]


def in_order(tensors: Tensors | None) -> list[torch.Tensor]:
    assert tensors is not None
    return list(tensors.values()) if isinstance(tensors, dict) else tensors


def expected_mean(given: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> list[torch.Tensor]:
    """Return the mean in float64."""
    total = sum(weights)
    return [
        sum(
            (weight / total * tensor.double() for weight, tensor in zip(weights, column, strict=True)),
            torch.zeros(()),
        )
        for column in zip(*given, strict=True)
    ]


def random_tensors(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [1.0, 1.0, 1.0],
        [8, 8, 3],
        [1.0] * 50,
        [1000.0, 1.0, 1.0],
        [1.0, 1.0, 1000.0],
        [1e-6, 1.0, 1e6],
        [1e6, 1e-6, 1.0],
        [1e-300, 1e-300],
        [5e14, 5e14],
        [10 ** (power / 2) for power in range(-12, 13)],
    ],
    ids=lambda weights: f"{len(weights)}-{weights[0]:g}",
)
def test_accumulated_mean_is_weighted(weights: list[float]) -> None:
    generator = torch.Generator().manual_seed(len(weights))
    given = [random_tensors(generator) for _ in weights]
    accumulation = Accumulation()
    for tensors, weight in zip(given, weights, strict=True):
        accumulation.add(tensors, weight)
    # A running mean is not a sum of large numbers: its error is relative to its own size, for any weights.
    for found, wanted in zip(in_order(accumulation.mean()), expected_mean(given, weights), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert accumulation.weight == pytest.approx(sum(weights), rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_every_dtype_is_averaged_in_float32_and_returned_as_it_was(
    dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [1.0, 2.0, 0.25] * 10
    given = [random_tensors(generator, dtype) for _ in weights]
    accumulation = Accumulation()
    for tensors, weight in zip(given, weights, strict=True):
        accumulation.add(tensors, weight)
    taken = accumulation.take()
    assert taken is not None
    wanted = expected_mean(given, weights)
    assert taken.mean.dtype is torch.float32
    flat = torch.cat([tensor.reshape(-1) for tensor in wanted])
    torch.testing.assert_close(taken.mean.double(), flat, rtol=1e-6, atol=1e-6)
    for found, tensor in zip(in_order(taken.schema.unflatten(taken.mean)), wanted, strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), tensor, rtol=tolerance, atol=tolerance)


def test_mean_of_one_call_is_exact() -> None:
    given = [torch.tensor([1e-45, -0.0, 3.0e-39, 2.0**99, -(2.0**99), 1 / 3]), torch.tensor(0.1)]
    accumulation = Accumulation()
    accumulation.add(given, 0.1)
    for found, tensor in zip(in_order(accumulation.mean()), given, strict=True):
        assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


def test_tensors_without_elements_alone_are_averaged_too() -> None:
    accumulation = Accumulation()
    accumulation.add([torch.ones(0), torch.ones(3, 0)], 2.0)
    assert [tuple(tensor.shape) for tensor in in_order(accumulation.mean())] == [(0,), (3, 0)]
    assert accumulation.weight == 2.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0)[::2],
        torch.arange(4.0).expand(3, 4),
        torch.arange(8.0).view(2, 2, 2).permute(2, 0, 1),
    ],
    ids=["transposed", "strided", "expanded", "permuted"],
)
def test_memory_layout_does_not_matter(tensor: torch.Tensor) -> None:
    accumulation = Accumulation()
    accumulation.add([tensor], 1.0)
    accumulation.add([tensor.contiguous() * 3], 1.0)
    [found] = in_order(accumulation.mean())
    assert torch.equal(found, tensor * 2)


def test_no_graph_is_kept_and_arguments_are_unchanged() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    dependent = parameter * 2
    copies = [parameter.detach().clone(), dependent.detach().clone()]
    accumulation = Accumulation()
    accumulation.add([parameter, dependent], 1.0)
    accumulation.add([parameter, dependent], 3.0)
    found = in_order(accumulation.mean())
    assert not any(tensor.requires_grad for tensor in found)
    assert all(tensor.grad_fn is None for tensor in found)
    assert parameter.requires_grad
    assert parameter.grad is None
    assert torch.equal(parameter, copies[0])
    assert torch.equal(dependent, copies[1])
    [gradient] = torch.autograd.grad(dependent.sum(), parameter)  # its graph is intact
    assert torch.equal(gradient, torch.full((4,), 2.0))


def test_tensors_are_read_and_not_kept() -> None:
    tensor = torch.ones(4)
    accumulation = Accumulation()
    accumulation.add([tensor], 1.0)
    tensor.fill_(100.0)
    assert torch.equal(in_order(accumulation.mean())[0], torch.ones(4))


def test_mean_is_a_copy() -> None:
    accumulation = Accumulation()
    accumulation.add([torch.ones(4)], 1.0)
    in_order(accumulation.mean())[0].fill_(100.0)
    assert torch.equal(in_order(accumulation.mean())[0], torch.ones(4))


def test_a_mapping_keeps_names_and_order() -> None:
    accumulation = Accumulation()
    for value in (1.0, 3.0):
        accumulation.add({"z": torch.full((2,), value), "a": torch.full((), -value)}, 1.0)
    found = accumulation.mean()
    assert isinstance(found, dict)
    assert list(found) == ["z", "a"]
    assert torch.equal(found["z"], torch.full((2,), 2.0))
    assert torch.equal(found["a"], torch.tensor(-2.0))


def test_tuple_becomes_a_list() -> None:
    accumulation = Accumulation()
    accumulation.add((torch.ones(1),), 1.0)
    assert isinstance(accumulation.mean(), list)


def test_threads_may_accumulate_at_once() -> None:
    """The values are whole numbers, whose running means are exact enough to show one lost call."""
    threads, calls = 8, 50
    accumulation = Accumulation()
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        start.wait()
        for call in range(calls):
            value = float(number * calls + call)
            accumulation.add({"all": torch.full((5000,), value), "one": torch.tensor(value)}, 1.0)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert accumulation.weight == threads * calls
    expected = (threads * calls - 1) / 2
    found = in_order(accumulation.mean())
    torch.testing.assert_close(found[0], torch.full((5000,), expected), rtol=1e-5, atol=0.0)
    assert bool((found[0] == found[0][0]).all()), "a call was torn"
    torch.testing.assert_close(found[1], torch.tensor(expected), rtol=1e-5, atol=0.0)
