"""One donor or the joiner of p2pavg in the benchmark of states."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import trio

import p2pavg
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.limits.rate import RateLimit
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import Offered
from p2pavg.state.joiner.fetching import BlobDownload, Wanted
from p2pavg.state.joiner.sessions import Sessions, open_sessions
from p2pavg.state.joiner.sink import MemorySink
from p2pavg.state.joiner.sink import digest_of as piece_digest
from p2pavg.state.messages import BlobManifest
from scripts.benchmarks.state_vectors import bytes_of, digest_of, state_of
from scripts.benchmarks.worker import Line

RUN = "bench"
PIECE_BYTES = 1 << 20
KIND = 0
BLOB_ID = bytes(32)


class Held:
    """Holdings of one state."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        pieces = range(0, len(data), PIECE_BYTES)
        self._digests = b"".join(piece_digest(data[start : start + PIECE_BYTES]) for start in pieces)

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        """Return the size of the state and the digests of its pieces."""
        found = len(self._data).to_bytes(8, "big") + self._digests
        return found if (kind, blob_id) == (KIND, BLOB_ID) else None

    def piece(self, kind: int, blob_id: bytes, index: int) -> memoryview | None:
        """Return a piece."""
        found = self._data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
        return found if found and (kind, blob_id) == (KIND, BLOB_ID) else None


def read_manifest(size: int, data: bytes) -> BlobManifest:
    """Read the manifest of a state of a known size."""
    if int.from_bytes(data[:8], "big") != size:
        raise RemoteProtocolError("a state of another size")
    digests = [data[start : start + 32] for start in range(8, len(data), 32)]
    sizes = [min(PIECE_BYTES, size - start) for start in range(0, size, PIECE_BYTES)]
    return BlobManifest(sizes, digests)


def main() -> None:
    """Run the worker."""
    line = Line()
    trio.run(_work, line, line.told())


async def _work(line: Line, setup: dict[str, Any]) -> None:
    bootstrap = setup["bootstrap"]
    async with p2pavg.open_peer(listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=bootstrap[:1]) as peer:
        if setup["index"] < setup["donors"]:
            held = Held(bytes_of(state_of(setup["bytes"])))
            peer.state.join(RUN, None, Offered(held, RateLimit(setup["mbps"])))
            line.report(address=peer.addresses[0])
            await trio.sleep_forever()
        line.report(address=peer.addresses[0])
        line.report(ready=True)
        async with open_sessions(peer.context, peer.lobby, key=stored_key(RUN, None)) as sessions:
            while True:
                await _fetch(line, sessions, setup)


async def _fetch(line: Line, sessions: Sessions, setup: dict[str, Any]) -> None:
    size: int = setup["bytes"]
    wanted = Wanted(KIND, BLOB_ID, 8 + 32 * (size // PIECE_BYTES + 1), partial(read_manifest, size))
    await trio.to_thread.run_sync(line.told)
    began = time.monotonic()
    fetch = BlobDownload(sessions, wanted, lambda manifest: MemorySink(manifest.sizes))
    fetch.set_donors({text.rpartition("/")[2]: [text] for text in setup["bootstrap"]})
    sink = await fetch.run()
    line.report(seconds=time.monotonic() - began)
    await trio.to_thread.run_sync(line.told)
    expected = digest_of(bytes_of(state_of(size)))
    line.report(right=digest_of(sink.take()) == expected)
    sink.close()


if __name__ == "__main__":
    main()
