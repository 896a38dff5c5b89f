"""Peers whose ranks hold the same parameters: rank 0 trains with the other peers, and the other ranks copy it.

With ``DistributedDataParallel`` the ranks of a peer reduce their gradients among themselves, so each rank could take
the same step. Here rank 0 takes it for all of them. To the other peers, such a peer is a peer of one process: it
averages with peers of any number of ranks, fetches their states, and offers its own. With FSDP the ranks hold shards;
rank 0 then has a whole copy of the model too (:mod:`p2pavg.optim.ranks.whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from p2pavg.base.errors import AccumulateError, ClosedError, P2PAvgError, RunEndedError
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.joined import plain_buffers
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.torch_optimizer import TorchOptimizer
from p2pavg.optim.large_batch.averaged import AveragedOptimizer
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.ranks.shards import Ranks, local_of
from p2pavg.optim.ranks.whole import (
    WholeCopy,
    chosen_buffers,
    difference,
    is_sharded,
    layout_of,
    reshard,
    wrong_network,
)

if TYPE_CHECKING:
    import torch.distributed as dist

Groups = list[dict[str, Any]]
"""Parameter groups whose parameters are given by their positions in the network."""

_RAISED: tuple[type[Exception], ...] = (AccumulateError, ClosedError, RunEndedError, ValueError, TypeError)
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
    is_pending: bool = False
    """True if the next backward pass adds to the present gradients."""
    options: Groups = field(default_factory=list)
    """The options of the parameter groups, without the parameters."""


class _Mirror(Optimizer):
    """The parameter groups of rank 0's optimizer, on another rank."""

    def step(self, closure: object = None) -> NoReturn:  # noqa: ARG002
        """Refuse: rank 0 steps for all ranks."""
        raise RuntimeError("rank 0 of this peer takes the steps: call ReplicatedOptimizer.step on all ranks")


class ReplicatedOptimizer(TorchOptimizer):
    """Takes the steps of a peer whose ranks hold the same parameters (``DistributedDataParallel``) or shards (FSDP).

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

    Rank 0's ``samples``, of the batch of all ranks together, and ``metrics`` count, and its report is returned on every
    rank; on the others, a result has no averaged tensors. All ranks raise what rank 0's ``step`` raises, or a
    RuntimeError for an error of another kind. The other ranks wait in :meth:`step` for rank 0, which waits for other
    peers, and fetches the run's state when this peer is behind. So the process group's timeout has to be longer than
    the optimizer's ``sync_timeout``.

    If the ranks hold shards of the parameters, rank 0 needs a whole copy of the model, which its optimizer trains. The
    gradients are gathered there, and the new parameters scattered, one parameter at a time::

        whole = copy.deepcopy(network) if rank == 0 else None
        fully_shard(network)
        optimizer = None
        if rank == 0:
            inner = torch.optim.AdamW(whole.parameters())
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=4096, state=RunState(whole))
        replicas = ReplicatedOptimizer(optimizer, network, whole=whole)

    Args:
        optimizer: on rank 0, an :class:`AveragedOptimizer`, :class:`LocalUpdates` or recipe for the parameters of
            ``network``, or of ``whole``; ``None`` on the other ranks. If it has a ``process_group``, that one has no
            other rank of this one: its ranks hold other parts of the model, see :func:`divided_optimizer`.
        network: the module whose parameters the ranks share, without its ``DistributedDataParallel``. Rank 0's
            parameters and buffers replace those of the other ranks.
        process_group: group of ``torch.distributed`` of this peer's ranks; all processes if not given.
        whole: on rank 0, if ``fully_shard`` has sharded ``network``: a module like it that is not sharded. Its
            parameters replace those of ``network``. It may be on another device. ``None`` on the other ranks.

    Raises:
        ValueError: ``optimizer`` is missing on rank 0, given elsewhere, has a ``process_group`` with other ranks of
            this one, or trains other parameters than those of ``network``; ``whole`` is missing, given elsewhere, or of
            another model; or ``network`` is sharded over other ranks than those of ``process_group``. On all ranks.
    """

    def __init__(
        self,
        optimizer: AveragedOptimizer | LocalUpdates | None,
        network: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        whole: torch.nn.Module | None = None,
    ) -> None:
        import torch.distributed as dist  # needs a torch that was built with it

        if optimizer is not None and optimizer.shares_data:
            raise ValueError(
                "data cannot be used by a peer of several ranks: each has a loader of its own. Use"
                " p2pavg.data.PeerSampler with shard()"
            )
        self._group = process_group or _all_processes()
        self._ranks = Ranks(self._group)
        self._network = network
        self._trained = network if whole is None else whole
        """The module whose parameters rank 0's optimizer trains."""
        self.optimizer = optimizer
        """The peer's optimizer, on rank 0 only."""
        self._epoch = 0
        # Only rank 0 has the copy, and all ranks have to take part in the same collectives below.
        has_whole = self._ranks.as_the_first(lambda: whole is not None)
        if has_whole:
            # After a forward pass FSDP may hold whole parameters, which do not look sharded to the checks that follow.
            reshard(network)
        # Every rank learns what is wrong on any of them: a rank that raised alone would leave the others waiting.
        found = self._ranks.gather(self._wrong(whole, has_whole))
        for rank, text in enumerate(found):
            if text:
                raise ValueError(text if found[dist.get_rank(self._group)] else f"on rank {rank}: {text}")
        # Ranks may have enlarged their caches, which are buffers that are not persistent, differently.
        self._buffers = self._ranks.as_the_first(self._shared_buffers)
        """Names of the buffers that the ranks share."""
        self._copy = WholeCopy(network, whole, self._ranks, self._group, self._buffers) if has_whole else None
        self._mirror = self._mirrored()
        self._is_pending = False
        self._become_optimizer()
        # From here on the ranks hold the same parameters, also if each of them initialised its own.
        self.synchronize()

    @classmethod
    def of(
        cls,
        inner: Optimizer | Sequence[Optimizer],
        network: torch.nn.Module,
        averager: Averager | None,
        *,
        recipe: Callable[..., AveragedOptimizer | LocalUpdates] = AveragedOptimizer,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> ReplicatedOptimizer:
        """Make one of the optimizer that a program has on every rank.

        Args:
            inner: the optimizer of the parameters of ``network``; rank 0's is stepped, the others are not used.
            network: as for this class.
            averager: rank 0's; ``None`` on the other ranks.
            recipe: makes rank 0's optimizer of ``inner``, ``averager`` and ``options``.
            process_group: as for this class.
            options: such as ``target_batch_size``.

        Raises:
            Exception: as ``recipe`` and this class, on the rank concerned; the others raise ValueError.
        """
        optimizer: AveragedOptimizer | LocalUpdates | None = None
        wrong: Exception | None = None
        try:
            optimizer = None if averager is None else recipe(inner, averager, **options)
        except Exception as error:  # noqa: BLE001 - raised below
            wrong = error  # raised after the other ranks have heard of it: they wait for this one
        found = Ranks(process_group or _all_processes()).gather("" if wrong is None else _text_of(wrong))
        # The rank concerned raises the error itself, with its type and traceback.
        if wrong is not None:
            raise wrong
        for rank, text in enumerate(found):
            if text:
                raise ValueError(f"on rank {rank}: {text}")
        return cls(optimizer, network, process_group=process_group)

    @property
    def _stepped(self) -> Optimizer:
        return self._mirror

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
        """Refuse a ``GradScaler``, which asks this first.

        It would look for overflows in the shards on the other ranks, together with rank 0, which has none.
        """
        if self._copy is not None:
            raise ValueError(
                "a GradScaler cannot scale the gradients of shards that rank 0 takes whole: train with bfloat16, which"
                " needs none"
            )
        return True

    def _shared_buffers(self) -> frozenset[str]:
        averaged = frozenset() if self.optimizer is None else self.optimizer.averaged_buffers
        return frozenset(plain_buffers(self._trained, also=averaged))

    def _mirrored(self) -> Optimizer:
        """Return rank 0's optimizer, and on the other ranks one with the same groups."""
        # Parameters cannot be sent; their positions in the network are the same on all ranks.
        places = {id(parameter): place for place, parameter in enumerate(self._trained.parameters())}

        def groups() -> tuple[Groups, dict[str, Any]]:
            assert self.optimizer is not None
            found = [
                {**group, "params": [places[id(parameter)] for parameter in group["params"]]}
                for group in self.optimizer.param_groups
            ]
            return found, dict(self.optimizer.defaults)

        told, defaults = self._ranks.as_the_first(groups)
        if self.optimizer is not None:
            return self.optimizer
        # Of the network: these ranks have no copy.
        mine = list(self._network.parameters())
        return _Mirror(
            [{**group, "params": [mine[place] for place in group["params"]]} for group in told], defaults
        )

    def _wrong(self, whole: torch.nn.Module | None, has_whole: bool) -> str:
        """Return the reason for which this rank's arguments cannot be used; empty if they can."""
        if (self.optimizer is None) == self._ranks.is_first:
            return "optimizer must be given on rank 0 of the peer, and there alone"
        if wrong := self._wrong_copy(whole, has_whole):
            return wrong
        if self.optimizer is None:
            return ""
        # Those ranks have no optimizer, so the collectives of this one would wait for them for ever.
        if others := self.optimizer.ranks.others_in(self._group):
            return (
                f"optimizer has a process_group with rank {others[0]}, and that is a rank of the process_group whose"
                " parameters are copied: make it without a process_group, or with one of ranks that hold other parts"
            )
        # Others would change on rank 0 alone: a broadcast takes the parameters of the network, or of the copy.
        known = {id(parameter) for parameter in self._trained.parameters()}
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not all(id(parameter) in known for parameter in trained):
            return f"optimizer must train parameters of {'network' if whole is None else 'whole'}"
        return ""

    def _wrong_copy(self, whole: torch.nn.Module | None, has_whole: bool) -> str:
        """Return the reason for which ``whole`` cannot be used with ``network``; empty if it can.

        Args:
            has_whole: true if rank 0 has it.
        """
        import torch.distributed as dist

        if whole is not None and not self._ranks.is_first:
            return "whole must be given on rank 0 of the peer, and there alone"
        if has_whole and not is_sharded(self._network):
            return "whole is for a network whose parameters are sharded: leave it out"
        # Gradients and parameters are passed by position, so the order has to be the same too.
        if whole is not None and (wrong := difference(layout_of(whole), layout_of(self._network))):
            return wrong
        if has_whole:
            return wrong_network(self._network, dist.get_process_group_ranks(self._group))
        # An optimizer whose ranks average their own parts is fit for a network that is sharded.
        divides = self.optimizer is not None and self.optimizer.are_several
        if self.optimizer is not None and not divides and is_sharded(self._network):
            return (
                "the parameters of network are sharded: give rank 0 a copy that is not, as whole=, or let each rank"
                " average its own shard (p2pavg.optim.shard_config)"
            )
        return ""

    @property
    def epoch(self) -> int:
        """Number of updates that the parameters have taken."""
        return self._epoch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters; call it before each backward pass.

        Between two backward passes that the optimizer's ``accumulate`` joins, it leaves them as they are.
        """
        # Rank 0 has told this in the last step, so all ranks keep their gradients, or none does.
        if not self._is_pending:
            self._network.zero_grad(set_to_none)
            if self._copy is not None:
                self._copy.zero_grad(set_to_none)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add measurements to those of the next :meth:`step`; rank 0's count.

        Raises:
            p2pavg.AccumulateError: as the optimizer's ``note``; on rank 0.
        """
        if self.optimizer is not None:
            self.optimizer.note(metrics)

    def leave(self) -> None:
        """Stop taking part until :meth:`step` is called again; rank 0's call counts. See the optimizer's ``leave``."""
        if self.optimizer is not None:
            self.optimizer.leave()

    def finish(self) -> None:
        """End this peer's training; rank 0's call counts. See the optimizer's ``finish``."""
        if self.optimizer is not None:
            self.optimizer.finish()

    def _step_once(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        # Rank 0's own report is not sent: averaged tensors are as large as the model, and an exception may not survive
        # a pickle.
        mine: list[StepReport | Exception] = []
        if self._copy is not None:
            # Raises on all ranks together if gradients are missing on some, so none of them waits in the step below.
            self._copy.collect()
        # The other ranks wait in this broadcast for as long as rank 0 waits for other peers.
        told = self._ranks.as_the_first(lambda: self._act(samples, metrics, mine))
        if told.changed:
            # Also after an error: rank 0 may have changed its parameters before it raised, and the copies have to
            # follow.
            self._broadcast()
            if isinstance(self.optimizer, AveragedOptimizer):
                self.optimizer.note_parameters()  # a broadcast may count as a change of its source
        self._is_pending = told.is_pending
        # The optimizer's scheduler runs on rank 0 only. The other ranks get its rates, for loops that show them.
        if self.optimizer is None:
            for group, options in zip(self.param_groups, told.options, strict=False):
                group.update(options)
        if mine:  # on rank 0
            found = mine[0]
            if isinstance(found, Exception):
                raise found
            self._epoch = found.epoch
            return found
        if told.error is not None:
            # The same type where a text is enough to make it, so the caller's `except` is the same on all ranks.
            kind = _RAISED[told.error] if told.error >= 0 else RuntimeError
            raise kind(f"on rank 0 of this peer: {told.text}")
        assert told.report is not None
        self._epoch = told.report.epoch
        return told.report

    def _act(
        self, samples: float | None, metrics: Mapping[str, float], mine: list[StepReport | Exception]
    ) -> _Told:
        """Take the step on rank 0; put its report or error into ``mine``, and return it for the other ranks."""
        assert self.optimizer is not None
        before = self._version()
        # A `GradScaler` sets these on the object that it steps, and the optimizer inside has to see them.
        scaled = {name: getattr(self, name) for name in ("found_inf", "grad_scale") if hasattr(self, name)}
        vars(self.optimizer).update(scaled)  # of a GradScaler
        try:
            report = self.optimizer.step(samples=samples, metrics=metrics)
        except Exception as error:  # noqa: BLE001 - raised again after the other ranks have heard of it
            mine.append(error)
            kinds = [number for number, kind in enumerate(_RAISED) if isinstance(error, kind)]
            # An error of this library that has no type of its own in the table becomes an AccumulateError there.
            other = 0 if isinstance(error, P2PAvgError) else -1
            return _Told(
                changed=self._version() != before,
                error=kinds[0] if kinds else other,
                text=str(error),
                is_pending=self.optimizer.is_pending,
            )
        finally:
            # As the scaler itself does. Left behind, they would mark the next step, which may be one without a scaler,
            # as an overflow.
            for name in scaled:
                delattr(self.optimizer, name)
        mine.append(report)
        result = report.result
        if isinstance(result, Success):
            # The report goes to the other ranks through a pickle.
            result = replace(result, averaged=[])
        return _Told(
            changed=self._version() != before,
            report=replace(report, result=result),
            is_pending=self.optimizer.is_pending,
            options=[
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
        )

    def _version(self) -> object:
        """Return a value that is another one after the optimizer has changed the parameters."""
        if not isinstance(self.optimizer, AveragedOptimizer):
            return object()  # local updates change them in every step
        return self.optimizer.lineage, self.optimizer.states_loaded

    def synchronize(self) -> None:
        """Replace the other ranks' parameters and buffers by rank 0's; call it after a state was loaded by hand."""
        # Only rank 0 knows the number of updates of a state that it has loaded.
        self._epoch = self._ranks.as_the_first(lambda: 0 if self.optimizer is None else self.optimizer.epoch)
        self._broadcast()

    def _state_dict(self) -> dict[str, Any]:
        """Return rank 0's state; an empty one on the other ranks, which copy rank 0."""
        return {} if self.optimizer is None else self.optimizer.state_dict()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state on rank 0; all ranks call it together, and copy rank 0's parameters."""
        wrong: Exception | None = None
        try:
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state)
        except Exception as error:  # noqa: BLE001 - raised after the other ranks have heard of it
            wrong = error
        # The other ranks hear of an error before rank 0 raises it; else they would wait for its parameters.
        told = self._ranks.as_the_first(lambda: None if wrong is None else _text_of(wrong))
        if wrong is not None:
            raise wrong
        if told is not None:
            raise ValueError(f"on rank 0 of this peer: {told}")
        self.synchronize()

    @torch.no_grad()
    def _broadcast(self) -> None:
        import torch.distributed as dist

        if self._copy is not None:
            self._copy.spread()
            return

        # All broadcasts are begun before the first is waited for, so that they overlap.
        works = [
            dist.broadcast(local_of(tensor.detach()), group=self._group, group_src=0, async_op=True)
            for tensor in (
                *self._network.parameters(),
                *chosen_buffers(self._network, self._buffers).values(),
            )
        ]
        for work in works:
            assert work is not None
            work.wait()


def _all_processes() -> dist.ProcessGroup | None:
    import torch.distributed as dist  # needs a torch that was built with it

    return dist.group.WORLD


def _text_of(error: Exception) -> str:
    """Return the text of an error for the other ranks, which is never empty."""
    return str(error) or type(error).__name__
