"""A lineage names parameters to the last bit, and every update since."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.optim.base.state import Lineage, first_lineage

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def parameters() -> list[torch.Tensor]:
    return [
        torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4,
        torch.tensor(-1.5, dtype=torch.bfloat16),
        torch.tensor([0.1, 65504.0], dtype=torch.float16),
        torch.empty(0, 3),
    ]


def state_of(*tensors: torch.Tensor) -> bytes:
    return first_lineage(tensors).state


class TestFirst:
    def test_the_bytes_never_change(self) -> None:
        first = first_lineage(parameters())
        assert first.epoch == 0
        assert first.state.hex() == "57523e1563ba65c21da2ef6763317fb5d4e16adae081c63004bb2e2e596624ba"

    def test_the_recipe_counts(self) -> None:
        recipes = [b"", bytes(32), b"r" * 32]
        assert len({first_lineage(parameters(), recipe).state for recipe in recipes}) == 3
        expected = "01e71dfa452e1671843a6a03697df1db012906f6aa928497649297a65aa024f1"
        assert first_lineage(parameters(), bytes(32)).state.hex() == expected

    @given(position=st.sampled_from([0, 1, 2]), bit=st.integers(0, 10**6))
    def test_every_bit_counts(self, position: int, bit: int) -> None:
        changed = parameters()
        values = changed[position].reshape(-1).view(torch.uint8)
        values[bit // 8 % len(values)] ^= 1 << bit % 8
        assert state_of(*changed) != state_of(*parameters())

    @every_dtype
    def test_zeros_of_either_sign_are_not_the_same(self, dtype: torch.dtype) -> None:
        zeros = torch.zeros(3, dtype=dtype)
        assert state_of(zeros) != state_of(-zeros)

    def test_every_dtype_counts(self) -> None:
        """This holds even if the bytes are the same."""
        assert len({state_of(torch.zeros(4, dtype=dtype)) for dtype in DTYPES}) == len(DTYPES)
        assert state_of(torch.zeros(4, dtype=torch.float16)) != state_of(torch.zeros(2))

    def test_every_shape_counts(self) -> None:
        shapes = [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (0, 3), (3, 0), (0,), (), (1,)]
        assert len({state_of(torch.zeros(shape)) for shape in shapes}) == len(shapes)

    def test_order_and_number_count(self) -> None:
        one, other = torch.zeros(2), torch.ones(2)
        several = [[], [one], [one, other], [other, one], [one, one], [torch.cat([one, other])]]
        several.append([one, other, torch.empty(0)])
        assert len({state_of(*tensors) for tensors in several}) == len(several)

    @every_dtype
    def test_memory_layout_does_not_count(self, dtype: torch.dtype) -> None:
        values = torch.arange(12).reshape(3, 4).to(dtype)
        wide = torch.zeros(3, 8, dtype=dtype)
        wide[:, ::2] = values
        expected = state_of(values)
        assert state_of(values.t().contiguous().t()) == expected
        assert state_of(wide[:, ::2]) == expected
        assert state_of(torch.cat([values, values])[3:]) == expected
        assert state_of(values[0, :1].expand(5)) == state_of(values[0, :1].repeat(5))


class TestAfter:
    def test_the_bytes_never_change(self) -> None:
        first = first_lineage(parameters()).after("group-1", b"r" * 32, b"n" * 32)
        second = first.after("group-2", b"r" * 32, b"n" * 32)
        assert (first.epoch, second.epoch) == (1, 2)
        assert first.state.hex() == "05beca4a8da0cbda1a017424194416c5bb4e4d5f1928227e04f6e36846ccea94"
        assert second.state.hex() == "0f61118a104f536485814248b87ba85eb4218f5c0e895fa29497c038da5d1a0f"

    def test_group_epoch_and_state_count(self) -> None:
        start = Lineage(0, bytes(32))
        assert start.after("a") == Lineage(0, bytes(32)).after("a")
        following = {
            start.after("a").state,
            start.after("b").state,
            Lineage(1, bytes(32)).after("a").state,
            Lineage(0, bytes(31) + b"\1").after("a").state,
            start.after("a", b"result").state,
            start.after("a", b"", b"numbers").state,
            start.after("a", b"result", b"numbers").state,
        }
        assert len(following) == 7

    @given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
    def test_only_the_same_updates_in_the_same_order_lead_to_the_same_state(
        self, ones: list[str], others: list[str]
    ) -> None:
        one = other = Lineage(0, bytes(32))
        for group_id in ones:
            one = one.after(group_id)
        for group_id in others:
            other = other.after(group_id)
        assert (one == other) == (ones == others)
        assert one.epoch == len(ones)
        assert len(one.state) == 32


class TestOtherRules:
    def test_peers_with_the_same_new_rules_stay_together(self) -> None:
        start = Lineage(7, bytes(32))
        assert start.with_rules(b"x" * 32) == start.with_rules(b"x" * 32)
        states = {start.state, start.with_rules(b"x" * 32).state, start.with_rules(b"y" * 32).state}
        assert len(states) == 3
        assert start.with_rules(b"x" * 32).epoch == 7
