"""A member of a population, for ordinary training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.population.core import Core, MemberOptions
from p2pavg.population.history import Ancestor, GenerationReport, History
from p2pavg.population.settings import PopulationSettings, Value
from p2pavg.population.weights import Apply, Weights
from p2pavg.population.words import TOPIC

LOG_BYTES = 1  # a population averages nothing, so it has no log of averages

Score = float | Callable[[], float]


class Population:
    """One member of a population that trains with different hyperparameters and copies its best (PBT).

    Every ``settings.interval`` steps the member publishes its score, decides from the words that all members have
    signed whether to copy another member's weights, and goes on, with changed hyperparameters if it has copied. There
    is no coordinator, and members may come and go.

    The averager's run belongs to the population alone: give optimizers another one.

    Args:
        averager: averager of the population's run, of :mod:`p2pavg.blocking`.
        model: its parameters and buffers are copied, and compared with those that are copied.
        optimizer: steps the model. Its state is copied too.
        settings: the rules. All members need the same.
        apply: sets hyperparameters that are no options of the optimizer. It gets all of them by name, at the beginning
            and after each generation. Without it, each is set in all parameter groups.
        member: name of this member, at most 64 printable ASCII characters; the peer id if it is empty. Its first
            hyperparameters follow from it.
        start: its first hyperparameters, instead of some that are drawn.
        wait: seconds for which the end of a generation waits until the other members have ended theirs. With 0, each
            member decides on what the others have said last.
        members: number of members, this one included, that such a wait expects in the first generation.
        verify: true to score the weights that were copied, and to take back the own ones if those are worse. A member
            can claim any score. It needs a ``score`` that can be called.
        copy_timeout: seconds for one copy.
        upload_mbps: Mbit/s that this member sends of its weights; ``None`` is without limit.
        download_mbps: Mbit/s that it receives; ``None`` is without limit.

    Raises:
        ConfigError: an argument is out of range, or the optimizer lacks a hyperparameter; the message names it.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        averager: Averager,
        model: nn.Module,
        optimizer: Optimizer,
        settings: PopulationSettings,
        *,
        apply: Apply | None = None,
        member: str = "",
        start: Mapping[str, Value] | None = None,
        wait: float = 0.0,
        members: int = 0,
        verify: bool = True,
        copy_timeout: float = 600.0,
        upload_mbps: float | None = None,
        download_mbps: float | None = None,
    ) -> None:
        check_averager(averager)
        options = MemberOptions(
            member=member, wait=wait, members=members, verify=verify, copy_timeout=copy_timeout, start=start
        )
        weights = Weights(model, optimizer, apply, list(settings.space))
        # States need to know a vector, and a population averages none.
        averager.declare([torch.zeros(1, dtype=torch.float32, device="cpu")])
        shares = ShareSettings(log_bytes=LOG_BYTES, upload_mbps=upload_mbps, download_mbps=download_mbps)
        self._settings = settings
        sharing = averager.share_states(shares)
        self._board = averager.board(TOPIC)
        self._core = Core(self._board, sharing, weights, settings, options, peer_id=averager.peer_id)

    @property
    def is_due(self) -> bool:
        """True if the next :meth:`step` ends a generation, and needs a score."""
        return self._core.life.since + 1 >= self._settings.interval

    @property
    def generation(self) -> int:
        """Number of generations that this member has finished."""
        return self._core.life.generation

    @property
    def steps(self) -> int:
        """Steps of training in the present weights, also those of members from which they were copied."""
        return self._core.life.steps + self._core.life.since

    @property
    def hyperparameters(self) -> Mapping[str, Value]:
        """Those in force, by name."""
        return MappingProxyType(self._core.life.hyperparameters)

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The generations through which the present weights have gone, the oldest first: a schedule of hyperparameters.

        It is as long as the training of these weights, also if this peer has joined late.
        """
        return self._core.life.ancestors

    @property
    def history(self) -> History:
        """The words of all members that this peer has seen."""
        self._core.poll()
        return self._core.history

    def step(self, score: Score | None = None) -> GenerationReport | None:
        """Count a step of training. Call it after each step of the optimizer.

        Args:
            score: the present weights' score, or a function that measures it. It is used, or called, only if a
                generation ends. A function lets the member check weights that it copies.

        Returns:
            The report if a generation has ended, and else ``None``.

        Raises:
            ValueError: a generation ends and no score was given.
            ClosedError: the averager is closed.
        """
        self._core.poll()
        if not self.is_due:
            self._core.life.since += 1
            return None
        if score is None:
            raise ValueError(
                "a generation ends with this step, so it needs a score; give a function, or see is_due"
            )
        measured = float(score() if callable(score) else score)
        self._core.life.since += 1
        return self._core.finish(measured, score if callable(score) else None)

    def take_best(self, score: Score | None = None) -> str | None:
        """Take the weights of the member that has the best score now: the result of the whole training.

        Call it right after the last generation, while the other members are still there: steps since then are lost.

        Args:
            score: as for :meth:`step`; a function lets the member check what it copies.

        Returns:
            The peer id of the member whose weights this one has now; ``None`` if no member is better, or none that is
            could be copied.

        Raises:
            ValueError: this member has not finished a generation.
            ClosedError: the averager is closed.
        """
        return self._core.take_best(score if callable(score) else None)

    def leave(self) -> None:
        """Withdraw this member's word: it counts in no later decision of others."""
        self._board.withdraw()
