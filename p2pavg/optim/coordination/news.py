"""Events of an optimizer, for the subscribers of its averager."""

from __future__ import annotations

import time

from p2pavg.blocking import Averager
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.waiting import Waiting
from p2pavg.state.progress import StateProgress
from p2pavg.telemetry.events import Drifted, Progressed, StateMoved, Waits


def tell_progress(averager: Averager, progress: PeerProgress) -> None:
    """Tell of what this peer publishes of its progress."""
    averager.events.emit(
        Progressed(
            time=time.time(),
            run_id=averager.config.run_id,
            epoch=progress.epoch,
            lineage=progress.state,
            samples=progress.samples,
            samples_per_second=progress.samples_per_second,
            waiting=progress.waiting,
            follows=progress.follows,
        )
    )


def tell_download(averager: Averager, progress: StateProgress) -> None:
    """Tell of a transfer to this peer, if one runs."""
    if progress.bytes_total:
        averager.events.emit(
            StateMoved(
                time=time.time(),
                run_id=averager.config.run_id,
                direction="download",
                done=progress.bytes_done,
                total=progress.bytes_total,
                bytes_per_second=progress.bytes_per_second,
                peers=progress.donors,
            )
        )


def tell_waiting(averager: Averager, waiting: Waiting) -> None:
    """Tell that a call waits for other peers, and why."""
    averager.events.emit(
        Waits(
            time=time.time(),
            run_id=averager.config.run_id,
            reason=waiting.reason or "",
            seconds=waiting.seconds,
            peers=waiting.peers,
        )
    )


def tell_drift(averager: Averager, sentence: str) -> None:
    """Tell that peers report other parameters after the same updates; empty if all agree again."""
    averager.events.emit(Drifted(time=time.time(), run_id=averager.config.run_id, sentence=sentence))
