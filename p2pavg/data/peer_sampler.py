"""Samples that each peer draws by itself, and fixed shards of a data set.

**The order.** In each epoch all peers of a run share one pseudo-random order of the samples, which follows from the
seed, the epoch and the number of samples. Each peer begins at a place of its own in this order, which follows from its
id as well, goes on from there, and continues at the front when it reaches the end. Peers ask and tell each other
nothing, so they may come and go at any time. Sample number ``i`` of the order is computed, not looked up: no memory
grows with the data.

The order is that of :mod:`p2pavg.data.order`.

**The expected overlap.** N peers have each taken k of n samples in an epoch. A first place is as good as uniform, and
independent of the others, so a sample is with a given peer with probability k/n. The peers are then expected to have
n (1 - (1 - k/n)^N) different samples. The other ones of their N k are repeated work. For many peers, that is a
fraction of 1 - (1 - exp(-c)) / c, with c = N k / n: 0.5 % when all peers together have taken a hundredth of the data,
4.8 % after a tenth, 21 % after half, 37 % after as many samples as there are, and 57 % after twice as many. A sample is
left out by all of them with probability (1 - k/n)^N, or about exp(-c).

Two peers are expected to share k²/n samples. Expectations are the same for any scheme in which peers choose
independently of each other, such as an order of its own for each peer. In a shared order, the overlap is concentrated.
Two peers share nothing with probability 1 - (2k - 1)/n, where orders of their own would give about exp(-k²/n). No two
of N peers share a sample with probability (1 - N k/n)^(N - 1), a little more for small k (arcs on a circle: Stevens
1939, "Solution to a Geometrical Problem in Probability"). But two peers that begin close to each other share most of
their samples in that epoch. In the next one, both begin elsewhere.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar, overload

from torch.utils.data import Dataset, Sampler, Subset

from p2pavg.data.order import MAX_NUMBER, SCHEME, check_number, check_peer_id, length_of, order_of

_Item = TypeVar("_Item")
_BLOCK = 1024  # samples that are computed together: few enough to wait for, enough for numpy to be fast


class PeerSampler(Sampler[int]):
    """Samples of one peer: pseudo-random, without repetition in an epoch, and mostly not those of other peers.

    Each iteration gives the rest of an epoch, as indices of the data set. The next iteration gives the next epoch, in
    another order and from another first place. The module's docstring describes the order, and derives how much of
    their work peers are expected to repeat: if all peers together take a tenth of the data, 5 %.

    Two peers of the same ``seed``, ``epoch`` and number of samples share no sample until one of them reaches the
    other's first one; see :meth:`samples_before`. Within one peer, no sample comes twice in an epoch.

    **Saving.** Put :meth:`state_dict` into the peer's own checkpoint. A peer that begins again with the same
    ``peer_id`` and without its state begins with the same samples. A ``DataLoader`` with workers fetches ahead, so
    :attr:`position` is ahead of the training loop. The loop counts what it has used, and saves that:

        while training:
            used = sampler.position  # before the loader begins to fetch
            for inputs, targets in loader:
                ...
                used += len(inputs)
                saved = sampler.state_dict(position=used)

    ``StatefulDataLoader`` of torchdata does this by itself.

    Not safe for use by several threads at once.

    Args:
        dataset_or_length: the data set, of which only the length is used, or the length: 1 to 2^62. All peers need the
            same number of samples in the same order.
        peer_id: any printable text that no other peer has, such as ``averager.peer_id``. Without an identity file,
            that id is another one after each start.
        seed: whole number below 2^63 in magnitude, the same for all peers.
        epoch: the epoch with which to begin, from 0 on.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self, dataset_or_length: Sized | int, *, peer_id: str, seed: int = 0, epoch: int = 0
    ) -> None:
        self._order = order_of(dataset_or_length, seed, peer_id)
        self._length = self._order.length
        check_number("epoch", epoch, 0, MAX_NUMBER - 1)
        self._peer_id = peer_id
        self._position = epoch * self._length
        self._block: list[int] = []
        self._block_start = -1  # the position of the block's first sample

    @property
    def position(self) -> int:
        """Samples given out since epoch 0 began, including those that a loader has fetched and not yet delivered."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._position // self._length

    def __len__(self) -> int:
        """Return the number of samples that are left in this epoch."""
        return self._length - self._position % self._length

    def __iter__(self) -> Iterator[int]:
        """Give the samples that are left in this epoch, each as an index from 0 to the number of samples less one.

        Iterators of one sampler share its position, so none repeats what another has given.
        """
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._take()

    def samples_before(self, peer_id: str) -> int:
        """Return how many samples of the present epoch come before the first sample of another peer.

        These are counted from this peer's own first sample of the epoch. As long as this peer takes no more of them,
        and the other peer no more than its ``samples_before`` of this one, the two share no sample of the epoch. Two
        peers that begin with the same sample get 0.

        Raises:
            ValueError: ``peer_id`` is no text, or empty.
        """
        check_peer_id(peer_id)
        own = self._order.first_place(self.epoch, self._peer_id)
        return (self._order.first_place(self.epoch, peer_id) - own) % self._length

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Return the state after ``position`` samples, as plain numbers and text.

        Args:
            position: what the training loop has used, counted like :attr:`position` and at most as far. All that was
                given out unless given.

        Raises:
            ValueError: ``position`` is out of range.
        """
        if position is None:
            position = self._position
        check_number("position", position, 0, self._position)
        return {**self._identity(), "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the peer was when :meth:`state_dict` was called.

        Raises:
            ValueError: the state is malformed, or belongs to another peer, seed or number of samples, or to an order
                of another version. The sampler stays as it was.
        """
        identity = self._identity()
        if not isinstance(state, Mapping) or set(state) != {*identity, "position"}:
            raise ValueError("state is not what PeerSampler.state_dict returns")
        for name, own in identity.items():
            if state[name] != own:
                raise ValueError(f"state has {name} {state[name]!r}, this sampler has {own!r}")
        check_number("position", state["position"], 0, MAX_NUMBER * self._length)
        self._position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {"scheme": SCHEME, "length": self._length, "seed": self._order.seed, "peer_id": self._peer_id}

    def _take(self) -> int:
        epoch, place = divmod(self._position, self._length)
        start = self._position - place % _BLOCK
        if start != self._block_start:
            begin = place - place % _BLOCK
            first = (self._order.first_place(epoch, self._peer_id) + begin) % self._length
            self._block = self._order.samples(epoch, first, min(_BLOCK, self._length - begin))
            self._block_start = start
        self._position += 1
        return self._block[place % _BLOCK]


@overload
def shard(dataset_or_length: int, index: int, count: int) -> range: ...


@overload
def shard(dataset_or_length: Dataset[_Item], index: int, count: int) -> Subset[_Item]: ...


def shard(dataset_or_length: Dataset[_Item] | int, index: int, count: int) -> Subset[_Item] | range:
    """Return one of ``count`` fixed parts of a data set: every ``count``-th sample, beginning with ``index``.

    The parts are disjoint and together hold every sample. Their sizes differ by one at most. Use it where peers shall
    hold data of their own, as in federated learning, or for the ranks of one peer (``index`` is the rank). Samples are
    dealt out in turn, as torch's ``DistributedSampler`` deals them, so that each part of a sorted data set is like the
    whole. No memory grows with the data.

    Args:
        dataset_or_length: the data set, or its length, from 0 to 2^62.
        index: number of the part, from 0 to ``count - 1``.
        count: number of parts, from 1 on. Parts are empty if there are more of them than samples.

    Returns:
        The part as a ``Subset``, or the indices of its samples if a length was given.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    length = length_of(dataset_or_length)
    check_number("count", count, 1, MAX_NUMBER - 1)
    check_number("index", index, 0, count - 1)
    indices = range(index, length, count)
    return indices if isinstance(dataset_or_length, int) else Subset(dataset_or_length, indices)
