"""Tensors that cannot be averaged are refused by name, and a refusal changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2pavg.allreduce.vector.accumulation import MAX_TENSORS, Accumulation
from p2pavg.base.errors import AccumulateError
from p2pavg.base.limits import MAX_WEIGHT

GOOD: dict[str, torch.Tensor] = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor(5.0)}
Make = Callable[[], Any]


def with_bias(bias: object) -> Make:
    return lambda: {"weight": GOOD["weight"], "bias": bias}


def holding(value: float, dtype: torch.dtype = torch.float32) -> Make:
    return lambda: {"weight": torch.tensor([[0.0, 0.0], [value, 0.0]], dtype=dtype), "bias": GOOD["bias"]}


ALWAYS: list[tuple[str, Make, str]] = [
    ("a tensor", lambda: torch.ones(2), r"must be a sequence or a mapping of tensors, got Tensor"),
    ("a generator", lambda: (tensor for tensor in GOOD.values()), r"sequence or a mapping.*got generator"),
    ("a number", lambda: 5, r"got int"),
    ("nothing", list, r"1 to 100000 tensors can be averaged, got 0"),
    ("too many", lambda: [GOOD["bias"]] * (MAX_TENSORS + 1), r"1 to 100000 tensors.*got 100001"),
    ("text", lambda: "ab", r"tensor 0 is a str, not a tensor"),
    ("keys", lambda: {1: GOOD["bias"]}, r"keys of a mapping of tensors must be text"),
    ("None", with_bias(None), r"tensor 'bias' is None; .* no \.grad"),
    ("a float", with_bias(5.0), r"tensor 'bias' is a float, not a tensor"),
    ("integers", with_bias(torch.tensor(5)), r"tensor 'bias' is torch\.int64"),
    ("booleans", with_bias(torch.tensor(True)), r"tensor 'bias' is torch\.bool"),
    ("complex", with_bias(torch.tensor(1j)), r"tensor 'bias' is torch\.complex64"),
    (
        "float64",
        with_bias(torch.tensor(5.0, dtype=torch.float64)),
        r"torch\.float64; float32, float16 and bfloat16",
    ),
    (
        "sparse",
        lambda: {"weight": GOOD["weight"].to_sparse(), "bias": GOOD["bias"]},
        r"tensor 'weight' is torch\.sparse",
    ),
    ("meta", with_bias(torch.empty((), device="meta")), r"tensor 'bias' is on the meta device"),
    ("NaN", holding(math.nan), r"tensor 'weight' holds NaN or Inf; nothing was accumulated"),
    ("Inf", holding(math.inf), r"tensor 'weight' holds NaN or Inf"),
    ("-Inf", holding(-math.inf), r"tensor 'weight' holds NaN or Inf"),
    ("too large", holding(2.0**99 * 1.001), r"tensor 'weight' holds a value of more than 6\.3"),
    ("too small", holding(-(2.0**99) * 1.001), r"tensor 'weight' holds a value of more than 6\.3"),
    ("a NaN in a scalar", with_bias(torch.tensor(math.nan)), r"tensor 'bias' holds NaN"),
]

OTHER_THAN_BEFORE: list[tuple[str, Make, str]] = [
    ("fewer", lambda: {"weight": GOOD["weight"]}, r"1 tensors were given, 2 before"),
    ("more", lambda: GOOD | {"third": GOOD["bias"]}, r"3 tensors were given, 2 before"),
    ("names", lambda: {"weight": GOOD["weight"], "offset": GOOD["bias"]}, r"names or their order differ"),
    ("order", lambda: dict(reversed(GOOD.items())), r"names or their order differ"),
    ("a sequence", lambda: list(GOOD.values()), r"names or their order differ"),
    ("shape", with_bias(torch.ones(1)), r"tensor 'bias' has shape \(1,\), before it had \(\)"),
    (
        "transposed",
        lambda: GOOD | {"weight": torch.ones(4, 1)},
        r"tensor 'weight' has shape \(4, 1\), before it had \(2, 2\)",
    ),
    (
        "dtype",
        with_bias(torch.tensor(5.0, dtype=torch.float16)),
        r"tensor 'bias' is torch\.float16, before it was torch\.float32",
    ),
]

WEIGHTS: list[tuple[object, str]] = [
    *[
        (value, r"weight must be above 0 and at most 1e\+15")
        for value in (0, 0.0, -1.0, math.nan, math.inf, -math.inf)
    ],
    (10**400, r"weight must be above 0 and at most 1e\+15"),
    (2e15, r"weight must be above 0 and at most 1e\+15"),
    *[
        (value, rf"weight must be a number, got {type(value).__name__}")
        for value in ("8", True, None, torch.tensor(8.0), 1j)
    ],
]


def state(accumulation: Accumulation) -> tuple[object, float, list[float] | None]:
    taken = accumulation.take()
    if taken is None:
        return accumulation.schema, 0.0, None
    accumulation.give_back(taken)
    return accumulation.schema, taken.weight, taken.mean.tolist()


def accumulated() -> Accumulation:
    accumulation = Accumulation()
    accumulation.add(GOOD, 2.0)
    return accumulation


def refuse(accumulation: Accumulation, given: object, weight: object, message: str) -> None:
    before = state(accumulation)
    untyped: Any = accumulation
    with pytest.raises(AccumulateError, match=message):
        untyped.add(given, weight)
    assert state(accumulation) == before


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in ALWAYS], ids=[case[0] for case in ALWAYS])
def test_tensors_that_cannot_be_averaged_are_refused(make: Make, message: str) -> None:
    refuse(accumulated(), make(), 1.0, message)
    fresh = Accumulation()
    refuse(fresh, make(), 1.0, message)
    assert fresh.schema is None, "a refused call fixed what may come"
    fresh.add([torch.ones(3)], 1.0)


@pytest.mark.parametrize(
    ("make", "message"), [case[1:] for case in OTHER_THAN_BEFORE], ids=[case[0] for case in OTHER_THAN_BEFORE]
)
def test_other_tensors_than_before_are_refused(make: Make, message: str) -> None:
    refuse(accumulated(), make(), 1.0, message)
    Accumulation().add(make(), 1.0)  # as a first call, each of them is valid


@pytest.mark.parametrize(("weight", "message"), WEIGHTS, ids=lambda value: repr(value)[:20])
def test_bad_weights_are_refused(weight: object, message: str) -> None:
    refuse(accumulated(), GOOD, weight, message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_half_precision_is_checked_too(dtype: torch.dtype, value: float) -> None:
    refuse(Accumulation(), holding(value, dtype)(), 1.0, "tensor 'weight' holds NaN or Inf")


def test_a_sequence_is_named_by_position() -> None:
    refuse(Accumulation(), [torch.ones(2), torch.tensor(math.nan)], 1.0, "tensor 1 holds NaN")


def test_first_bad_tensor_is_named_after_empty_ones() -> None:
    refuse(
        Accumulation(), [torch.ones(0), torch.ones(1), torch.tensor([math.inf])], 1.0, "tensor 2 holds NaN"
    )


def test_other_device_than_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested on the CPU alone: the meta device, with its check disabled, serves as another device."""
    monkeypatch.setattr("p2pavg.allreduce.vector.accumulation._check_kind", lambda *_: None)
    refuse(
        accumulated(),
        with_bias(torch.empty((), device="meta"))(),
        1.0,
        "tensor 'bias' is on meta, before it was on cpu",
    )


def test_too_large_sum_of_weights_is_refused() -> None:
    accumulation = Accumulation()
    accumulation.add(GOOD, MAX_WEIGHT)
    refuse(accumulation, GOOD, 1.0, r"weights accumulated would sum to more than 1e\+15")


def test_too_large_sum_after_a_failed_round_is_refused() -> None:
    accumulation = Accumulation()
    accumulation.add(GOOD, MAX_WEIGHT)
    taken = accumulation.take()
    assert taken is not None
    with pytest.raises(AccumulateError, match="sum to more than"):
        accumulation.add(GOOD, 1.0)
    accumulation.release(taken)
    accumulation.add(GOOD, MAX_WEIGHT)


def test_largest_value_is_accepted() -> None:
    accumulation = Accumulation()
    for value in (2.0**99, -(2.0**99)) * 5:
        accumulation.add([torch.tensor([value])], 1.0)
    taken = accumulation.take()
    assert taken is not None
    assert bool((taken.mean.abs() <= 2.0**99).all())


def test_a_weight_above_max_weight_is_refused_and_sums_are_not() -> None:
    """Contributions of failed rounds add up, which is not an error of the caller."""
    accumulation = Accumulation(max_weight=10.0)
    with pytest.raises(AccumulateError, match=r"weight is 10.5, and the config's max_weight is 10"):
        accumulation.add([torch.ones(3)], 10.5)
    assert accumulation.weight == 0.0
    accumulation.add([torch.ones(3)], 10.0)
    accumulation.add([torch.ones(3)], 10.0)
    assert accumulation.weight == 20.0
