"""Two optimizers in one loop, each in a run of its own, as for both networks of a GAN; on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2pavg import NoPeers
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, StepReport
from p2pavg.testing import SimulatedLoop
from tests.simulation.training import train_together

SAMPLES = 8
UPDATES = 2
MATCH_TIMEOUT = 60.0
LATE_SECONDS = 3.0


def optimizer(averager: Averager) -> AveragedOptimizer:
    """Make an optimizer of which each update takes two batches: one of each peer, or two of one."""
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    return AveragedOptimizer(inner, averager, target_batch_size=2 * SAMPLES, batch_size=SAMPLES)


@pytest.mark.parametrize("late", [0.0, LATE_SECONDS], ids=["together", "one-later"])
def test_a_peer_does_not_wait_in_one_run_for_a_peer_that_waits_in_the_other(late: float) -> None:
    """The loops step the networks in opposite order, so both runs are due when each peer has stepped one of them.

    Each peer then waited in a round of its own, until the match timeout, at every update. If one peer begins when the
    other has accumulated enough, its first step is of the other network, and it has not stepped the one that is due.
    """

    def train(loop: SimulatedLoop) -> list[StepReport]:
        config = replace(loop.averager.config, run_id="generator")
        reports = []
        with loop.averager.sibling(config) as generator:
            networks = [loop.averager, generator] if loop.index == 0 else [generator, loop.averager]
            optimizers = [optimizer(averager) for averager in networks]
            loop.sleep(late * loop.index)
            while any(each.epoch < UPDATES for each in optimizers):
                for each in optimizers:
                    if each.epoch < UPDATES:
                        loop.sleep(0.1)
                        for parameter in each.inner.param_groups[0]["params"]:
                            parameter.grad = torch.ones_like(parameter)
                        reports.append(each.step())
                    else:
                        each.leave()
        return reports

    found = train_together(train, 2, run_id="discriminator", match_timeout=MATCH_TIMEOUT)
    reports = [report for reports in found for report in reports]
    assert sum(report.updated for report in reports) == 4 * UPDATES
    missed = [report.result for report in reports if isinstance(report.result, NoPeers)]
    assert all("comes first" in result.reason for result in missed), missed
    assert max(report.waited_seconds for report in reports) < MATCH_TIMEOUT / 2
