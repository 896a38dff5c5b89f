"""Helpers: peers that train together, each in its own thread, over real libp2p on localhost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

import p2pavg
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim.base.wrapper import PeerOptimizer

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
WATCHDOG_SECONDS = 600.0

T = TypeVar("T")


def config(peers: int, **changes: object) -> p2pavg.AveragingConfig:
    """Return the configuration for a number of peers, uncompressed by default."""
    fields: dict[str, object] = {
        "run_id": "company",
        "group_size": max(peers, 2),
        "match_timeout": 20.0,
        "exchange_timeout": 30.0,
        "compression": None,
    }
    return p2pavg.AveragingConfig(**(fields | changes))  # type: ignore[arg-type]


def train_together(
    work: Callable[[int, Averager], T], peers: int, how: p2pavg.AveragingConfig | None = None
) -> list[T]:
    """Run ``work(index, averager)`` for all peers at once; return the results."""
    how = config(peers) if how is None else how
    with ExitStack() as stack:
        averagers = [stack.enter_context(open_averager(how, listen=LISTEN))]
        while len(averagers) < peers:
            averagers.append(
                stack.enter_context(open_averager(how, listen=LISTEN, bootstrap=averagers[0].addresses))
            )
        pool = stack.enter_context(ThreadPoolExecutor(peers))
        return list(pool.map(work, range(peers), averagers))


def until(optimizer: PeerOptimizer, epoch: int) -> Iterator[None]:
    """Yield for each batch until the optimizer has taken an update.

    Raises:
        AssertionError: it never does. On a machine that stops a peer for long, the others may end without it.
    """
    end = time.monotonic() + WATCHDOG_SECONDS
    while optimizer.epoch < epoch:
        assert time.monotonic() < end, f"update {epoch} never came"
        yield


def small_model() -> torch.nn.Module:
    """Return a model with the same parameters on every peer."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(5)  # its own: the peers' threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


class Batches:
    """Batches of one peer, always the same; their targets differ from the other peers'."""

    def __init__(self, peer: int, size: int) -> None:
        self._generator = torch.Generator().manual_seed(100 + peer)
        self._slope = 1.0 + 0.5 * peer
        self.size = size

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (size, 6) and targets (size, 1), float32."""
        inputs = torch.randn(self.size, 6, generator=self._generator)
        return inputs, (inputs.sum(1, keepdim=True) * self._slope).sin()


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error."""
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def vector_of(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters as one float32 vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
