"""The reference: one process that takes the same steps on the combined batches of all peers."""

import argparse

from .channel import Channel
from .events import Done, HeldOutLoss, Ready, TrainLoss
from .recipe import Trainer, is_evaluated, use_one_thread
from .settings import Settings


def train(trainer: Trainer, settings: Settings, channel: Channel) -> None:
    channel.send(HeldOutLoss(step=0, loss=trainer.held_out_loss()))
    for step in range(settings.steps):
        loss, gradients = trainer.compute_gradients(trainer.batches.together(step))
        channel.send(TrainLoss(step=step + 1, loss=loss))
        trainer.apply_gradients(step, gradients)
        if is_evaluated(step + 1, settings.steps):
            channel.send(HeldOutLoss(step=step + 1, loss=trainer.held_out_loss()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    settings: Settings = parser.parse_args().settings
    use_one_thread()
    channel = Channel()
    trainer = Trainer(settings)
    channel.send(Ready(parameters=trainer.parameter_count))
    channel.wait_for_go()
    train(trainer, settings, channel)
    channel.send(Done(digest=trainer.digest()))


if __name__ == "__main__":
    main()
