"""Helpers: blocking averagers of real peers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from p2pavg import AveragingConfig, RoundResult, Success
from p2pavg.blocking import Averager, open_averager

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
WATCHDOG_SECONDS = 180.0


def config(**changes: Any) -> AveragingConfig:
    # A busy machine may take ten seconds to open a lane.
    settings: dict[str, Any] = {
        "run_id": "test",
        "group_size": 2,
        "compression": "fp32",
        "exchange_timeout": 120.0,
    }
    return AveragingConfig(**(settings | changes))


@contextmanager
def two_averagers(**changes: Any) -> Iterator[tuple[Averager, Averager]]:
    with (
        open_averager(config(**changes), listen=LOOPBACK) as first,
        open_averager(config(**changes), listen=LOOPBACK, bootstrap=first.addresses) as second,
    ):
        yield first, second


def step_together(*averagers: Averager) -> list[RoundResult]:
    with ThreadPoolExecutor(len(averagers)) as threads:
        steps = [threads.submit(averager.step, wait=None) for averager in averagers]
        return [step.result(WATCHDOG_SECONDS) for step in steps]


def tensors(success: RoundResult) -> list[torch.Tensor]:
    assert isinstance(success, Success), success
    assert isinstance(success.averaged, list)
    return success.averaged
