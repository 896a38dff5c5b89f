"""Detection of drift: peers that hold different parameters after the same updates. No I/O, no clock.

Every few updates each peer publishes short digests of its parameters, chunk by chunk. Peers of one lineage should
publish the same digests. If they do not, the cause is a bug in a program, a faulty computer, or machines that round
differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from p2pavg.optim.base.digest import SHORT_BYTES, chunk_bounds

MAX_NAMED = 3  # peers, parameters and kinds of peers that one sentence names
MAX_ID_CHARS = 16  # of a peer's id in a sentence; enough to find it; ids differ at their ends


def drifted(epoch: int, mine: bytes, others: Mapping[str, bytes], labels: Sequence[str]) -> str | None:
    """Return a sentence on the peers with other parameters and the differing tensors; ``None`` if none differ.

    Args:
        epoch: update after which the digests were taken.
        mine: 8 bytes for each chunk.
        others: the digests that peers of the same lineage published, by peer id.
        labels: a name for each of this peer's tensors.
    """
    same = sum(digests == mine for digests in others.values())
    kinds: dict[bytes, list[str]] = {}
    for peer_id in sorted(others):
        if others[peer_id] != mine:
            kinds.setdefault(others[peer_id], []).append(peer_id)
    if not kinds:
        return None
    largest = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    told = [
        f"{_peers(ids)} other parameters after update {epoch} than this one{_and(same)}:"
        f" {_where(mine, digests, labels)}"
        for digests, ids in largest[:MAX_NAMED]
    ]
    more = f"; and {len(largest) - MAX_NAMED} more kinds" if len(largest) > MAX_NAMED else ""
    return "; ".join(told) + more


def outnumbered(mine: bytes, others: Mapping[str, bytes]) -> bool:
    """Return whether more peers published the same other digests than hold this peer's.

    Args:
        mine, others: as for :func:`drifted`.
    """
    counts = Counter(others.values())
    with_me = 1 + counts.pop(mine, 0)
    return max(counts.values(), default=0) > with_me


def _peers(ids: Sequence[str]) -> str:
    named = ", ".join(f"..{peer_id[-MAX_ID_CHARS:]}" for peer_id in ids[:MAX_NAMED])
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    if len(ids) == 1:
        return f"1 peer ({named}) says that it holds"
    return f"{len(ids)} peers ({named}{more}) say that they hold"


def _and(same: int) -> str:
    return f" and {same} other{'s' if same > 1 else ''}" if same else ""


def _where(mine: bytes, theirs: bytes, labels: Sequence[str]) -> str:
    if len(mine) != len(theirs):
        return "of another number of tensors"
    differing = [
        f"{labels[first]}" if end - first == 1 else f"{labels[first]} to {labels[end - 1]}"
        for index, (first, end) in enumerate(chunk_bounds(len(labels)))
        if _chunk(mine, index) != _chunk(theirs, index)
    ]
    more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
    return f"{', '.join(differing[:MAX_NAMED])}{more} differ{'s' if len(differing) == 1 else ''}"


def _chunk(digests: bytes, index: int) -> bytes:
    return digests[index * SHORT_BYTES : (index + 1) * SHORT_BYTES]
