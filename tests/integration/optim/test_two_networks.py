"""Two optimizers in one loop, each in a run of its own, as for both networks of a GAN."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from p2pavg import NoPeers
from p2pavg.base.messages import decoded_all
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, StepReport
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.view import TOPIC
from tests.integration.loopback import config, two_averagers

SAMPLES = 8
UPDATES = 2
MATCH_TIMEOUT = 120.0
"""A group of two peers forms within a second. On a machine that is very busy, it may take a minute."""
WATCHDOG_SECONDS = 600.0


def optimizer(averager: Averager) -> AveragedOptimizer:
    """Make an optimizer of which each update takes two batches: one of each peer, or two of one."""
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    return AveragedOptimizer(inner, averager, target_batch_size=2 * SAMPLES, batch_size=SAMPLES)


def train(averagers: Sequence[Averager], *, after: bool = False) -> list[StepReport]:
    """Train a network in the run of each averager, in turn; return all reports.

    Args:
        after: true to begin when another peer's first batch has been heard of in each run.
    """
    optimizers = [optimizer(averager) for averager in averagers]
    if after:
        for averager in averagers:
            hear_of_a_batch(averager)
    reports = []
    while any(each.epoch < UPDATES for each in optimizers):
        for each in optimizers:
            if each.epoch < UPDATES:
                for parameter in each.inner.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                reports.append(each.step())
            else:
                each.leave()
    return reports


def hear_of_a_batch(averager: Averager) -> None:
    board = averager.board(TOPIC)
    while True:
        version = board.version
        words = decoded_all({peer_id: word.value for peer_id, word in board.entries.items()}, PeerProgress)
        if any(word.samples > 0 for word in words.values()):
            return
        board.wait(version, WATCHDOG_SECONDS)


@pytest.mark.parametrize("is_late", [False, True], ids=["together", "one-later"])
def test_a_peer_does_not_wait_in_one_run_for_a_peer_that_waits_in_the_other(is_late: bool) -> None:
    """The loops step the networks in opposite order, so both runs are due when each peer has stepped one of them.

    Each peer then waited in a round of its own, until the match timeout, at every update. If one peer begins when the
    other has accumulated enough, its first step is of the other network, and it has not stepped the one that is due.
    """
    with (
        two_averagers(run_id="discriminator", match_timeout=MATCH_TIMEOUT) as (first, second),
        first.sibling(config(run_id="generator", match_timeout=MATCH_TIMEOUT)) as of_first,
        second.sibling(config(run_id="generator", match_timeout=MATCH_TIMEOUT)) as of_second,
        ThreadPoolExecutor(2) as threads,
    ):
        trained = [
            threads.submit(train, [first, of_first]),
            threads.submit(train, [of_second, second], after=is_late),
        ]
        reports = [report for thread in trained for report in thread.result(WATCHDOG_SECONDS)]
    assert sum(report.updated for report in reports) == 4 * UPDATES
    missed = [report.result for report in reports if isinstance(report.result, NoPeers)]
    assert all("comes first" in result.reason for result in missed), missed
