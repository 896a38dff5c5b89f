"""The reference: one process that takes the peers' updates alone, on the batches that were in them."""

import argparse
import json

import torch

from .channel import Channel
from .events import Done, HeldOutLoss, Ready, TrainLoss
from .recipe import CLIP_NORM, Recipe, is_evaluated, use_one_thread
from .settings import Settings


def train(recipe: Recipe, settings: Settings, batches: list[dict[int, int]], channel: Channel) -> None:
    """Take one step for each entry of `batches`: the number of batches of each peer that were in that update."""
    channel.send(HeldOutLoss(step=0, loss=recipe.held_out_loss()))
    for step, counts in enumerate(batches):
        recipe.optimizer.zero_grad()
        loss = recipe.model.loss(recipe.batches.together(step, counts))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), CLIP_NORM)
        recipe.optimizer.step()
        recipe.scheduler.step()
        channel.send(TrainLoss(step=step + 1, loss=loss.item()))
        if is_evaluated(step + 1, settings.steps):
            channel.send(HeldOutLoss(step=step + 1, loss=recipe.held_out_loss()))


def read_batches(text: str) -> list[dict[int, int]]:
    return [{int(peer): count for peer, count in counts.items()} for counts in json.loads(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--batches", type=read_batches, required=True)
    arguments = parser.parse_args()
    use_one_thread()
    channel = Channel()
    recipe = Recipe(arguments.settings)
    channel.send(Ready(parameters=recipe.parameter_count))
    train(recipe, arguments.settings, arguments.batches, channel)
    channel.send(Done(digest=recipe.digest()))


if __name__ == "__main__":
    main()
