"""One peer: an ordinary training loop, whose optimizer averages its gradients with the other peers'.

This is the program that the documentation tells a user to write. A peer that starts late, or again after it was killed,
runs it like any other: the optimizer fetches the run's state, and the loop goes on at the run's present update.
"""

import argparse
from pathlib import Path

import torch

import p2pavg
import p2pavg.blocking
from p2pavg.optim import AveragedOptimizer, StepReport

from .channel import Channel
from .events import Done, Failed, HeldOutLoss, Ready, TrainLoss, Update, Waits
from .recipe import CLIP_NORM, Recipe, is_evaluated, use_one_thread
from .settings import Settings


def averaging_config(settings: Settings) -> p2pavg.AveragingConfig:
    return p2pavg.AveragingConfig(run_id="demo-gpt", compression=settings.compression)


class Peer:
    """A peer's training loop, and what it tells the launcher."""

    def __init__(self, settings: Settings, index: int, recipe: Recipe, channel: Channel) -> None:
        self._settings = settings
        self._index = index
        self._recipe = recipe
        self._channel = channel
        self._evaluated = -1

    def train(self, averager: p2pavg.blocking.Averager) -> None:
        settings, recipe = self._settings, self._recipe
        optimizer = AveragedOptimizer(
            recipe.optimizer,
            averager,
            target_batch_size=settings.peers * settings.batch_size,
            # With this limit, an update has one batch of each peer. While a peer is gone, the others compute its part.
            max_samples_per_peer=settings.batch_size,
            scheduler=recipe.scheduler,
            max_grad_norm=CLIP_NORM,
            peers_to_start=settings.peers_to_start,
            state=recipe.model,
            on_update=self._updated,
        )
        self._evaluate(0)
        update, batch = -1, 0
        while optimizer.epoch < settings.steps:
            update, batch = optimizer.epoch, batch + 1 if update == optimizer.epoch else 0
            windows = recipe.batches.of_peer(self._index, update, batch)
            optimizer.zero_grad()
            loss = recipe.model.loss(windows)
            torch.autograd.backward(loss)
            report = optimizer.step(samples=len(windows), metrics={"loss": loss.item()})
            # An update that this peer only caught up with has no gradients of it.
            if isinstance(report.result, p2pavg.Success) and averager.peer_id in report.result.peers:
                self._channel.send(TrainLoss(step=report.epoch, loss=loss.item()))
            elif reason := reason_of(report):
                self._channel.send(Waits(reason=reason))
        self._evaluate(optimizer.epoch)  # a peer may have fetched the last state as a whole

    def _updated(self, report: StepReport) -> None:
        result = report.result
        assert isinstance(result, p2pavg.Success)
        self._channel.send(
            Update(
                step=report.epoch,
                samples=dict(result.weights),
                seconds=result.duration,
                exchange_seconds=result.exchange_duration,
                bytes_sent=result.bytes_sent,
                bytes_received=result.bytes_received,
                compression_ratio=result.compression_ratio,
            )
        )
        if is_evaluated(report.epoch, self._settings.steps):
            self._evaluate(report.epoch)

    def _evaluate(self, step: int) -> None:
        if step != self._evaluated:
            self._evaluated = step
            self._channel.send(HeldOutLoss(step=step, loss=self._recipe.held_out_loss()))


def reason_of(report: StepReport) -> str:
    """Return what keeps this peer from updates; empty if its batch only counted for the next one."""
    outcome = report.result.reason if isinstance(report.result, p2pavg.Failed | p2pavg.NoPeers) else ""
    return report.catching_up or report.behind or outcome


def run(arguments: argparse.Namespace, channel: Channel) -> None:
    settings: Settings = arguments.settings
    recipe = Recipe(settings)
    with p2pavg.blocking.open_averager(
        averaging_config(settings),
        bootstrap=arguments.bootstrap,
        listen=["/ip4/127.0.0.1/tcp/0"],
        identity=arguments.identity,
    ) as averager:
        channel.send(
            Ready(parameters=recipe.parameter_count, peer_id=averager.peer_id, address=averager.addresses[0])
        )
        Peer(settings, arguments.index, recipe, channel).train(averager)
        channel.send(Done(digest=recipe.digest()))
        # A peer that is still starting again gets the last parameters from those that have them.
        channel.wait_for_leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--identity", type=Path, required=True)
    parser.add_argument("--bootstrap", action="append", default=[])
    arguments = parser.parse_args()
    use_one_thread()
    channel = Channel()
    try:
        run(arguments, channel)
    except p2pavg.P2PAvgError as error:
        channel.send(Failed(reason=str(error)))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
