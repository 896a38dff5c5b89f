"""The part of the optimizers of a run that makes them optimizers of torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch.optim import Optimizer

from p2pavg.base.result import Success
from p2pavg.optim.base.batches import NO_METRICS
from p2pavg.optim.base.report import StepReport

L = TypeVar("L")


class TorchOptimizer(Optimizer):
    """A torch optimizer whose groups, state and defaults are those of another one.

    A ``LRScheduler`` can wrap it, a ``GradScaler`` can step it, and torch's hooks work.
    """

    _step_supports_amp_scaling = True
    """A ``GradScaler`` then calls ``step`` for every batch, and tells it if the gradients overflow. Otherwise it would
    leave the call out, and there would be no report."""

    def _become_optimizer(self) -> None:
        # Optimizer.__init__ would make groups of its own. This makes torch's hooks alone, and patches `step`.
        super().__setstate__({})
        self.report: StepReport | None = None
        """The report of the last ``step``, without the averaged tensors; ``None`` before the first one."""

    def _keep(self, report: StepReport) -> None:
        """Keep the report for callers that do not get it from ``step``."""
        result = report.result
        if isinstance(result, Success):  # its tensors are as large as the model
            report = replace(report, result=replace(result, averaged=[]))
        self.report = report

    # ------------------------------------------------------------------ steps

    @overload  # type: ignore[override]  # torch's step returns nothing without a closure; this one a report
    def step(
        self, closure: None = None, *, samples: float | None = None, metrics: Mapping[str, float] = NO_METRICS
    ) -> StepReport: ...

    @overload
    def step(
        self,
        closure: Callable[[], L],
        *,
        samples: float | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> L: ...

    def step(
        self,
        closure: Callable[[], L] | None = None,
        *,
        samples: float | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> StepReport | L:
        """Take one batch, whose gradients the parameters hold, and the update if it is due.

        Args:
            closure: function that zeroes the gradients, computes the loss and its gradients, and returns the loss. It
                is called once.
            samples: size of the batch; the gradients must be the mean over its samples. ``batch_size`` or
                ``samples_of`` if not given. With a ``process_group``, the total of all its ranks, the same number on
                each.
            metrics: measurements on the batch, e.g. ``{"loss": loss.item()}``; 15 at most, with those of :meth:`note`.
                If one is NaN or infinite, the batch is left out, and :attr:`StepReport.skipped` says so.

        Returns:
            The report: progress of this peer and its run. If ``updated`` is true, the parameters have changed by an
            average. With a closure, its return value, as in torch; :attr:`report` has the report.

        Raises:
            p2pavg.AccumulateError: :class:`AveragedOptimizer` was given a gradient that is not finite, or
                ``samples`` that is not a number above 0; nothing is accumulated. With a ``process_group``, all its
                ranks raise. If the cause is neither a gradient nor ``samples``, the ranks' earlier accumulated
                gradients are discarded too.
            TypeError: the number of samples is not known.
            ValueError: ``inner`` trains other parameters than before, a buffer changes without being averaged, the
                parameters are not those of the loaded state, or for :class:`LocalUpdates`, ``samples`` is not a number
                above 0 or a metric is not a number. Nothing has changed then.
            p2pavg.RunEndedError: the run has ended without this peer, which has missed the last updates, and no peer is
                left that has them.
            p2pavg.ClosedError: the averager is closed.
        """
        loss: L | None = None
        if closure is not None:
            # As torch does: the caller may step under `no_grad`.
            with torch.enable_grad():
                loss = closure()
        report = self._step_once(samples, metrics)
        self._keep(report)
        return report if closure is None else cast(L, loss)

    @abstractmethod
    def _step_once(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        """Take one batch, after the closure; see :meth:`step`."""

    @property
    def updated(self) -> bool:
        """True if the last ``step`` has taken an update."""
        return self.report is not None and self.report.updated

    @property
    @abstractmethod
    def _stepped(self) -> Optimizer:
        """The optimizer that has the parameter groups."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of ``inner``: the same list, so a rate that is set here is set there."""
        return self._stepped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._stepped.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of ``inner``, by parameter."""
        return self._stepped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._stepped.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of ``inner``."""
        return self._stepped.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._stepped.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:  # noqa: ARG002 - torch's signature
        """Refuse: the peers of a run average the parameters that they began with.

        Raises:
            RuntimeError: always; the message says what to do.
        """
        raise RuntimeError(
            "a parameter group cannot be added: all peers of a run average the parameters that `inner` had when this"
            " optimizer was made. Add the group to `inner`, close the averager, and open another one for a new"
            " optimizer of it, on all peers at the same update"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to an averager, which is a running peer."
            " Save its state_dict(), and load it into an optimizer of the other process"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__getstate__()

    # ------------------------------------------------------------------ states, with torch's hooks

    @abstractmethod
    def _state_dict(self) -> dict[str, Any]:
        """Return the state that :meth:`state_dict` returns, before its hooks."""

    @abstractmethod
    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after the hooks of :meth:`load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a peer needs beside the model's state to continue from here, as plain values and tensors.

        ``torch.load(weights_only=True)`` reads it. Do not call it while a round of ``overlap`` runs: the state would be
        from before its update.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that this or another peer saved; load the model's state too.

        What was accumulated is discarded, since it belongs to other parameters. The next ``step`` checks that the
        model's parameters belong to the state. With local updates, load the model's state before this one. The local
        steps of another peer since its last outer step are left out: the parameters become the anchor. A peer without
        an identity file has a new id at each start, so its own state counts as another peer's.

        Raises:
            ValueError: ``state_dict`` is malformed, or of an optimizer of another kind.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        self._load_state_dict(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # ------------------------------------------------------------------ scaled gradients

    @torch.no_grad()
    def _unscale(self) -> None:
        """Divide the gradients by the scale of a ``GradScaler`` that has not done so itself."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return
        inverse = scale.double().reciprocal().float()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
