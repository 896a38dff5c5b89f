"""One session at a donor."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import trio

from p2pavg.net.limits.rate import RateLimit
from p2pavg.state.choice import SnapshotOffer
from p2pavg.state.donor.serving import DonorSession, Offered
from p2pavg.state.donor.shelf import HeldSnapshot, Shelf
from p2pavg.state.messages import AskPieces
from p2pavg.state.tree import CHUNK_BYTES, BlobKind, chunk_digests, root_of

CHUNKS = 3


def test_a_session_that_sends_a_piece_keeps_no_snapshot_in_memory() -> None:
    """A joiner may take a minute for a piece. The donor has dropped the snapshot by then, or has taken another one."""
    memory = np.zeros(CHUNKS * CHUNK_BYTES, dtype=np.uint8)
    gone = weakref.ref(memory)
    digests = chunk_digests(memory.data)
    offer = SnapshotOffer(epoch=1, state=bytes(32), root=root_of(digests, memory.nbytes), size=memory.nbytes)
    shelf = Shelf(2**20)
    shelf.put(HeldSnapshot(offer, memory.data, digests))
    del memory
    offered = Offered(shelf, RateLimit(None), lambda: False)

    async def serve() -> None:
        states = Mock(offered=Mock(return_value=(offered,)))
        session = DonorSession(cast(Any, None), cast(Any, None), cast(Any, None), states)
        request = AskPieces(number=1, kind=BlobKind.SNAPSHOT, blob_id=offer.root, first=0, count=CHUNKS)
        session._pending[1] = request
        frames = session.frames(request)
        _, piece, _ = next(frames)
        assert len(piece) == CHUNK_BYTES
        assert gone() is not None, "the shelf holds it"
        shelf.put(None)
        gc.collect()
        assert gone() is None
        assert piece == bytes(CHUNK_BYTES)

    trio.run(serve)
