"""Optimizers for the outer step of local updates: those of federated learning, and SGD that chooses its rate.

Source of the former: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. Peers train separately for a while and average their changes. Then they take one
step from their common *anchor*, the parameters at which they began. The paper averages Delta = local - anchor and adds
it. Here
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
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from p2pavg.optim.ranks.shards import total_norm

NormOf = Callable[[Sequence[torch.Tensor]], float]
"""Returns the L2 norm of tensors."""


SAMPLE = 2**20
"""Values of an average that are kept for the next one, to correlate the two: 4 MiB. The error is 0.1 %."""
RECENT = 0.2
"""Weight of the newest correlation in their mean: about the last five count. One alone is noise."""


class _OuterOptimizer(Optimizer):
    """The step of all parameter groups; a subclass takes that of one."""

    @abstractmethod
    def _take(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Step the parameters of a group that have a ``.grad``; there is at least one."""

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
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in given:
                if parameter.grad.is_sparse or parameter.grad.is_complex():
                    kind = "a sparse" if parameter.grad.is_sparse else "a complex"
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense and real gradients, got {kind} one"
                    )
            if given:
                self._take(given, group)
        return loss


class AutoSGD(_OuterOptimizer):
    """SGD with Nesterov momentum whose rate and memory follow from the averages, for the outer step of DiLoCo.

    With an average g and the average before it g':

        r <- 0.8 r + 0.2 <g, g'> / (|g| |g'|)
        m <- momentum min(|g| / |g'|, 1) m + g
        x <- x - lr (1 - momentum max(r, 0)) (g + momentum m)

    **The rate.** If averages k steps apart have the correlation r^k, the buffer m has the length |g| / (1 - momentum r)
    along the average: that is what momentum multiplies a step by. It is 1 for averages that are uncorrelated, and 10
    for a momentum of 0.9 and averages that are all the same. The rate takes it back, so that a step has the same length
    along each average as with ``lr`` and uncorrelated ones. Averages of short intervals are correlated, since inner
    optimizers have momentum too, and there the rate of long intervals overshoots. The rate is between ``lr`` and ``lr
    (1 - momentum)``. (Topollai et al. 2026, arXiv 2605.28585, study outer momentum across intervals.)

    **The memory.** Averages are sums of inner steps, so their length falls with the inner rate. A fixed momentum would
    hold the long steps of an earlier rate just when training should settle. One long average must not blow up the
    buffer, so it does not grow with them.

    All peers compute the same rate, since they have the same averages. Lengths are summed in float64, and what decides
    is rounded to 1/4096, so that another order of the sums changes nothing. Tensors with a ``.grad`` belong to one
    average: each fragment of a model has a rate of its own. Lengths and products are those of a sample of 2**20 values.

    State of each parameter: ``momentum_buffer``, of its shape, dtype and device; ``previous``, its part of the sample,
    1-D; ``correlation``, r as float32, the same for all parameters of a fragment.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: rate for uncorrelated averages, 0 or more; DiLoCo's 0.7.
        momentum: 0 to below 1; DiLoCo's 0.9. With 0 it is SGD with ``lr``.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    rate: float | None = None
    """The rate of the last step."""
    norm_of: NormOf = staticmethod(total_norm)
    """Returns the L2 norm of tensors; over all ranks, if several have parts of them."""

    def __init__(self, params: ParamsT, lr: float = 0.7, *, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; raise ValueError, with the option's name, if one is out of range."""
        options = self.defaults | param_group
        _check("lr", options["lr"], 0.0 <= _number(options["lr"]) < math.inf, "finite and not negative")
        momentum = options["momentum"]
        _check("momentum", momentum, 0.0 <= _number(momentum) < 1.0, "at least 0 and below 1")
        super().add_param_group(param_group)

    def _take(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A rank may hold empty shards only.
        stride = max(-(-sum(gradient.numel() for gradient in gradients) // SAMPLE), 1)
        sample = [gradient.reshape(-1)[::stride].clone() for gradient in gradients]
        kept, correlation = 1.0, 0.0
        states = [self.state[parameter] for parameter in parameters]
        if all(states):  # not in the first step
            kept, correlation = self._compared(sample, states)
        self.rate = lr * (1 - momentum * max(correlation, 0.0))
        for parameter, state, gradient, values in zip(parameters, states, gradients, sample, strict=True):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["previous"] = values
            state["correlation"] = torch.tensor(correlation, dtype=torch.float32, device="cpu")
            buffer = state["momentum_buffer"].mul_(momentum * kept).add_(gradient)
            parameter.add_(gradient.add(buffer, alpha=momentum), alpha=-self.rate)

    def _compared(self, sample: list[torch.Tensor], states: list[dict[str, Any]]) -> tuple[float, float]:
        """Return how much of the buffer stays, and the mean correlation, with an average that has this sample."""
        before = [state["previous"] for state in states]
        both = [one + other for one, other in zip(sample, before, strict=True)]
        if sample[0].is_meta:  # a trial of another peer's state, with tensors that have no data
            return 1.0, 0.0
        lengths = self.norm_of(sample), self.norm_of(before), self.norm_of(both)
        return memory_of(*lengths[:2]), mean_correlation(float(states[0]["correlation"]), *lengths)


def memory_of(length: float, before: float) -> float:
    """Return what is kept of the momentum beside its own decay, 0 to 1, in steps of 1/4096.

    Args:
        length, before: L2 norms of the present average and of the one before it.
    """
    # NaN and infinity come from another peer's state, which may hold anything.
    return _rounded(length / before) if length < before < math.inf else 1.0


def mean_correlation(mean: float, length: float, before: float, both: float) -> float:
    """Return the mean of the correlations of successive averages with a new one added.

    Args:
        mean: without it.
        length, before, both: L2 norms of the present average, of the one before it, and of their sum.
    """
    mean = mean if abs(mean) <= 1 else 0.0  # of another peer's state, as are infinite lengths
    if not (0 < length < math.inf and 0 < before < math.inf and both < math.inf):
        return mean
    # |g + g'|^2 = |g|^2 + 2 <g, g'> + |g'|^2, so norms, which ranks can add up, tell the product.
    product = (both * both - length * length - before * before) / 2
    return (1 - RECENT) * mean + RECENT * _rounded(product / (length * before))


def _rounded(value: float) -> float:
    return round(value * 4096) / 4096


class _ServerOptimizer(_OuterOptimizer):
    """Algorithm 2 without its rule for v, which the subclasses add."""

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

    def _take(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"] if "betas" in group else (group["beta1"], 0.0)
        for parameter in parameters:
            assert parameter.grad is not None
            gradient, state = parameter.grad, self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["v"] = torch.full_like(parameter, group["tau"] ** 2)
            m, v = state["m"], state["v"]
            m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            self._accumulate(v, gradient.square(), beta2)
            parameter.addcdiv_(m, v.sqrt().add_(group["tau"]), value=-group["lr"])


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
