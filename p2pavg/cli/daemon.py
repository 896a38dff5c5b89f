"""The standalone peer behind ``p2pavg peer``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import trio

from p2pavg._exceptions import bare_exceptions
from p2pavg.auxiliary import assist
from p2pavg.config import AveragingConfig
from p2pavg.peer import open_peer

logger = logging.getLogger(__name__)


def run_peer(
    *,
    listen: Sequence[str],
    bootstrap: Sequence[str],
    identity: str | os.PathLike[str] | None,
    run_id: str | None,
    bandwidth: float,
) -> None:
    """Be a peer until SIGINT or SIGTERM; prints the address that others bootstrap from.

    Raises:
        ConfigError: no run has this ``run_id``.
        P2PAvgError: what :func:`p2pavg.open_peer` raises.
    """

    if run_id is not None:
        AveragingConfig(run_id=run_id, bandwidth=bandwidth)  # refuses what no averager could have

    async def main() -> None:
        with bare_exceptions(), trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(live)
                async for number in signals:
                    logger.info("leaving: %s", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    return

    async def live() -> None:
        async with open_peer(listen=listen, bootstrap=bootstrap, identity=identity) as peer:
            for address in peer.addresses[1:]:
                logger.info("also reachable at %s", address)
            print(peer.addresses[0] if peer.addresses else peer.id, flush=True)
            if run_id is not None:
                await assist(peer, run_id, bandwidth=bandwidth)
            await trio.sleep_forever()

    trio.run(main)
