"""Any sequence of calls and rounds: the mean of everything that was not used up or forgotten, and its weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.accumulation import Accumulation

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3)
weights = st.floats(1e-6, 1e6)
calls = st.tuples(st.just("add"), values, weights)
operations = st.lists(
    calls | st.sampled_from([("take",), ("give back",), ("release",), ("clear",)]), min_size=1, max_size=30
)

Call = tuple[torch.Tensor, float]


def check(found: torch.Tensor, weight: float, expected: Sequence[Call]) -> None:
    total = sum(weight for _, weight in expected)
    mean = sum((values.double() * (weight / total) for values, weight in expected), torch.zeros(3).double())
    scale = max(values.abs().max().item() for values, _ in expected)
    # Each call rounds the running mean once or twice, by at most an ulp of the largest value.
    torch.testing.assert_close(found.double(), mean, rtol=0, atol=2**-22 * scale * len(expected) + 1e-30)
    assert abs(weight - total) <= 1e-9 * total


@settings(deadline=None)
@given(operations)
def test_nothing_is_lost_and_nothing_counts_twice(operations: list[tuple[object, ...]]) -> None:
    accumulation = Accumulation()
    waiting: list[Call] = []
    in_round: list[Call] = []
    taken = None
    for operation in operations:
        match operation:
            case ("add", list() as numbers, float() as weight):
                tensor = torch.tensor(numbers, dtype=torch.float32)
                accumulation.add([tensor[:1].view(()), tensor[1:]], weight)
                waiting.append((tensor, weight))
            case ("take",) if taken is None:
                taken = accumulation.take()
                assert (taken is None) == (not waiting)
                if taken is not None:
                    check(taken.mean, taken.weight, waiting)
                    waiting, in_round = [], waiting
            case ("give back",) if taken is not None:
                accumulation.give_back(taken)
                waiting, in_round, taken = waiting + in_round, [], None
            case ("release",) if taken is not None:
                if in_round:
                    check(taken.mean, taken.weight, in_round)
                accumulation.release(taken)
                in_round, taken = [], None
            case ("clear",):
                accumulation.clear()
                waiting, in_round = [], []
        assert (accumulation.weight == 0) == (not waiting)
    final = accumulation.mean()
    if not waiting:
        assert final is None
        return
    assert isinstance(final, list)
    check(torch.cat([tensor.reshape(-1) for tensor in final]), accumulation.weight, waiting)
