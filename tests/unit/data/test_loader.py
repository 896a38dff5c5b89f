"""The sampler under torch's ``DataLoader``, whose workers fetch ahead of the training loop."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from p2pavg.data import PeerSampler, shard

LENGTH = 100
BATCH = 8
DATASET = TensorDataset(torch.arange(LENGTH))
WATCHDOG = 120.0


def sampler() -> PeerSampler:
    return PeerSampler(DATASET, peer_id="a", seed=3)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_have_the_samples_in_order(drop_last: bool) -> None:
    order = list(sampler())
    by_size = DataLoader(DATASET, batch_size=BATCH, sampler=sampler(), drop_last=drop_last)
    by_batches = DataLoader(DATASET, batch_sampler=BatchSampler(sampler(), BATCH, drop_last))
    kept = LENGTH - LENGTH % BATCH if drop_last else LENGTH
    for loader in (by_size, by_batches):
        assert len(loader) == len(range(0, kept, BATCH))
        assert [sample for (batch,) in loader for sample in batch.tolist()] == order[:kept]


def test_a_loop_with_two_workers_resumes_with_the_first_sample_that_it_has_not_used() -> None:
    expected = [*sampler(), *PeerSampler(DATASET, peer_id="a", seed=3, epoch=1)]
    fetching = sampler()
    loader = DataLoader(
        DATASET,
        batch_size=BATCH,
        sampler=fetching,
        num_workers=2,
        multiprocessing_context="spawn",  # forking a process that may have threads is deprecated
        timeout=WATCHDOG,
    )
    used = fetching.position
    samples: list[int] = []
    for (batch,) in islice(loader, 5):
        samples += batch.tolist()
        used += len(batch)
        saved = fetching.state_dict(position=used)
    assert fetching.position > used == 5 * BATCH, "the workers were given batches that the loop has not used"
    resumed = sampler()
    resumed.load_state_dict(saved)
    for _ in range(2):
        samples += [
            sample for (batch,) in DataLoader(DATASET, BATCH, sampler=resumed) for sample in batch.tolist()
        ]
    assert samples == expected


def test_the_ranks_of_a_peer_take_their_shards() -> None:
    ranks = 3
    samples = []
    for rank in range(ranks):
        part = shard(DATASET, rank, ranks)
        loader = DataLoader(part, batch_size=BATCH, sampler=PeerSampler(part, peer_id="a"))
        samples += [sample for (batch,) in loader for sample in batch.tolist()]
    assert sorted(samples) == list(range(LENGTH))
