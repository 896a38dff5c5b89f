"""A peer that begins late, or that missed updates, gets the run's state from the other peers, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from tests.integration.optim.joiners import (
    MORE_UPDATES,
    AnyOptimizer,
    Maker,
    Seen,
    Story,
    adamw,
    by_diloco,
    by_fedyogi,
    by_fragments,
    sgd,
)


def bits_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def check_same(seen: Sequence[Seen]) -> None:
    """Check that all peers ended with the same bits."""
    first = seen[0]
    assert len(first.final) > 4
    for other in seen[1:]:
        assert other.plain == first.plain
        assert other.final.keys() == first.final.keys()
        for name, tensor in first.final.items():
            assert bits_of(other.final[name]) == bits_of(tensor), name


def said(caplog: pytest.LogCaptureFixture, peer: int, part: str) -> list[str]:
    """Return the log lines of one peer's training thread that have a part."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.threadName == f"peer {peer}" and part in record.getMessage()
    ]


def check_joined(story: Story, peer: int) -> None:
    """Tell the story that it may end when a peer has been in a round."""
    if story.seen[peer].together:
        story.may_end(story.seen[peer].together[-1])


@pytest.mark.parametrize(
    ("make", "updates"),
    [(sgd, 100), (adamw, 40), (by_diloco, 40), (by_fragments, 40), (by_fedyogi, 40)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_peer_that_joins_in_the_middle_ends_with_the_same_bits(
    make: Maker, updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.optim")
    story = Story(make, updates=updates)

    def act(story: Story, peer: int, bootstrap: Sequence[str]) -> None:
        if peer < 2:
            story.train(peer, bootstrap, peers_to_start=2)
            return
        story.wait_for_epoch(0, updates // 2)
        story.train(peer, bootstrap, seed=6, then=lambda _: check_joined(story, peer))

    seen = story.run(act)
    check_same(seen)
    joiner = seen[2]
    assert said(caplog, 2, "has loaded the state of update"), "it came by a snapshot"
    assert joiner.replayed, "and by at least one average of the log"
    assert joiner.replayed[0] > updates // 2
    assert len(joiner.together) >= MORE_UPDATES
    assert abs(joiner.schedule - seen[0].schedule) <= 2 * len(joiner.replayed), (
        "its schedule is where the run's is"
    )


@pytest.mark.long
@pytest.mark.parametrize("make", [adamw, by_diloco, by_fragments], ids=lambda make: make.__name__)
def test_a_peer_that_missed_a_few_updates_comes_back_by_the_log_alone(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.optim")
    story = Story(make, updates=30)
    missed = 5

    def act(story: Story, peer: int, bootstrap: Sequence[str]) -> None:
        left: list[int] = []

        def pause(optimizer: AnyOptimizer) -> None:
            if not left and optimizer.epoch >= 10:
                optimizer.leave()
                left.append(optimizer.epoch)
                story.wait_for_epoch(0, optimizer.epoch + missed)
            elif left and story.seen[peer].together[-1] > left[0]:
                story.may_end(optimizer.epoch)

        story.train(peer, bootstrap, peers_to_start=3, then=pause if peer == 2 else lambda _: None)

    seen = story.run(act)
    check_same(seen)
    assert len(seen[2].replayed) >= missed - 1
    assert not said(caplog, 2, "has loaded the state"), "no snapshot was needed"
    assert said(caplog, 2, "has caught up with its run")
