"""Comparison of a received state with the model that shall take it."""

from __future__ import annotations

import re

import pytest
import torch

from p2pavg.base.errors import StateError
from p2pavg.state.checking import EXTRA_ELEMENTS, check, is_finite
from p2pavg.state.layout import DTYPES, Spec
from p2pavg.state.snapshot import Content

MODEL = {
    "parameter/head.weight": torch.ones(10, 4),
    "parameter/head.bias": torch.ones(10),
    "buffer/norm.mean": torch.ones(4),
}
EXPECTED = {name: Spec.of(tensor) for name, tensor in MODEL.items()}
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]


def mistake(tensors: dict[str, torch.Tensor], *, others_bytes: int = 2**30) -> str:
    """Return the error of a state with these tensors."""
    with pytest.raises(StateError) as caught:
        check(Content(tensors), EXPECTED, others=["optimizer/"], others_bytes=others_bytes)
    return str(caught.value)


def without(*names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in MODEL.items() if name not in names}


def test_the_models_own_state_is_accepted() -> None:
    check(Content(MODEL), EXPECTED)
    more = MODEL | {"optimizer/state/0/step": torch.tensor(3.0)}
    check(Content(more), EXPECTED, others=["optimizer/"], others_bytes=4)


def test_a_parameter_that_the_state_lacks_is_named() -> None:
    assert mistake(without("parameter/head.bias")) == (
        "this model has a parameter 'head.bias' of shape (10,) that the state lacks: the state was saved with another "
        "version of the model. Start this peer with the version that the run trains"
    )
    assert "a buffer 'norm.mean' of shape (4,) that the state lacks" in mistake(without("buffer/norm.mean"))


def test_a_parameter_that_the_model_lacks_is_named() -> None:
    assert "the state has a parameter 'tail' of shape (2,) that this model lacks" in mistake(
        MODEL | {"parameter/tail": torch.ones(2)}
    )
    assert "the state has a tensor 'optimizers' of shape (2,)" in mistake(
        MODEL | {"optimizers": torch.ones(2)}
    )


def test_a_renamed_parameter_is_named_twice() -> None:
    text = mistake(without("parameter/head.bias") | {"parameter/head.offset": torch.ones(10)})
    assert "a parameter 'head.bias'" in text
    assert "a parameter 'head.offset'" in text


def test_another_shape_is_named() -> None:
    text = mistake(MODEL | {"parameter/head.bias": torch.ones(12)})
    assert text.startswith(
        "the parameter 'head.bias' has the shape (10,) in this model and (12,) in the state"
    )


def test_another_dtype_is_named() -> None:
    text = mistake(MODEL | {"parameter/head.bias": torch.ones(10, dtype=torch.bfloat16)})
    assert text.startswith("the parameter 'head.bias' is float32 in this model and bfloat16 in the state")


def test_at_most_three_tensors_are_named() -> None:
    text = mistake(MODEL | {f"parameter/{number}": torch.ones(1) for number in range(7)})
    assert re.findall("a parameter '(.)'", text) == ["0", "1", "2"]
    assert "and 4 more that this model lacks" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named(value: float) -> None:
    broken = torch.ones(10)
    broken[7] = value
    assert mistake(MODEL | {"parameter/head.bias": broken}).startswith(
        "NaN or infinite values are in the parameter 'head.bias' of the state"
    )
    assert "are in the tensor 'optimizer/m' of" in mistake(MODEL | {"optimizer/m": broken})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_dtype_is_searched(dtype: torch.dtype) -> None:
    numbers = torch.ones(3_000_000 if dtype.itemsize == 1 else 1000).to(dtype)
    assert is_finite(numbers)
    assert is_finite(numbers[:0])
    numbers[-1] = float("nan")
    assert not is_finite(numbers)
    assert not is_finite(numbers[-1])


def test_numbers_whose_sum_is_infinite_are_finite() -> None:
    assert is_finite(torch.full((10,), torch.finfo(torch.float32).max))


def test_integers_are_finite() -> None:
    assert all(is_finite(torch.ones(2, dtype=dtype)) for dtype in DTYPES.values() if dtype not in FLOATS)


def test_other_tensors_are_bounded() -> None:
    most = 40 + EXTRA_ELEMENTS
    check(
        Content(MODEL | {"optimizer/m": torch.zeros(most)}),
        EXPECTED,
        others=["optimizer/"],
        others_bytes=4 * most,
    )
    assert f"'optimizer/m' of the state has {most + 1} elements; {most} is the most" in mistake(
        MODEL | {"optimizer/m": torch.zeros(most + 1)}
    )
    assert "has 44 bytes besides the model's own tensors, 43 is the most" in mistake(
        MODEL | {"optimizer/m": torch.zeros(10), "optimizer/n": torch.zeros(1)}, others_bytes=43
    )


def test_no_other_tensor_is_accepted_without_a_prefix() -> None:
    with pytest.raises(StateError, match="'optimizer/m' of shape"):
        check(Content(MODEL | {"optimizer/m": torch.zeros(1)}), EXPECTED, others_bytes=2**30)
