"""The server optimizers against Algorithm 2 of Reddi et al. 2021, written out in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from p2pavg.optim import AutoSGD, FedAdagrad, FedAdam, FedYogi

Server = FedAdagrad | FedAdam | FedYogi
Array = NDArray[np.float64]
SERVERS: list[type[Server]] = [FedAdagrad, FedAdam, FedYogi]
SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
STEPS = 20

every_server = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(of: list[torch.nn.Parameter], step: int) -> None:
    """Set gradients from a thousandth to ten, so that each term of v matters somewhere."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in of:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)


V_RULES: dict[type[Server], Callable[[Array, Array, float], Array]] = {
    FedAdagrad: lambda v, delta, _: v + delta**2,
    FedAdam: lambda v, delta, beta2: beta2 * v + (1 - beta2) * delta**2,
    FedYogi: lambda v, delta, beta2: v - (1 - beta2) * delta**2 * np.sign(v - delta**2),
}


def reference(
    server: type[Server], x: Array, deltas: list[Array], lr: float, beta1: float, beta2: float, tau: float
) -> Array:
    """Compute lines 10 to 14 of Algorithm 2, which adds Delta."""
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        v = V_RULES[server](v, delta, beta2)
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


@every_server
@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "other options"])
def test_steps_match_algorithm_2(server: type[Server], defaults: bool) -> None:
    lr, beta1, beta2, tau = (1e-2, 0.9, 0.99, 1e-3) if defaults else (0.3, 0.5, 0.7, 0.1)
    options: dict[str, Any] = {} if defaults else {"lr": lr, "tau": tau}
    if not defaults:
        options |= {"beta1": beta1} if server is FedAdagrad else {"betas": (beta1, beta2)}
    given = parameters()
    starts = [parameter.detach().double().numpy().copy() for parameter in given]
    deltas: list[list[Array]] = [[] for _ in given]
    optimizer = server(given, **options)
    for step in range(STEPS):
        set_gradients(given, step)
        for parameter, kept in zip(given, deltas, strict=True):
            assert parameter.grad is not None
            kept.append(-parameter.grad.double().numpy())
        optimizer.step()
    for parameter, start, kept in zip(given, starts, deltas, strict=True):
        expected = reference(server, start, kept, lr, beta1, beta2, tau)
        np.testing.assert_allclose(parameter.detach().double().numpy(), expected, rtol=1e-6, atol=1e-6)


@every_server
def test_parameters_without_a_gradient_stay_as_they_are(server: type[Server]) -> None:
    given = parameters()
    before = [parameter.detach().clone() for parameter in given]
    optimizer = server(given)
    set_gradients(given, 0)
    given[1].grad = None
    optimizer.step()
    assert torch.equal(given[1], before[1])
    assert given[1] not in optimizer.state
    assert not torch.equal(given[0], before[0])


@every_server
def test_each_group_has_its_own_options(server: type[Server]) -> None:
    slow, fast = parameters()[1], parameters()[1]
    start = slow.detach().clone()
    groups: list[dict[str, Any]] = [{"params": [slow]}, {"params": [fast], "lr": 0.1}]
    optimizer = server(groups, lr=0.01)
    set_gradients([slow], 0)
    set_gradients([fast], 0)
    optimizer.step()
    torch.testing.assert_close(fast.detach() - start, 10 * (slow.detach() - start))


@every_server
def test_a_closure_is_called_with_gradients_enabled(server: type[Server]) -> None:
    x = torch.nn.Parameter(torch.tensor([3.0]))

    def closure() -> float:
        loss = x.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer = server([x])
    assert optimizer.step(closure) == 9.0
    assert x.item() < 3.0
    assert optimizer.step() is None


WRONG: list[tuple[type[Server | AutoSGD], dict[str, Any], str]] = [
    *[
        (FedAdam, {"lr": lr}, f"lr must be finite and not negative, got {lr!r}")
        for lr in (-1e-3, math.inf, "1")
    ],
    *[
        (FedYogi, {"tau": tau}, f"tau must be finite and above 0, got {tau!r}")
        for tau in (0.0, math.nan, None)
    ],
    *[
        (FedAdagrad, {"beta1": beta1}, "beta1 must be at least 0 and below 1, got ")
        for beta1 in (1.0, math.nan)
    ],
    (AutoSGD, {"lr": math.nan}, "lr must be finite and not negative, got nan"),
    (AutoSGD, {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
    (AutoSGD, {"momentum": "0.9"}, "momentum must be at least 0 and below 1, got '0.9'"),
    (FedAdam, {"betas": (1.0, 0.99)}, "betas[0] must be at least 0 and below 1, got 1.0"),
    (FedYogi, {"betas": (0.9, -0.1)}, "betas[1] must be at least 0 and below 1, got -0.1"),
    (FedAdam, {"betas": (0.9,)}, "betas must be two numbers, got (0.9,)"),
    (FedAdam, {"betas": 0.9}, "betas must be two numbers, got 0.9"),
]


@pytest.mark.parametrize(("server", "options", "message"), WRONG)
def test_wrong_arguments_are_named(
    server: type[Server | AutoSGD], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        server(parameters(), **options)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        server([{"params": parameters(), **options}])


@every_server
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused(server: type[Server], kind: str) -> None:
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64 if kind == "complex" else torch.float32))
    gradient = torch.ones_like(x)
    x.grad = gradient.to_sparse() if kind == "sparse" else gradient
    with pytest.raises(
        RuntimeError, match=f"{server.__name__} needs dense and real gradients, got a {kind} one"
    ):
        server([x]).step()
