"""A codec's error is contributed later: only the last residual is missing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.group.shares import MemberLink, cut_into_parts, fastest_shares, share_bounds
from p2pavg.optim import ErrorFeedback
from p2pavg_compression import Bf16, Blockwise8, Codec, Fp16, Fp32, Int8
from tests.unit.optim.samples import (
    ELEMENTS,
    averaged,
    contribute,
    flat,
    residual_norm,
    residual_of,
    tensors,
    there_and_back,
)

LOSSY: list[Codec] = [
    Fp16(),
    Bf16(),
    Int8(block_size=64),
    Int8(block_size=4096),
    Blockwise8(),
    Blockwise8(block_size=4096),
]

every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shares = st.tuples(st.integers(0, ELEMENTS), st.integers(0, ELEMENTS)).map(
    lambda ends: (min(ends), max(ends))
)


class TestNothingIsLost:
    @given(
        codec=st.sampled_from([Fp32(), *LOSSY]),
        dtype=st.sampled_from(DTYPES),
        exponent=st.integers(-30, 13),  # float16 has numbers up to 2**16
        steps=st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), shares), min_size=1, max_size=8),
    )
    def test_sums_agree_for_any_failures_and_shares(
        self, codec: Codec, dtype: torch.dtype, exponent: int, steps: list[tuple[int, bool, tuple[int, int]]]
    ) -> None:
        feedback = ErrorFeedback(codec)
        missing = torch.zeros(ELEMENTS, dtype=torch.float64)
        largest = 0.0
        for seed, delivered, share in steps:
            before = tensors(seed, 2.0**exponent, dtype)
            contributed = feedback.compensate(before)
            largest = max(largest, flat(contributed).abs().max().item())
            if delivered:
                feedback.delivered(*share)
                missing += flat(before).double() - averaged(codec, contributed, share).double()
        residual = feedback.state_dict()["residual"]
        if residual is None:
            assert not any(delivered for _, delivered, _ in steps)
        else:
            rounded = len(steps) * largest * 2.0**-22
            assert (missing - residual.double()).abs().max().item() <= rounded

    def test_residual_of_fp16_overflow_is_used_up_by_smaller_values(self) -> None:
        feedback = ErrorFeedback("fp16")
        assert contribute(feedback, [torch.tensor([70000.0, -70000.0])])[0].tolist() == [70000.0, -70000.0]
        assert residual_of(feedback).tolist() == [4496.0, -4496.0]
        assert contribute(feedback, [torch.tensor([10.0, -10.0])])[0].tolist() == [4506.0, -4506.0]

    @pytest.mark.parametrize("share", [(0, 0), (0, 3)], ids=str)
    def test_rounding_of_the_tensors_dtype_is_compensated_too(self, share: tuple[int, int]) -> None:
        """bfloat16 has no number between 1 and 1.0078; the peer's own share is rounded to it too."""
        feedback = ErrorFeedback(None)
        feedback.load_state_dict({"shapes": [[3]], "residual": torch.full((3,), 2.0**-9)})
        ones = torch.ones(3, dtype=torch.bfloat16)
        contributed = [contribute(feedback, [ones], share)[0] for _ in range(8)]
        assert residual_of(feedback).tolist() == [2.0**-9] * 3
        assert all(torch.equal(each, ones) for each in contributed)
        (small,) = contribute(feedback, [torch.zeros(3, dtype=torch.bfloat16)], share)
        assert small.tolist() == [2.0**-9] * 3
        assert residual_norm(feedback) == 0.0


class TestCompensate:
    def test_shapes_and_dtypes_are_kept_and_arguments_unchanged(self) -> None:
        before = [
            torch.randn(6, 4).t(),
            torch.randn(3, requires_grad=True),
            torch.randn(8).to(torch.bfloat16)[::2],
            torch.tensor(0.3, dtype=torch.float16),
        ]
        kept = [tensor.detach().clone() for tensor in before]
        feedback = ErrorFeedback("int8")
        for _ in range(2):
            contributed = contribute(feedback, before)
            for new, tensor, old in zip(contributed, before, kept, strict=True):
                assert (new.shape, new.dtype, new.device) == (tensor.shape, tensor.dtype, tensor.device)
                assert not new.requires_grad
                assert torch.equal(tensor, old)

    @every_dtype
    def test_neither_arguments_nor_results_are_read_later(self, dtype: torch.dtype) -> None:
        feedback, other = ErrorFeedback("int8"), ErrorFeedback("int8")
        for step in range(3):
            before = tensors(step, dtype=dtype)
            contributed = feedback.compensate(before)
            assert torch.equal(flat(contributed), flat(contribute(other, before)))
            for tensor in [*before, *contributed]:
                tensor.fill_(math.nan)
            feedback.delivered(0, 0)
            assert torch.equal(residual_of(feedback), residual_of(other))

    def test_a_float16_tensor_never_becomes_infinite(self) -> None:
        """Its largest number is 65504, which the residual exceeds."""
        feedback = ErrorFeedback(Int8(block_size=64))
        before = [torch.tensor([70000.0]), torch.tensor([-65504.0, 1.0], dtype=torch.float16)]
        beyond = False
        for _ in range(10):
            contributed = contribute(feedback, before)
            assert bool(contributed[1].isfinite().all())
            beyond |= bool(contributed[1][0] - residual_of(feedback)[1].abs() < -65504.0)
        assert beyond
        assert bool(residual_of(feedback).isfinite().all())


class TestDelivered:
    def test_delivery_without_a_contribution_is_an_error(self) -> None:
        feedback = ErrorFeedback("int8")
        with pytest.raises(RuntimeError, match=r"^nothing was compensated since the last delivery"):
            feedback.delivered(0, 0)
        contribute(feedback, tensors(0))
        residual = residual_of(feedback).clone()
        with pytest.raises(RuntimeError, match=r"^nothing was compensated since the last delivery"):
            feedback.delivered(0, 0)
        assert torch.equal(residual_of(feedback), residual)

    @pytest.mark.parametrize("share", [(-1, 2), (3, 2), (0, ELEMENTS + 1), (ELEMENTS + 1, ELEMENTS + 1)])
    def test_invalid_share_is_named_and_a_valid_one_still_works(self, share: tuple[int, int]) -> None:
        feedback, other = ErrorFeedback("int8"), ErrorFeedback("int8")
        contribute(other, tensors(0), (64, 128))
        feedback.compensate(tensors(0))
        with pytest.raises(
            ValueError, match=rf"^a share from {share[0]} to {share[1]} of a vector of {ELEMENTS} elements"
        ):
            feedback.delivered(*share)
        with pytest.raises(
            ValueError, match=rf"^a share from {share[0]} to {share[1]} of a vector of {ELEMENTS} elements"
        ):
            feedback.delivered(64, 128, share)
        feedback.delivered(64, 128)
        assert torch.equal(residual_of(feedback), residual_of(other))

    def test_ranges_that_were_taken_over_leave_no_residual_either(self) -> None:
        feedback, whole = ErrorFeedback("int8"), ErrorFeedback("int8")
        feedback.compensate(tensors(0))
        feedback.delivered(0, 64, (128, 192), (192, 256))
        whole.compensate(tensors(0))
        whole.delivered(0, 64)
        left = residual_of(whole).clone()
        assert left[128:256].any()
        left[128:256] = 0.0
        assert torch.allclose(residual_of(feedback), left, atol=1e-6)


class TestParts:
    """The exchange encodes parts of the vector; they must decode to the same values as the whole vector."""

    @every_lossy_codec
    def test_the_residual_is_what_the_parts_of_an_exchange_leave_out(self, codec: Codec) -> None:
        total = torch.randn(150_001, generator=torch.Generator().manual_seed(5))
        sizes = fastest_shares(len(total), [MemberLink(10.0), MemberLink(25.0)], codec.granularity)
        own, other = share_bounds(sizes, 0), share_bounds(sizes, 1)
        feedback = ErrorFeedback(codec)
        contribute(feedback, [total], own)
        parts = cut_into_parts(*other, codec.granularity, 32_768)
        assert len(parts) > 2
        for part in parts:
            there = slice(part.start, part.stop)
            left_out = total[there] - there_and_back(codec, total[there])
            assert torch.equal(residual_of(feedback)[there], left_out)
