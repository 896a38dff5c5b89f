"""The server optimizers of federated learning, for the outer step of local updates.

Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR
2021, Algorithm 2. Peers train separately for a while and average their changes. Then they take one step from their
common *anchor*, the parameters at which they began. The paper averages Delta = local - anchor and adds it. Here
``.grad`` holds the average of the *pseudo-gradient* g = anchor - local = -Delta, and a step subtracts, as usual in
torch:

    m <- beta1 m + (1 - beta1) g
    v <- a function of v and g^2, in which the three differ
    x <- x - lr m / (sqrt(v) + tau)

All operations are elementwise. m starts at 0 and v at tau^2, without bias correction, as in the paper. ``tau`` is the
degree of adaptivity, in units of the pseudo-gradient: the smaller it is, the more equal are the step lengths of all
elements.

No I/O, no clock.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class _ServerOptimizer(Optimizer):
    """Algorithm 2 without its rule for v, which the subclasses add."""

    @staticmethod
    @abstractmethod
    def _betas(group: dict[str, Any]) -> tuple[float, float]:
        """Return beta1 and beta2 of a parameter group."""

    @staticmethod
    @abstractmethod
    def _accumulate(v: torch.Tensor, squared: torch.Tensor, beta2: float) -> None:
        """Update ``v`` in place with ``squared``, the g^2 of this step; both have the parameter's shape."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in every torch optimizer.

        Raises:
            ValueError: an option of the group is out of range; the message names it.
        """
        options = self.defaults | param_group
        _check("lr", options["lr"], 0.0 <= _number(options["lr"]) < math.inf, "finite and not negative")
        _check("tau", options["tau"], 0.0 < _number(options["tau"]) < math.inf, "finite and above 0")
        for name, beta in _named_betas(options):
            _check(name, beta, 0.0 <= _number(beta) < 1.0, "at least 0 and below 1")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one outer step. Parameters without a ``.grad`` keep their values and their state.

        Args:
            closure: function that sets the ``.grad``; it is called first, with gradients enabled.

        Returns:
            The closure's return value, or ``None`` without a closure.

        Raises:
            RuntimeError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse or gradient.is_complex():
            kind = "a sparse" if gradient.is_sparse else "a complex"
            raise RuntimeError(f"{type(self).__name__} needs dense and real gradients, got {kind} one")
        (beta1, beta2), tau = self._betas(group), group["tau"]
        state = self.state[parameter]
        if not state:
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.full_like(parameter, tau**2)
        m, v = state["m"], state["v"]
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        self._accumulate(v, gradient.square(), beta2)
        parameter.addcdiv_(m, v.sqrt().add_(tau), value=-group["lr"])


class FedAdagrad(_ServerOptimizer):
    """v <- v + g^2; then x <- x - lr m / (sqrt(v) + tau). Reddi et al. 2021, Algorithm 2, FedAdagrad.

    State: ``m`` and ``v``, each of the parameter's shape, dtype and device.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the server's learning rate eta, 0 or more; in units of the parameters, since a step's direction has none.
        beta1: how much of m stays from step to step, 0 to below 1. The paper's experiments have 0 here, no momentum.
        tau: degree of adaptivity, above 0, in units of the pseudo-gradient.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-2, *, beta1: float = 0.9, tau: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "tau": tau})

    @staticmethod
    def _betas(group: dict[str, Any]) -> tuple[float, float]:
        return group["beta1"], 0.0

    @staticmethod
    def _accumulate(v: torch.Tensor, squared: torch.Tensor, beta2: float) -> None:  # noqa: ARG004
        v.add_(squared)


class FedAdam(_ServerOptimizer):
    """v <- beta2 v + (1 - beta2) g^2; then x <- x - lr m / (sqrt(v) + tau). Reddi et al. 2021, Algorithm 2, FedAdam.

    Unlike torch's Adam: no bias correction, v starts at tau^2.

    State: ``m`` and ``v``, each of the parameter's shape, dtype and device.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the server's learning rate eta, 0 or more; in units of the parameters, since a step's direction has none.
        betas: how much of m and of v stays from step to step, each 0 to below 1.
        tau: degree of adaptivity, above 0, in units of the pseudo-gradient.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @staticmethod
    def _betas(group: dict[str, Any]) -> tuple[float, float]:
        beta1, beta2 = group["betas"]
        return beta1, beta2

    @staticmethod
    def _accumulate(v: torch.Tensor, squared: torch.Tensor, beta2: float) -> None:
        v.mul_(beta2).add_(squared, alpha=1 - beta2)


class FedYogi(FedAdam):
    """v <- v - (1 - beta2) g^2 sign(v - g^2); then x <- x - lr m / (sqrt(v) + tau).

    Reddi et al. 2021, Algorithm 2, FedYogi. v grows about as fast as FedAdam's, but falls only by the small g^2 that
    comes: after a large pseudo-gradient steps stay short for longer. Arguments, state and errors are FedAdam's.
    """

    @staticmethod
    def _accumulate(v: torch.Tensor, squared: torch.Tensor, beta2: float) -> None:
        v.sub_((v - squared).sign_().mul_(squared), alpha=1 - beta2)


def _named_betas(options: dict[str, Any]) -> list[tuple[str, object]]:
    if "betas" not in options:
        return [("beta1", options["beta1"])]
    betas = options["betas"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    _check("betas", betas, pair, "two numbers")
    return [(f"betas[{index}]", beta) for index, beta in enumerate(betas)]


def _number(value: object) -> float:
    """Return a number as it is, and NaN, which is in no range, for anything else."""
    return value if isinstance(value, int | float) else math.nan


def _check(name: str, value: object, good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {what}, got {value!r}")
