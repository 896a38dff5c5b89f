"""The windows of text that each peer sees at each step: a function of the seed alone."""

import random
from collections.abc import Mapping
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

    def of_peer(self, peer: int, update: int, number: int = 0) -> Tensor:
        """Return a batch of one peer for an update, int64 (batch_size, context + 1).

        Args:
            number: 0 for the peer's first batch of this update; it computes more while another peer is gone.
        """
        share = self._shares[peer]
        a_pass = len(share) // self._batch_size
        epoch, position = divmod(update, a_pass)
        order = shuffled(len(share), self._seed, peer, epoch, number)
        first = position * self._batch_size
        return share[order[first : first + self._batch_size]]

    def together(self, update: int, counts: Mapping[int, int]) -> Tensor:
        """Return the batches of an update, one after another, int64 (samples, context + 1).

        Args:
            counts: number of batches of each peer that are in it.
        """
        return torch.cat(
            [self.of_peer(peer, update, number) for peer, count in counts.items() for number in range(count)]
        )


def held_out_windows(tokens: Tensor, *, context: int, count: int) -> Tensor:
    """Return `count` windows evenly spaced over the text, int64 (count, context + 1)."""
    windows = cut_windows(tokens, context)
    return windows[torch.linspace(0, len(windows) - 1, count).long()]
