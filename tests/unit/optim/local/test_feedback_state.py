"""Saved states of error feedback, and its refusals, which name the cause and change nothing."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2pavg.allreduce.vector.accumulation import LIMIT
from p2pavg.optim import ErrorFeedback
from tests.unit.optim.samples import SHAPES, contribute, flat, residual_norm, residual_of, tensors


class TestState:
    def test_loaded_state_continues_with_the_same_bits(self) -> None:
        feedback, other = ErrorFeedback("int8"), ErrorFeedback("int8")
        for step in range(4):
            contribute(feedback, tensors(step))
        file = io.BytesIO()
        torch.save(feedback.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert residual_norm(other) == residual_norm(feedback) > 0.0
        for step in range(4, 7):
            contributed = [contribute(some, tensors(step), (0, 64)) for some in (feedback, other)]
            assert torch.equal(flat(contributed[0]), flat(contributed[1]))
        assert torch.equal(residual_of(feedback), residual_of(other))

    def test_state_excludes_the_pending_contribution(self) -> None:
        feedback = ErrorFeedback("int8")
        feedback.compensate(tensors(0))
        assert feedback.state_dict() == {"shapes": [], "residual": None}
        feedback.delivered(0, 0)
        residual = residual_of(feedback).clone()
        feedback.compensate(tensors(1))
        assert torch.equal(residual_of(feedback), residual)
        assert feedback.state_dict()["shapes"] == [list(shape) for shape in SHAPES]

    def test_later_calls_do_not_change_a_state(self) -> None:
        feedback = ErrorFeedback("int8")
        contribute(feedback, tensors(0))
        state = feedback.state_dict()
        before = copy.deepcopy(state)
        other = ErrorFeedback("int8")
        other.load_state_dict(state)
        contribute(feedback, tensors(1))
        residual_of(other).zero_()
        assert before["residual"] is not None
        assert state["residual"] is not None
        assert torch.equal(before["residual"], state["residual"])

    def test_state_of_another_codec_is_compensated(self) -> None:
        feedback, other = ErrorFeedback("int8"), ErrorFeedback(None)
        contribute(feedback, tensors(0))
        other.load_state_dict(feedback.state_dict())
        contributed = contribute(other, tensors(1))
        assert torch.equal(flat(contributed), flat(tensors(1)) + residual_of(feedback))
        assert residual_norm(other) == 0.0

    def test_loading_a_state_drops_the_pending_contribution(self) -> None:
        feedback, loaded = ErrorFeedback("int8"), ErrorFeedback("int8")
        contribute(loaded, tensors(1))
        feedback.compensate(tensors(0))
        feedback.load_state_dict(loaded.state_dict())
        with pytest.raises(RuntimeError, match=r"^nothing was compensated"):
            feedback.delivered(0, 0)
        assert residual_norm(feedback) == residual_norm(loaded)

    @pytest.mark.parametrize(
        "act",
        [ErrorFeedback.clear, lambda feedback: feedback.load_state_dict(ErrorFeedback("int8").state_dict())],
    )
    def test_clear_and_a_state_from_before_the_first_delivery_drop_all(
        self, act: Callable[[ErrorFeedback], None]
    ) -> None:
        feedback = ErrorFeedback("int8")
        contribute(feedback, tensors(0))
        feedback.compensate(tensors(1))
        act(feedback)
        assert residual_norm(feedback) == 0.0
        assert feedback.state_dict() == {"shapes": [], "residual": None}
        with pytest.raises(RuntimeError, match=r"^nothing was compensated"):
            feedback.delivered(0, 0)
        feedback.compensate([torch.ones(2)])

    @pytest.mark.parametrize(
        ("state", "error", "message"),
        [
            ([], TypeError, r"^state must be a mapping, got list"),
            ({}, ValueError, r"^state must have the entries shapes and residual, got \[\]"),
            (
                {"shapes": [], "residual": None, "codec": "int8"},
                ValueError,
                r"entries shapes and residual, got \['codec', 'residual', 'shapes'\]",
            ),
            ({"shapes": 3, "residual": None}, TypeError, r"^shapes must be a list of shapes, got int"),
            (
                {"shapes": [[2], 3], "residual": None},
                TypeError,
                r"^shape 1 must be a list of integers, got 3",
            ),
            ({"shapes": [[2.0]], "residual": None}, TypeError, r"^shape 0 must be a list of integers"),
            ({"shapes": [[-2]], "residual": None}, ValueError, r"^shape 0 has a negative size: \[-2\]"),
            ({"shapes": [[2]], "residual": None}, ValueError, r"^state has shapes but no residual"),
            ({"shapes": [], "residual": torch.zeros(0)}, ValueError, r"^state has a residual but no shapes"),
            ({"shapes": [[2]], "residual": [0.0, 0.0]}, TypeError, r"^residual must be a tensor, got list"),
            (
                {"shapes": [[2], [2, 3]], "residual": torch.zeros(7)},
                ValueError,
                r"^residual must be torch\.float32 of shape \(8,\), got torch\.float32 of shape \(7,\)",
            ),
            (
                {"shapes": [[2]], "residual": torch.zeros(2, dtype=torch.float64)},
                ValueError,
                r"^residual must be torch\.float32 of shape \(2,\), got torch\.float64",
            ),
            (
                {"shapes": [[2]], "residual": torch.tensor([0.0, math.nan])},
                ValueError,
                r"^residual holds NaN or Inf",
            ),
            (
                {"shapes": [list(shape) for shape in SHAPES[:4]] + [[800]], "residual": torch.zeros(1016)},
                ValueError,
                r"^tensor 4 has shape \(800,\), before it had \(2, 1, 400\)",
            ),
        ],
    )
    def test_state_of_other_tensors_is_refused(
        self, state: Any, error: type[Exception], message: str
    ) -> None:
        """Neither the residual nor the pending contribution changes."""
        feedback, other = ErrorFeedback("int8"), ErrorFeedback("int8")
        for some in (feedback, other):
            contribute(some, tensors(0))
            some.compensate(tensors(1))
        with pytest.raises(error, match=message):
            feedback.load_state_dict(state)
        assert torch.equal(residual_of(feedback), residual_of(other))
        for some in (feedback, other):
            some.delivered(0, 0)
        assert torch.equal(residual_of(feedback), residual_of(other))


def with_fourth(tensor: object) -> list[object]:
    return [*tensors(1)[:4], tensor]


def holding(value: float) -> torch.Tensor:
    tensor = torch.zeros(2, 1, 400)
    tensor[1, 0, 7] = value
    return tensor


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (torch.ones(2), TypeError, r"^tensors must be a sequence of tensors, got Tensor"),
            ({"a": torch.ones(2)}, TypeError, r"^tensors must be a sequence of tensors, got dict"),
            (with_fourth(None), ValueError, r"^tensor 4 is None"),
            (with_fourth(torch.ones(2, dtype=torch.float64)), ValueError, r"^tensor 4 is torch\.float64"),
            (tensors(1)[:4], ValueError, r"^4 tensors were given, 5 before"),
            (
                with_fourth(torch.ones(800)),
                ValueError,
                r"^tensor 4 has shape \(800,\), before it had \(2, 1, 400\)",
            ),
            *[
                (
                    with_fourth(holding(value)),
                    ValueError,
                    r"^tensor 4, together with its residual, holds NaN or Inf",
                )
                for value in (math.nan, math.inf, -math.inf)
            ],
            *[
                (
                    with_fourth(holding(value)),
                    ValueError,
                    r"^tensor 4, .* holds a magnitude above 6\.33825e\+29",
                )
                for value in (LIMIT * 1.001, -LIMIT * 1.001)
            ],
        ],
    )
    def test_bad_tensor_is_named_and_nothing_changes(
        self, wrong: Any, error: type[Exception], message: str
    ) -> None:
        """Neither the residual nor the pending contribution changes."""
        feedback, other = ErrorFeedback("int8"), ErrorFeedback("int8")
        for some in (feedback, other):
            contribute(some, tensors(0))
            some.compensate(tensors(1))
        with pytest.raises(error, match=message):
            feedback.compensate(wrong)
        assert torch.equal(residual_of(feedback), residual_of(other))
        for some in (feedback, other):
            some.delivered(0, 0)
        assert torch.equal(residual_of(feedback), residual_of(other))
        assert torch.equal(flat(feedback.compensate(tensors(2))), flat(other.compensate(tensors(2))))

    def test_shapes_count_from_the_first_call(self) -> None:
        feedback = ErrorFeedback("int8")
        feedback.compensate([torch.ones(2)])
        with pytest.raises(ValueError, match=r"^tensor 0 has shape \(1, 2\), before it had \(2,\)"):
            feedback.compensate([torch.ones(1, 2)])

    def test_value_too_large_with_its_residual_is_refused(self) -> None:
        feedback = ErrorFeedback("int8")
        feedback.load_state_dict({"shapes": [[1]], "residual": torch.tensor([LIMIT])})
        assert feedback.compensate([torch.zeros(1)])[0].item() == LIMIT
        with pytest.raises(ValueError, match=r"^tensor 0, together with its residual, holds a magnitude"):
            feedback.compensate([torch.tensor([LIMIT / 2])])

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_named_tensor_is_the_right_one(self, position: int) -> None:
        """An empty one before it counts as a position, a scalar as an element."""
        wrong = [torch.ones(3), torch.ones(()), torch.ones(2)]
        wrong[position].fill_(math.nan)
        with pytest.raises(ValueError, match=rf"^tensor {position + 1}, "):
            ErrorFeedback("int8").compensate([torch.ones(0), *wrong])
