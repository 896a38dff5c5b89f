"""Peers whose ranks hold the same parameters: rank 0 trains with the other peers, and the other ranks copy it.

With ``DistributedDataParallel`` the ranks of a peer reduce their gradients among themselves, so each rank could take
the same step. Here rank 0 takes it for all of them. To the other peers, such a peer is a peer of one process: it
averages with peers of any number of ranks, fetches their states, and offers its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from p2pavg.errors import AccumulateError, ClosedError, P2PAvgError
from p2pavg.optim.averaged import AveragedOptimizer
from p2pavg.optim.local import LocalUpdates
from p2pavg.optim.report import StepReport
from p2pavg.optim.shards import Ranks
from p2pavg.result import Success

if TYPE_CHECKING:
    import torch.distributed as dist

_RAISED: tuple[type[Exception], ...] = (AccumulateError, ClosedError, ValueError)
"""Errors that all ranks raise as they are; the other ranks raise any other one as a RuntimeError."""


@dataclass(frozen=True, slots=True)
class _Told:
    """The outcome of a step of rank 0, for the other ranks."""

    changed: bool
    """True if the parameters may be other ones than before."""
    report: StepReport | None = None
    error: int | None = None
    """Number of the error's type in :data:`_RAISED`; -1 for any other one, ``None`` without an error."""
    text: str = ""


class ReplicatedOptimizer:
    """Takes the steps of a peer whose ranks hold the same parameters, as with ``DistributedDataParallel``.

    Rank 0 has the peer's averager and optimizer. When it has changed the parameters, it broadcasts them and the model's
    buffers to the other ranks, which need no optimizer. All methods are called on all ranks together::

        model = DistributedDataParallel(network)
        optimizer = None
        if rank == 0:
            inner = torch.optim.SGD(network.parameters(), lr=0.1)
            state = RunState(network, directory="run-state")
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=4096, state=state)
        replicas = ReplicatedOptimizer(optimizer, network)
        for inputs, targets in batches:
            replicas.zero_grad()
            loss_of(model(inputs), targets).backward()
            report = replicas.step(samples=len(inputs) * dist.get_world_size())

    The other ranks wait in :meth:`step` for rank 0, which waits for other peers, and fetches the run's state when this
    peer is behind. So the process group's timeout has to be longer than the optimizer's ``sync_timeout``.

    Args:
        optimizer: on rank 0, an :class:`AveragedOptimizer`, :class:`LocalUpdates` or recipe for the parameters of
            ``network``, without a ``process_group``; ``None`` on the other ranks.
        network: the module whose parameters the ranks share, without its ``DistributedDataParallel``. Rank 0's
            parameters and buffers replace those of the other ranks.
        process_group: group of ``torch.distributed`` of this peer's ranks; all processes if not given.

    Raises:
        ValueError: ``optimizer`` is missing on rank 0, given elsewhere, has a ``process_group``, or trains other
            parameters than those of ``network``; on all ranks.
    """

    def __init__(
        self,
        optimizer: AveragedOptimizer | LocalUpdates | None,
        network: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        import torch.distributed as dist  # needs a torch that was built with it

        self._group = dist.group.WORLD if process_group is None else process_group
        self._ranks = Ranks(self._group)
        self._network = network
        self.optimizer = optimizer
        """The peer's optimizer, on rank 0 only."""
        self._epoch = 0
        found = self._ranks.gather(self._wrong())
        for rank, text in enumerate(found):
            if text:
                raise ValueError(text if found[dist.get_rank(self._group)] else f"on rank {rank}: {text}")
        self.synchronize()

    def _wrong(self) -> str:
        """Return the reason for which this rank's arguments cannot be used; empty if they can."""
        if (self.optimizer is None) == self._ranks.is_first:
            return "optimizer must be given on rank 0 of the peer, and there alone"
        if self.optimizer is None:
            return ""
        if self.optimizer.are_several:
            return "optimizer must be made without a process_group: rank 0 averages for all ranks"
        known = {id(parameter) for parameter in self._network.parameters()}
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not all(id(parameter) in known for parameter in trained):
            return "optimizer must train parameters of network"
        return ""

    @property
    def epoch(self) -> int:
        """Number of updates that the parameters have taken."""
        return self._epoch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters; call it before each backward pass."""
        self._network.zero_grad(set_to_none)

    def step(self, *, samples: float, metrics: Mapping[str, float] = MappingProxyType({})) -> StepReport:
        """Take rank 0's step, with the gradients that ``DistributedDataParallel`` has left on every rank.

        Args:
            samples: size of the batch of all ranks together; rank 0's number counts.
            metrics: as for the optimizer; rank 0's count.

        Returns:
            Rank 0's report, on every rank. On the other ranks a result has no averaged tensors.

        Raises:
            p2pavg.AccumulateError, p2pavg.ClosedError, ValueError: as the optimizer's ``step``; on all ranks.
            RuntimeError: on the other ranks, if rank 0 raised another error.
        """
        mine: list[StepReport | Exception] = []
        told = self._ranks.as_the_first(lambda: self._act(samples, metrics, mine))
        if told.changed:
            self._broadcast()
        if mine:  # on rank 0
            found = mine[0]
            if isinstance(found, Exception):
                raise found
            self._epoch = found.epoch
            return found
        if told.error is not None:
            kind = _RAISED[told.error] if told.error >= 0 else RuntimeError
            raise kind(f"on rank 0 of this peer: {told.text}")
        assert told.report is not None
        self._epoch = told.report.epoch
        return told.report

    def _act(self, samples: float, metrics: Mapping[str, float], mine: list[StepReport | Exception]) -> _Told:
        """Take the step on rank 0; put its report or error into ``mine``, and return it for the other ranks."""
        assert self.optimizer is not None
        before = self._version()
        try:
            report = self.optimizer.step(samples=samples, metrics=metrics)
        except Exception as error:  # noqa: BLE001 - raised again after the other ranks have heard of it
            mine.append(error)
            kinds = [number for number, kind in enumerate(_RAISED) if isinstance(error, kind)]
            other = 0 if isinstance(error, P2PAvgError) else -1
            return _Told(
                changed=self._version() != before, error=kinds[0] if kinds else other, text=str(error)
            )
        mine.append(report)
        result = report.result
        if isinstance(result, Success):
            result = replace(result, averaged=[])
        return _Told(changed=self._version() != before, report=replace(report, result=result))

    def _version(self) -> object:
        """Return a value that is another one after the optimizer has changed the parameters."""
        if not isinstance(self.optimizer, AveragedOptimizer):
            return object()  # local updates change them in every step
        return self.optimizer.lineage, self.optimizer.states_loaded

    def synchronize(self) -> None:
        """Replace the other ranks' parameters and buffers by rank 0's; call it after a state was loaded by hand."""
        self._epoch = self._ranks.as_the_first(lambda: 0 if self.optimizer is None else self.optimizer.epoch)
        self._broadcast()

    @torch.no_grad()
    def _broadcast(self) -> None:
        import torch.distributed as dist

        works = [
            dist.broadcast(tensor.detach(), group=self._group, group_src=0, async_op=True)
            for tensor in (*self._network.parameters(), *self._network.buffers())
        ]
        for work in works:
            assert work is not None
            work.wait()
