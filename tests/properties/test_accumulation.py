"""Any sequence of calls and rounds leaves the means and weight of everything not used up or discarded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.vector.accumulation import Accumulation, Contribution

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3)
weights = st.floats(1e-6, 1e6)
calls = st.tuples(st.just("add"), values, weights)
found = st.tuples(st.just("found out"), st.integers(0, 5), st.booleans())
single = calls | found | st.sampled_from([("take",), ("give back",), ("release",), ("cut off",), ("clear",)])
ends = st.sampled_from([("give back",), ("release",), ("cut off",)])
a_round = st.tuples(calls, st.just(("take",)), single, ends)
operations = st.lists(st.tuples(single) | a_round, min_size=1, max_size=12).map(
    lambda steps: [operation for step in steps for operation in step]
)

Call = tuple[torch.Tensor, float]


def check(found: Contribution, expected: Sequence[Call]) -> None:
    """Check the mean, the weight and the metrics: each call's only metric is its first value."""
    total = sum(weight for _, weight in expected)
    mean = sum((values.double() * (weight / total) for values, weight in expected), torch.zeros(3).double())
    scale = max(values.abs().max().item() for values, _ in expected)
    # Each call rounds the running mean once or twice, each time by at most an ulp of the largest value.
    atol = 2**-22 * scale * len(expected) + 1e-30
    torch.testing.assert_close(found.mean.double(), mean, rtol=0, atol=atol)
    assert abs(found.weight - total) <= 1e-9 * total
    assert found.metrics.means.keys() == {"first"}
    assert abs(found.metrics.means["first"] - float(mean[0])) <= atol


@settings(deadline=None)
@given(operations)
def test_no_contribution_is_lost_or_counted_twice(operations: list[tuple[object, ...]]) -> None:
    accumulation = Accumulation()
    waiting: list[Call] = []
    in_round: list[Call] = []
    taken: Contribution | None = None
    # Withheld contributions; those cleared since are empty.
    unresolved: list[tuple[Contribution, list[Call]]] = []
    for operation in operations:
        match operation:
            case ("add", list() as numbers, float() as weight):
                tensor = torch.tensor(numbers, dtype=torch.float32)
                accumulation.add([tensor[:1].view(()), tensor[1:]], weight, {"first": tensor[0].item()})
                waiting.append((tensor, weight))
            case ("take",) if taken is None:
                taken = accumulation.take()
                assert (taken is None) == (not waiting)
                if taken is not None:
                    check(taken, waiting)
                    waiting, in_round = [], waiting
            case ("give back",) if taken is not None:
                accumulation.give_back(taken)
                waiting, in_round, taken = waiting + in_round, [], None
            case ("release",) if taken is not None:
                if in_round:
                    check(taken, in_round)
                accumulation.release(taken)
                in_round, taken = [], None
            case ("cut off",) if taken is not None:
                accumulation.withhold(taken)
                unresolved.append((taken, in_round))
                in_round, taken = [], None
            case ("found out", int() as index, bool() as used) if unresolved:
                contribution, its = unresolved.pop(index % len(unresolved))
                if its:
                    check(contribution, its)
                accumulation.found_out(contribution, used=used)
                waiting += [] if used else its
            case ("clear",):
                accumulation.clear()
                waiting, in_round = [], []
                unresolved = [(contribution, []) for contribution, _ in unresolved]
        assert (accumulation.weight == 0) == (not waiting)
        expected = sum(weight for _, its in unresolved for _, weight in its)
        assert (accumulation.unresolved_weight == 0) == (expected == 0)
        assert abs(accumulation.unresolved_weight - expected) <= 1e-9 * 40e6
    for contribution, its in unresolved:
        accumulation.found_out(contribution, used=False)
        waiting += its
    final, left = accumulation.mean(), accumulation.take()
    if not waiting:
        assert final is None
        assert left is None
        return
    assert isinstance(final, list)
    assert left is not None
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in final]), left.mean)
    check(left, waiting)
