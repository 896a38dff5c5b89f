"""The one word that a peer publishes for all processes that are attached to it. No I/O, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from p2pavg.optim.coordination.progress import MAX_SAMPLES, Progress, encode_progress, read_all
from p2pavg.optim.coordination.view import TOPIC as PROGRESS
from p2pavg.optim.coordination.word import TOPIC as RECIPES

SPOKEN = frozenset((PROGRESS, RECIPES))
"""The boards on which a process may have a word; on the others the peer speaks for itself."""


def joint_word(topic: str, said: Mapping[str, bytes]) -> bytes:
    """Return what a peer says on a board for its processes; empty if none of them says anything.

    The progress of the processes with the same state is added up, as for one peer of several ranks. On every other
    board the word of the first process, by name, is as good as the others': they train alike.
    """
    if topic == PROGRESS:
        progress = read_all(said)
        return encode_progress(joint_progress(progress)) if progress else b""
    return said[min(said)] if said else b""


def joint_progress(progress: Mapping[str, Progress]) -> Progress:
    """Return the progress of a peer from that of its processes.

    It is of the state that most processes have; of as many, the later one. Processes with other states are on their
    way, or left behind: they take no part in the next round.
    """
    counts = Counter((word.epoch, word.state) for word in progress.values())
    (epoch, state), _ = max(counts.items(), key=lambda item: (item[1], item[0]))
    words = [word for word in progress.values() if (word.epoch, word.state) == (epoch, state)]
    return Progress(
        epoch=epoch,
        state=state,
        samples=min(math.fsum(word.samples for word in words), MAX_SAMPLES),
        samples_per_second=min(math.fsum(word.samples_per_second for word in words), MAX_SAMPLES),
        waiting=all(word.waiting for word in words),
        batch_seconds=max(word.batch_seconds for word in words),
        started=any(word.started for word in words),
        follows=all(word.follows for word in words),
    )
