"""A member of a population, for trio programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
import trio
from torch import nn
from torch.optim import Optimizer

from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.population.copying import Pause
from p2pavg.population.core import Core, Evaluate, Options
from p2pavg.population.history import History
from p2pavg.population.lineage import Ancestor
from p2pavg.population.report import GenerationReport
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Value
from p2pavg.population.weights import Apply, Weights
from p2pavg.population.words import TOPIC
from p2pavg.runs.records.board import Board

T = TypeVar("T")

LOG_BYTES = 1  # a population averages nothing, so it has no log of averages
LOOK_SECONDS = 0.05  # between two looks at a transfer

AsyncScore = float | Callable[[], Awaitable[float]]


class TrioPopulation:
    """A :class:`~p2pavg.population.Population` whose calls wait in trio. Made by :func:`open_population`."""

    def __init__(self, core: Core, board: Board, settings: PopulationSettings) -> None:
        self._core = core
        self._board = board
        self._settings = settings
        self._changed = trio.Event()
        board.subscribe(self._wake)

    @property
    def is_due(self) -> bool:
        """See :attr:`Population.is_due`."""
        return self._core.life.since + 1 >= self._settings.interval

    @property
    def generation(self) -> int:
        """See :attr:`Population.generation`."""
        return self._core.life.generation

    @property
    def steps(self) -> int:
        """See :attr:`Population.steps`."""
        return self._core.life.steps + self._core.life.since

    @property
    def hyperparameters(self) -> Mapping[str, Value]:
        """See :attr:`Population.hyperparameters`."""
        return MappingProxyType(self._core.life.hyperparameters)

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """See :attr:`Population.lineage`."""
        return self._core.life.ancestors

    @property
    def history(self) -> History:
        """See :attr:`Population.history`."""
        self._core.look()
        return self._core.history

    async def step(self, score: AsyncScore | None = None) -> GenerationReport | None:
        """Count a step of training: see :meth:`Population.step`.

        At the end of a generation the snapshot is taken and hashed in this call, which holds up the event loop for
        about a second per gigabyte. If it is cancelled, the member has its own weights. The generation's word may be
        published already; the next step begins a new generation.

        Args:
            score: a number, or a function that measures the score and is awaited. A long measurement belongs into a
                thread.
        """
        await trio.lowlevel.checkpoint()
        self._core.look()
        if not self.is_due:
            self._core.life.since += 1
            return None
        if score is None:
            raise ValueError(
                "a generation ends with this step, so it needs a score; give a function, or see is_due"
            )
        measured = float(await score() if callable(score) else score)
        self._core.life.since += 1
        return await self._drive(self._core.finish(measured, can_evaluate=callable(score)), score)

    async def take_best(self, score: AsyncScore | None = None) -> str | None:
        """Take the weights of the member that has the best score now: see :meth:`Population.take_best`."""
        await trio.lowlevel.checkpoint()
        return await self._drive(self._core.take_best(can_evaluate=callable(score)), score)

    def leave(self) -> None:
        """See :meth:`Population.leave`."""
        self._board.withdraw()

    async def _drive(self, flow: Generator[Pause | Evaluate, float | None, T], score: AsyncScore | None) -> T:
        answer: float | None = None
        try:
            while True:
                try:
                    request = flow.send(answer)
                except StopIteration as end:
                    result: T = end.value
                    return result
                answer = None
                if isinstance(request, Evaluate):
                    assert callable(score)
                    answer = float(await score())
                else:
                    await self._pause(request)
        finally:
            flow.close()

    async def _pause(self, pause: Pause) -> None:
        """Wait until the board has changed, the transfer has ended, or the time is over."""
        with trio.move_on_after(pause.seconds):
            while self._board.version == pause.version and not (pause.transfer and pause.transfer.ended):
                changed = self._changed
                with trio.move_on_after(pause.seconds if pause.transfer is None else LOOK_SECONDS):
                    await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@asynccontextmanager
async def open_population(
    averager: DecentralizedAverager,
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
) -> AsyncIterator[TrioPopulation]:
    """Take part in a population for as long as the block runs; its end withdraws this member's word.

    Args:
        averager: averager of the population's run, of :meth:`p2pavg.Peer.averager`.
        model, optimizer, settings: as for :class:`~p2pavg.population.Population`, and so are all others.

    Raises:
        ConfigError, TypeError: as :class:`~p2pavg.population.Population`.
    """
    options = Options(
        member=member, wait=wait, members=members, verify=verify, copy_timeout=copy_timeout, start=start
    )
    weights = Weights(model, optimizer, apply, list(settings.space))
    averager.declare([torch.zeros(1)])  # states need to know a vector, and a population averages none
    shares = ShareSettings(log_bytes=LOG_BYTES, upload_mbps=upload_mbps, download_mbps=download_mbps)
    sharing = await averager.share_states(shares)
    board = await averager.board(TOPIC)
    make = partial(Core, peer_id=averager.peer_id, clock=trio.current_time)
    population = TrioPopulation(make(board, sharing, weights, settings, options), board, settings)
    try:
        yield population
    finally:
        population.leave()
