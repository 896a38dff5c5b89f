"""One of three peers has other settings: it hears the true reason for as long as it lasts; on virtual time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import AveragingConfig
from p2pavg.base.errors import StateError
from p2pavg.optim import AveragedOptimizer, StepReport
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops
from tests.simulation.swarm import LAN

UPDATES = 10
ODD = 2
"""The peer with other settings. It was given the address of peer 0, as the others were."""
CONFIG = AveragingConfig(run_id="settings", group_size=3, match_timeout=10.0, exchange_timeout=20.0)
WRONG = ("another seed", "no other peer of this run", "another run", "manifest")
"""Parts of sentences that were false reasons."""


def model(width: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    with torch.no_grad():
        for weights in made.parameters():
            weights.fill_(0.1)
    return made


class Odd:
    """Three loops, of which one has other options, another rate or another width."""

    def __init__(self, *, lr: float = 0.1, width: int = 8, **options: Any) -> None:
        self._lr = lr
        self._width = width
        self._options = options
        self._over = False
        self.reports: list[StepReport] = []
        """Those of the odd one."""
        self.batches = 0
        """Batches of the odd one."""
        self.refused = ""
        """The error that ended the odd one."""

    def train(self, loop: SimulatedLoop) -> int:
        odd = loop.index == ODD
        network = model(self._width if odd else 8)
        inner = torch.optim.SGD(network.parameters(), lr=self._lr if odd else 0.1)
        options: dict[str, Any] = {"target_batch_size": 8.0, "sync_timeout": 30.0, "peers_to_start": 2}
        optimizer = AveragedOptimizer(inner, loop.averager, **(options | (self._options if odd else {})))
        generator = torch.Generator().manual_seed(loop.index)
        try:
            while optimizer.epoch < UPDATES and not (odd and self._over):
                loop.sleep(2.0)
                optimizer.zero_grad()
                torch.autograd.backward(network(torch.randn(4, 4, generator=generator)).square().mean())
                report = optimizer.step(samples=4)
                if odd:
                    self.batches += 1
                    self.reports.append(report)
        except StateError as error:
            self.refused = f"{error}" if odd else f"another peer was refused: {error}"
        if not odd:
            self._over = True
            loop.sleep(20.0)  # the others take their last update
        return optimizer.epoch


@pytest.mark.parametrize(
    ("odd", "late", "reason"),
    [
        ({"width": 6}, 0.0, "trains another architecture: 4 tensors of 49 elements, this one 4 of 37"),
        ({"max_grad_norm": 1.0}, 15.0, "trains with max_grad_norm none, this one with 1"),
    ],
    ids=["architecture", "clipping late"],
)
async def test_what_no_state_can_mend_is_an_error_with_the_true_reason(
    caplog: pytest.LogCaptureFixture, odd: dict[str, Any], reason: str, late: float
) -> None:
    company = Odd(**odd)

    def train(loop: SimulatedLoop) -> int:
        loop.sleep(late if loop.index == ODD else 0.0)
        return company.train(loop)

    found = await run_loops(MemoryNetwork(latency=LAN), 3, train, config=CONFIG)
    assert found == {0: UPDATES, 1: UPDATES, 2: 0}
    # It is judged by the peers whose address it was given.
    assert company.refused == f"this peer cannot join its run: 1 peer of this run {reason}"
    assert company.batches < 10, "batches are computed for nothing"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert not [line for line in told if any(wrong in line for wrong in WRONG)]


async def test_a_peer_with_another_rate_hears_of_it_and_takes_the_state_with_the_rate_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    company = Odd(lr=0.02)
    found = await run_loops(MemoryNetwork(latency=LAN), 3, company.train, config=CONFIG)
    assert found[0] == found[1] == UPDATES
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert (
        "the run began with lr 0.1, this peer with 0.02; the hyperparameters are those of the run's state now"
        in told
    )
    assert not [line for line in told if any(wrong in line for wrong in WRONG)]
    assert company.reports[-1].epoch > 0
    assert company.reports[-1].learning_rates in ((), (0.1,))


async def test_a_peer_that_shares_no_states_reports_the_true_reason_as_long_as_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    company = Odd(width=6, state=False)
    await run_loops(MemoryNetwork(latency=LAN), 3, company.train, config=CONFIG)
    last = company.reports[len(company.reports) // 2 :]
    assert len(last) > 2
    for report in last:
        assert report.behind is not None
        assert "another architecture: 4 tensors of 49 elements, this one 4 of 37" in report.behind
        assert len(report.differs) == 1
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert not [line for line in told if any(wrong in line for wrong in WRONG)]
