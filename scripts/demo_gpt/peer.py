"""One peer: an ordinary training loop whose gradients are averaged with the other peers' at every step."""

import argparse
import sys
import time
from pathlib import Path

import p2pavg
import p2pavg.blocking

from .channel import Channel
from .events import Done, Failed, HeldOutLoss, Ready, Retry, Round, TrainLoss
from .recipe import Trainer, is_evaluated, use_one_thread
from .settings import Settings

EXCHANGE_TIMEOUT_S = 30.0
PATIENCE_S = 60.0  # after which a peer without a successful round gives up
PAUSE_S = 0.2  # pause between attempts, so that an attempt that fails at once does not cause a busy loop


class NoRoundError(Exception):
    """No round succeeded within PATIENCE_S."""


def averaging_config(settings: Settings) -> p2pavg.AveragingConfig:
    return p2pavg.AveragingConfig(
        run_id="demo-gpt",
        group_size=settings.peers,
        min_group_size=2,
        match_timeout=settings.match_timeout,
        exchange_timeout=EXCHANGE_TIMEOUT_S,
        compression=settings.compression,
    )


def average(averager: p2pavg.blocking.Averager, step: int, channel: Channel) -> p2pavg.Success:
    """Try rounds until one succeeds; the accumulated gradients are kept until then."""
    started = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        result = averager.step(wait=None)
        waited = time.monotonic() - started
        if isinstance(result, p2pavg.Success):
            channel.send(round_event(result, step, waited, attempts))
            return result
        channel.send(Retry(step=step + 1, result=type(result).__name__, reason=result.reason))
        if waited > PATIENCE_S:
            raise NoRoundError(f"no round succeeded in {waited:.0f} s: {result.reason}")
        time.sleep(PAUSE_S)


def round_event(result: p2pavg.Success, step: int, waited: float, attempts: int) -> Round:
    return Round(
        step=step + 1,
        peers=list(result.peers),
        seconds=result.duration,
        exchange_seconds=result.exchange_duration,
        waited_seconds=waited,
        attempts=attempts,
        bytes_sent=result.bytes_sent,
        bytes_received=result.bytes_received,
        compression_ratio=result.compression_ratio,
    )


def train(
    trainer: Trainer, settings: Settings, index: int, averager: p2pavg.blocking.Averager, channel: Channel
) -> None:
    channel.send(HeldOutLoss(step=0, loss=trainer.held_out_loss()))
    for step in range(settings.steps):
        loss, gradients = trainer.compute_gradients(trainer.batches.of_peer(index, step))
        channel.send(TrainLoss(step=step + 1, loss=loss))
        averager.accumulate(gradients, weight=settings.batch_size)
        success = average(averager, step, channel)
        averaged = success.averaged
        assert isinstance(averaged, list)  # a list, like the argument of accumulate
        trainer.apply_gradients(step, averaged)
        if is_evaluated(step + 1, settings.steps):
            channel.send(HeldOutLoss(step=step + 1, loss=trainer.held_out_loss()))


def run(arguments: argparse.Namespace, channel: Channel) -> None:
    settings: Settings = arguments.settings
    trainer = Trainer(settings)
    with p2pavg.blocking.open_averager(
        averaging_config(settings),
        bootstrap=arguments.bootstrap,
        listen=["/ip4/127.0.0.1/tcp/0"],
        identity=arguments.identity,
    ) as averager:
        ready = Ready(
            parameters=trainer.parameter_count, peer_id=averager.peer_id, address=averager.addresses[0]
        )
        channel.send(ready)
        channel.wait_for_go()
        train(trainer, settings, arguments.index, averager, channel)
        channel.send(Done(digest=trainer.digest()))
        channel.wait_for_leave()  # the others may still need this peer for their last round


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
    except (NoRoundError, p2pavg.P2PAvgError) as error:
        channel.send(Failed(reason=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
