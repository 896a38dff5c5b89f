"""The average of a peer that no other peer averages with: its own contribution, without a round."""

from __future__ import annotations

import hashlib

from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.base.messages import pack
from p2pavg.base.result import Success

_DOMAIN = "p2pavg/alone/1"


def apply_locally(accumulation: Accumulation, peer_id: str, state: bytes) -> Success | None:
    """Take what is accumulated, as the result of a peer alone; ``None`` if nothing is.

    Its ``group_id`` follows from the peer and the state. No group has it, so two peers that go on alone from the same
    state are in different states afterwards.

    Args:
        accumulation: this peer's; none of it may be in a round.
        peer_id: this peer's id.
        state: state of the tensors before the update.
    """
    taken = accumulation.take()
    if taken is None:
        return None
    averaged = taken.schema.unflatten(taken.mean.clone())
    accumulation.release(taken)
    return Success(
        averaged=averaged,
        peers=(peer_id,),
        weights={peer_id: taken.weight},
        total_weight=taken.weight,
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=0,
        duration=0.0,
        exchange_duration=0.0,
        group_id=hashlib.sha256(pack(_DOMAIN, peer_id, state)).hexdigest(),
        share=(0, taken.schema.elements),
        metrics=taken.metrics.means,
    )
