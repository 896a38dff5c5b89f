"""Snapshots of a stranger for the fuzz test: keys that collide, references, settings and places of tensors.

Each message is the bytes of a snapshot that decode up to some point. A joiner reads each, as it reads those of a donor:
it refuses it and has changed nothing, or takes it and can train on.
"""

from __future__ import annotations

import base64
import copy
import random
from collections import Counter
from typing import Any

import msgpack
import torch

from p2pavg.base.errors import StateError
from p2pavg.population.weights import Weights
from p2pavg.state.layout import Spec, write_header
from p2pavg.state.snapshot import VALUES_KEY, Content, copy_of, read

MAX_KEYS = 300
PLACES = (
    "optimizer/state/0/exp_avg",
    "optimizer/state/0/step",
    "parameter/weight",
    "optimizer/more",
    "nothing",
)


def some_key(dice: random.Random) -> Any:
    """Draw a key of a dict: of a kind that it may have or not, and often with the hash of others."""
    number = dice.choice([dice.randrange(8), dice.randrange(8) * (2**61 - 1), dice.randrange(64) << 40])
    return dice.choice(
        [number, -(number >> 2) - 1, str(number), float(number), [1, number], [1, [1, number]], None, True]
    )


def some_value(dice: random.Random, depth: int = 0) -> Any:
    """Draw a value as a stranger writes it, before msgpack."""
    kind = dice.randrange(10 if depth < 5 else 5)
    if kind < 4:
        return dice.choice([None, True, dice.randrange(2**40), dice.random(), "text", b"bytes", float("nan")])
    if kind == 4:
        return [2, "p2pavg/tensor", dice.choice(PLACES)]
    if kind == 5:
        return [2, dice.choice(["p2pavg/counter", "p2pavg/dtype"]), some_value(dice, depth + 1)]
    count = dice.randrange(4)
    if kind in (6, 7):
        return [dice.randrange(4), *(some_value(dice, depth + 1) for _ in range(count))]
    keys = [some_key(dice) for _ in range(dice.choice([count, count, MAX_KEYS]))]
    if dice.random() < 0.5:
        keys = sorted((key for key in keys if type(key) is int), key=int)
    return [2, *(part for key in keys for part in (key, dice.randrange(3)))]


def tagged(value: Any) -> Any:
    """Return plain values as msgpack has them in a snapshot."""
    if isinstance(value, dict):
        ordered = sorted(value, key=lambda key: (type(key) is str, key))
        return [2, *(part for key in ordered for part in (key, tagged(value[key])))]
    if isinstance(value, list | tuple):
        return [1 if isinstance(value, tuple) else 0, *map(tagged, value)]
    return value


def some_snapshot(dice: random.Random, sent: Content) -> bytes:
    """Draw the bytes of a snapshot: one of a donor, with a few changes."""
    values, tensors = tagged(copy.deepcopy(dict(sent.values))), dict(sent.tensors)
    for _ in range(dice.randint(1, 3)):
        within = values
        while True:  # any place within the values
            keys_too = within[0] != 2 or dice.random() < 0.05
            places = range(1, len(within)) if keys_too else range(2, len(within), 2)
            index = dice.choice(places)
            if isinstance(within[index], list) and len(within[index]) > 2 and dice.random() < 0.9:
                within = within[index]
                continue
            within[index] = dice.choice([some_value(dice), dice.choice(["maximize", 2, 3.0, True, None])])
            break
    if dice.random() < 0.3:
        name = dice.choice(
            [*PLACES, "optimizer/" + "x/" * 40, "optimizer/param_groups/0", "optimizer/state/0/0"]
        )
        tensors[name] = torch.ones(dice.choice([(), (1,), (2, 3)]))
    if dice.random() < 0.2:
        del tensors[dice.choice(sorted(tensors))]
    text = base64.b64encode(msgpack.packb(values)).decode("ascii")
    header, layout = write_header({n: Spec.of(t) for n, t in tensors.items()}, {VALUES_KEY: text})
    data = b"".join(
        tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name in layout.specs
    )
    return header + data


def member(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Weights]:
    """Return a small member of a population that has trained."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer, Weights(model, optimizer, None, ["lr"])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step."""
    optimizer.zero_grad()
    torch.autograd.backward(model(torch.ones(4, 3)).square().mean())
    optimizer.step()


def search(dice: random.Random, count: int) -> Counter[str]:
    """Let a member read ``count`` snapshots; return how many it took and refused.

    Raises:
        AssertionError: a snapshot that was refused has changed something, or an option was taken.
    """
    tally: Counter[str] = Counter()
    model, optimizer, weights = member(0)
    sent = read(copy_of(member(1)[2].content(())))
    for _ in range(count):
        data = some_snapshot(dice, sent)
        own = copy_of(weights.content(()))
        options = [{**group, "params": []} for group in optimizer.param_groups]
        try:
            loaded = weights.prepare(read(data))
        except StateError:
            assert copy_of(weights.content(())) == own, "a snapshot that was refused has changed something"
            tally["refused"] += 1
            continue
        loaded.take()
        assert [{**group, "params": []} for group in optimizer.param_groups] == options, "an option was taken"
        train(model, optimizer)
        weights.restore(read(own))
        tally["taken"] += 1
    return tally
