"""The metrics of a daemon: ``p2pavg peer --metrics PORT``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.peer.peer import Peer

logger = logging.getLogger(__name__)


@asynccontextmanager
async def serving_metrics(peer: Peer, port: int | None, runs: Collection[str]) -> AsyncIterator[None]:
    """Serve the metrics of a peer on this machine as long as the block runs; do nothing without a port.

    Raises:
        ConfigError: ``prometheus-client`` is not installed.
        ListenError: the port is taken.
    """
    if port is None:
        yield
        return
    from p2pavg.metrics import PeerMetrics

    try:
        metrics = PeerMetrics(peer, runs)
    except ImportError as error:
        raise ConfigError(f"--metrics: {error}", remedy="pip install 'p2pavg[prometheus]'") from None
    try:
        logger.info("metrics are at http://127.0.0.1:%d/metrics", metrics.serve(port))
        yield
    finally:
        with trio.CancelScope(shield=True):  # half a second at most: the server looks so often for its end
            await trio.to_thread.run_sync(metrics.close)
