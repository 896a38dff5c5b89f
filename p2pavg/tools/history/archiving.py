"""The work of ``p2pavg archive``: an archivist as a process."""

from __future__ import annotations

import logging
import signal
from functools import partial
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.peer.joining.member import join_run, open_peer_of
from p2pavg.peer.peer import PeerOptions
from p2pavg.state.history.recording import HistorySettings
from p2pavg.tools.history.archivist import archive

logger = logging.getLogger(__name__)


def run_archive(run: str, directory: Path, *, home: Path | None, keep: int | None) -> None:
    """Keep the history of a run until SIGINT or SIGTERM.

    Args:
        run: folder, run file or invitation link, as for ``p2pavg join``.
        directory: of the history.
        home: folder of this peer; ``None`` for the usual one.
        keep: updates that stay.

    Raises:
        P2PAvgError: the run cannot be joined, the folder cannot be used, or the run's optimizer is not known here.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"--keep must be at least 1, got {keep}")
    config = join_run(run, home=home)
    settings = HistorySettings(directory, keep)

    async def main() -> None:
        with bare_exceptions(), trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(live)
                async for number in signals:
                    logger.info("leaving: %s", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    return

    async def live() -> None:
        async with open_peer_of(config, None, PeerOptions()) as peer:
            print(f"keeping the history of {config.run_id!r} in {directory}", flush=True)
            await archive(peer, config, settings, partial(logger.info, "recorded update %d"))

    trio.run(main)
