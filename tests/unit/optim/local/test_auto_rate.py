"""SGD that chooses its rate: against its formula, and the same on all peers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import StateError
from p2pavg.optim import AutoSGD
from p2pavg.optim.catching_up.state_check import checked_optimizer, saved_by
from p2pavg.optim.local.outer import mean_correlation, memory_of
from p2pavg.optim.ranks.shards import total_norm

SHAPES = [(30, 40), (50,), (2, 1, 3)]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def step(optimizer: AutoSGD, gradients: Sequence[torch.Tensor]) -> float:
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.rate is not None
    return optimizer.rate


def averages(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.0)])
def test_steps_match_the_formula(lr: float, momentum: float) -> None:
    held = parameters()
    optimizer = AutoSGD(held, lr, momentum=momentum)
    x, m, r = flat(held), torch.zeros(1256, dtype=torch.float64), 0.0
    before, steady = torch.empty(0), averages(99)
    for number in range(12):
        given_ = [0.7 * a + b for a, b in zip(averages(number, 2.0 / (1 + number)), steady, strict=True)]
        g, kept = flat(given_), 1.0
        if number:
            r = 0.8 * r + 0.2 * float(g @ before / (g.norm() * before.norm()))
            kept = min(float(g.norm() / before.norm()), 1.0)
        m = momentum * kept * m + g
        rate = lr * (1 - momentum * max(r, 0.0))
        x, before = x - rate * (g + momentum * m), g
        assert step(optimizer, given_) == pytest.approx(rate, rel=1e-3)
        torch.testing.assert_close(flat(held), x, rtol=2e-3, atol=2e-3)


def test_averages_that_never_change_have_the_rate_that_their_sum_needs() -> None:
    held, steady = parameters(), averages(1)
    optimizer = AutoSGD(held)
    rates = [step(optimizer, steady) for _ in range(200)]
    assert rates[0] == 0.7
    assert rates[-1] == pytest.approx(0.07, rel=1e-3)
    assert rates == sorted(rates, reverse=True)
    # Then a step is as long as one average times `lr`, and by the Nesterov term no more than twice that.
    before = flat(held)
    step(optimizer, steady)
    assert 0.69 < float((before - flat(held)).norm() / flat(steady).norm()) < 1.4


def test_averages_that_contradict_each_other_do_not_raise_the_rate() -> None:
    optimizer, one = AutoSGD(parameters()), averages(1)
    for sign in (1, -1, 1, -1, -1):
        assert step(optimizer, [sign * tensor for tensor in one]) <= 0.7


def test_the_momentum_shrinks_with_the_averages_and_does_not_grow_with_them() -> None:
    assert memory_of(2.0, 0.0) == memory_of(2.0, 2.0) == memory_of(20.0, 2.0) == 1.0
    assert memory_of(1.0, 2.0) == 0.5
    assert memory_of(0.0, 2.0) == 0.0
    optimizer, one = AutoSGD(parameters()), averages(1)
    step(optimizer, one)
    step(optimizer, [1e-3 * tensor for tensor in one])
    states = [optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"]]
    assert total_norm([state["momentum_buffer"] for state in states]) < 0.005 * total_norm(one)


def test_a_large_average_is_compared_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.optim.local.outer.SAMPLE", 1000)
    optimizer = AutoSGD([torch.nn.Parameter(torch.zeros(300, 100))])
    steady = torch.randn(300, 100, generator=torch.Generator().manual_seed(100))
    rates = []
    for number in range(40):
        mixed = steady + torch.randn(300, 100, generator=torch.Generator().manual_seed(number))
        rates.append(step(optimizer, [mixed]))
    (state,) = optimizer.state.values()
    assert state["previous"].shape == (1000,)
    assert rates[-1] == pytest.approx(0.7 * (1 - 0.9 * 0.5), rel=0.05)  # half of their energy is the same


def test_an_average_of_zeros_moves_nothing_and_harms_nothing() -> None:
    held = parameters()
    optimizer = AutoSGD(held)
    nothing = [torch.zeros(shape) for shape in SHAPES]
    assert step(optimizer, nothing) == 0.7
    step(optimizer, averages(1))
    before = flat(held)
    step(optimizer, nothing)
    assert torch.equal(flat(held), before)
    assert math.isfinite(step(optimizer, averages(2)))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.integers(1, 7))
def test_another_order_of_the_sums_gives_the_same_rate(seed: int, cuts: int) -> None:
    """Peers have other processors, whose sums of the same values differ in the last bits."""

    def in_pieces(tensors: Sequence[torch.Tensor]) -> float:
        return math.sqrt(sum(total_norm(part.reshape(-1).chunk(cuts)) ** 2 for part in reversed(tensors)))

    one, other = AutoSGD(parameters()), AutoSGD(parameters())
    other.norm_of = in_pieces
    for number in range(5):
        given_ = averages(seed + number)
        assert step(one, given_) == step(other, given_)
    assert torch.equal(flat(one.param_groups[0]["params"]), flat(other.param_groups[0]["params"]))


def test_each_fragment_has_a_length_of_its_own() -> None:
    held = parameters()
    optimizer, alone = AutoSGD(held), AutoSGD([torch.nn.Parameter(torch.zeros(SHAPES[0]))])
    for number in range(6):
        large, small = averages(number), averages(50 + number, 1e-3)
        held[0].grad = large[0]
        optimizer.step()
        optimizer.zero_grad()
        rate = optimizer.rate
        held[1].grad = small[1]
        optimizer.step()
        optimizer.zero_grad()
        assert rate == step(alone, large[:1])


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    held = parameters()
    optimizer = AutoSGD(held)
    for number in range(4):
        step(optimizer, averages(number, 1 / (1 + number)))
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in held]
    other = AutoSGD(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(4, 8):
        assert step(optimizer, averages(number)) == step(other, averages(number))
    assert torch.equal(flat(held), flat(others))


def test_empty_shards_have_a_step_too() -> None:
    optimizer = AutoSGD([torch.nn.Parameter(torch.zeros(0))])
    assert [step(optimizer, [torch.zeros(0)]) for _ in range(2)] == [0.7, 0.7]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -7.0])
def test_a_correlation_that_is_none_counts_as_zero(wrong: float) -> None:
    optimizer, steady = AutoSGD(parameters()), averages(1)
    step(optimizer, steady)
    for state in optimizer.state.values():
        state["correlation"].fill_(wrong)
    assert step(optimizer, steady) == pytest.approx(0.7 * (1 - 0.9 * 0.2))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e38])
def test_another_peers_previous_average_may_hold_anything(wrong: float) -> None:
    """A state from a stranger is checked for shapes. A step with its numbers has to end."""
    held = parameters()
    optimizer = AutoSGD(held)
    step(optimizer, averages(1))
    optimizer.state[held[0]]["previous"].fill_(wrong)
    assert 0.07 <= step(optimizer, averages(2)) <= 0.7


def test_a_state_of_other_shapes_is_refused_and_one_that_lacks_a_parameter_begins_anew() -> None:
    held = parameters()
    optimizer = AutoSGD(held)
    step(optimizer, averages(1))
    for name, tensor in (
        ("previous", torch.zeros(7)),
        ("correlation", torch.zeros(3)),
        ("momentum_buffer", None),
    ):
        state = copy.deepcopy(saved_by(optimizer))
        if tensor is None:
            del state["state"][0][name]
        else:
            state["state"][0][name] = tensor
        with pytest.raises(StateError, match=name):
            checked_optimizer(AutoSGD(parameters()), state)
    state = copy.deepcopy(saved_by(optimizer))
    del state["state"][1]
    other = AutoSGD(parameters())
    other.load_state_dict(checked_optimizer(other, state))
    assert step(other, averages(1)) == 0.7


def test_the_mean_of_correlations_follows_from_lengths_alone() -> None:
    assert mean_correlation(0.0, 3.0, 4.0, 5.0) == 0.0  # at right angles
    assert mean_correlation(0.5, 1.0, 2.0, 3.0) == pytest.approx(0.8 * 0.5 + 0.2)
    assert mean_correlation(0.5, 2.0, 2.0, 0.0) == pytest.approx(0.8 * 0.5 - 0.2)
    assert mean_correlation(0.5, 0.0, 2.0, 2.0) == mean_correlation(0.5, 2.0, 0.0, 2.0) == 0.5
