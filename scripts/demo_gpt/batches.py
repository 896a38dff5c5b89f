"""The windows of text that each peer sees at each step: a function of the seed alone."""

import random
from functools import lru_cache

import torch
from torch import Tensor


def cut_windows(tokens: Tensor, context: int) -> Tensor:
    """Return windows without overlap, (windows, context + 1): the inputs and, shifted by one, the targets."""
    length = context + 1
    count = len(tokens) // length
    return tokens[: count * length].view(count, length)


@lru_cache(maxsize=64)
def shuffled(count: int, *key: object) -> Tensor:
    order = list(range(count))
    random.Random(repr(key)).shuffle(order)
    return torch.tensor(order)


class Batches:
    """Divides the windows among the peers.

    No window belongs to two peers. Each peer goes through its own in an order that changes with every pass.
    """

    def __init__(self, tokens: Tensor, *, context: int, batch_size: int, peers: int, seed: int) -> None:
        windows = cut_windows(tokens, context)
        if len(windows) < peers * batch_size:
            raise ValueError(f"{len(windows)} windows are too few for {peers} peers' batches of {batch_size}")
        order = shuffled(len(windows), seed)
        self._shares = [windows[order[peer::peers]] for peer in range(peers)]
        self._batch_size = batch_size
        self._seed = seed

    def of_peer(self, peer: int, step: int) -> Tensor:
        """Return the batch of one peer, int64 (batch_size, context + 1)."""
        share = self._shares[peer]
        epoch, position = divmod(step, len(share) // self._batch_size)
        order = shuffled(len(share), self._seed, peer, epoch)
        first = position * self._batch_size
        return share[order[first : first + self._batch_size]]

    def together(self, step: int) -> Tensor:
        """Return the batches of all peers, one after another, int64 (peers * batch_size, context + 1)."""
        return torch.cat([self.of_peer(peer, step) for peer in range(len(self._shares))])


def held_out_windows(tokens: Tensor, *, context: int, count: int) -> Tensor:
    """Return `count` windows evenly spaced over the text, int64 (count, context + 1)."""
    windows = cut_windows(tokens, context)
    return windows[torch.linspace(0, len(windows) - 1, count).long()]
