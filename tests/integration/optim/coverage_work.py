"""The work function of the processes in the test of shared samples."""

from __future__ import annotations

import time

import torch

import p2pavg
from p2pavg.data import SharedSampler
from p2pavg.optim import AveragedOptimizer, RunState, StepReport
from p2pavg.testing.swarm import Member


def train(member: Member) -> None:
    """Train, and report the samples of each batch before it is stepped, and what each update counted.

    Each report has the parameters' values, by which updates of two branches differ.

    Arguments: ``length`` of the data; ``peers``; ``start``, the peers that the first update needs; ``batch`` samples in
    ``batch_seconds``; ``waits``, to begin with a message that has its ``bootstrap`` addresses; ``epochs`` after which
    it ends.
    """
    torch.set_num_threads(1)
    given = member.arguments
    if given.get("waits"):
        while (told := member.told(60.0)) is None:
            pass
        member.bootstrap = tuple(told["bootstrap"])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def values() -> list[float]:
        return [float(value) for each in model.parameters() for value in each.detach().flatten()]

    config = p2pavg.AveragingConfig(
        run_id="coverage", group_size=16, match_timeout=10.0, exchange_timeout=20.0
    )
    with member.averager(config) as averager:
        sampler = SharedSampler(given["length"], peer_id=averager.peer_id)

        def tell(report: StepReport) -> None:
            assert isinstance(report.result, p2pavg.Success)
            weights = {peer: round(weight) for peer, weight in report.result.weights.items()}
            member.report(update=report.epoch, weights=weights, values=values())

        optimizer = AveragedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            averager,
            target_batch_size=given["peers"] * given["batch"] * 2,
            peers_to_start=given["start"],
            # Before the first update no peer knows what the others take: the less each takes, the less they repeat.
            max_samples_per_peer=given["batch"] * 3,
            state=RunState(model, data=sampler),
            on_update=tell,
        )
        samples = iter(sampler)
        while sampler.plan.begun <= given["epochs"]:
            batch = [(sampler.epoch, next(samples)) for _ in range(given["batch"])]
            member.report(batch=batch, values=values())
            loss = model(torch.randn(len(batch), 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            time.sleep(given["batch_seconds"])
            optimizer.step(samples=len(batch))
