"""The standalone peer behind ``p2pavg peer``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import trio

from p2pavg.config import AveragingConfig
from p2pavg.peer import open_peer
from p2pavg.round.auxiliary import assist
from p2pavg.threads.exceptions import bare_exceptions

logger = logging.getLogger(__name__)


def run_peer(
    *,
    listen: Sequence[str],
    bootstrap: Sequence[str],
    identity: str | os.PathLike[str] | None,
    run_id: str | None,
    bandwidth: float | None = None,
    max_upload_mbps: float | None = None,
    max_download_mbps: float | None = None,
) -> None:
    """Run a peer until SIGINT or SIGTERM; print the address that other peers bootstrap from.

    Args:
        run_id: id of the run that this peer helps, if any.
        bandwidth: like the two limits, in Mbit/s; see :func:`p2pavg.round.auxiliary.assist`.

    Raises:
        ConfigError: no averager could have this ``run_id``, ``bandwidth`` or limit.
        P2PAvgError: what :func:`p2pavg.open_peer` raises.
    """

    # The arguments are checked even without a run id: a limit that is out of range is a mistake either way.
    AveragingConfig(
        run_id="none" if run_id is None else run_id,
        bandwidth=bandwidth,
        max_upload_mbps=max_upload_mbps,
        max_download_mbps=max_download_mbps,
    )

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
                await assist(
                    peer,
                    run_id,
                    bandwidth=bandwidth,
                    max_upload_mbps=max_upload_mbps,
                    max_download_mbps=max_download_mbps,
                )
            await trio.sleep_forever()

    trio.run(main)
