"""States of an averager's run: what it offers to other peers and fetches from them, wired to the peer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import trio

from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.group.candidate import Candidate, ready_key
from p2pavg.group.roster import ShareCutter
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.board import Board
from p2pavg.state.average import Expected
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import Offered
from p2pavg.state.donor.shelf import Shelf
from p2pavg.state.donor.uploads import Uploads
from p2pavg.state.history.entries import SegmentBeginning
from p2pavg.state.history.recording import HistoryRecorder, HistorySettings
from p2pavg.state.history.rules import dtype_names
from p2pavg.state.joiner.sessions import open_sessions
from p2pavg.state.joiner.transfers import SharedRun
from p2pavg.state.sharing import StateSharing
from p2pavg.telemetry.events import StateMoved
from p2pavg.telemetry.hub import OnEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """Limits of the states that a peer offers and fetches; see :class:`p2pavg.optim.RunState`."""

    log_bytes: int
    upload_mbps: float | None = None
    download_mbps: float | None = None
    directory: Path | None = None
    history: HistorySettings | None = None


def shared_run(host: Host, run: JoinedRun, config: AveragingConfig, schema: Schema) -> SharedRun:
    """Return what states need to know of a run."""
    aggregation = config.aggregation
    key = ready_key(config.run_id, schema.hash, config.rule, aggregation.text)
    codec, membership = config.codec, run.membership
    cutter = ShareCutter(schema.elements, codec.granularity, aggregation.topology)

    def trusts(member: Candidate) -> bool:
        if membership is None:
            return True
        return membership.refusal(member.peer_id, member.certificate, host.context.wall_clock()) is None

    def expected(group_id: bytes) -> Expected:
        return Expected(
            group_id=group_id,
            key=key,
            codec=codec,
            elements=schema.elements,
            robust=aggregation.robust is not None,
            cutter=cutter,
            trusts=trusts,
        )

    return SharedRun(
        addresses=lambda: host.context.transport.addresses,
        elements=schema.elements,
        unflatten=lambda vector: cast(list[torch.Tensor], schema.unflatten(vector)),
        members_only=membership is not None,
        bootstrap=host.bootstrap,
        expected=expected,
    )


async def _tell_uploads(uploads: Uploads, run_id: str, context: PeerContext, emit: OnEvent) -> None:
    """Tell the subscribers once a second what is sent, while something is."""
    while True:
        await trio.sleep(LOOK_SECONDS)
        found = uploads.report(trio.current_time())
        if found is not None:
            emit(
                StateMoved(
                    time=context.wall_clock(),
                    run_id=run_id,
                    direction="upload",
                    done=found.done,
                    # How much the joiners still want is theirs to know.
                    total=found.done if found.is_over else 0,
                    bytes_per_second=found.bytes_per_second,
                    peers=found.peers,
                )
            )


@asynccontextmanager
async def _open_history(
    host: Host, run: JoinedRun, config: AveragingConfig, schema: Schema, settings: HistorySettings | None
) -> AsyncIterator[HistoryRecorder | None]:
    """Keep the history of the run for as long as the block runs, if it is to be kept."""
    if settings is None:
        yield None
        return
    context = host.context
    like = SegmentBeginning(
        number=0,
        time=0.0,
        archivist=context.signer.peer_id,
        run_id=config.run_id,
        authority=b"" if config.access is None else config.access.authority,
        certificate=b"" if config.access is None else config.access.certificate,
        codec=config.codec.name,
        rule=config.rule,
        aggregation=config.aggregation.text,
        version=config.version,
        shapes=schema.shapes,
        dtypes=dtype_names(schema),
        names=settings.names,
    )
    recorder = HistoryRecorder(settings, like, context.signer, context.wall_clock)
    await context.run_in_thread(recorder.open)  # it may read the last segment
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            # What was given is written to its end, and sealed, also if the averager is cancelled.
            with trio.CancelScope(shield=True):
                await in_own_thread(recorder.run, stop=recorder.stop, name="p2pavg-history")

        nursery.start_soon(write)
        with run.proofs_to(recorder):
            try:
                yield recorder
            finally:
                recorder.stop()


@asynccontextmanager
async def open_sharing(
    host: Host,
    run: JoinedRun,
    config: AveragingConfig,
    schema: Schema,
    settings: ShareSettings,
    board: Board,
    is_busy: Callable[[], bool],
    bandwidth: Callable[[], float],
    emit: OnEvent,
) -> AsyncIterator[StateSharing]:
    """Offer states to other peers, and be able to fetch them, for as long as the block runs.

    Args:
        is_busy: returns true while a round exchanges.
        bandwidth: returns what this peer's link carries, in Mbit/s; 0 if it is not known.
        emit: takes the events of uploads.
    """
    run_id, shared = config.run_id, shared_run(host, run, config, schema)
    shelf, uploads = Shelf(settings.log_bytes), Uploads()
    offered = Offered(shelf, RateLimit(settings.upload_mbps), is_busy, bandwidth, uploads.note)
    host.state.join(run_id, run.membership, offered)
    try:
        async with (
            open_sessions(
                host.context,
                host.lobby,
                key=stored_key(run_id, run.membership),
                certificate=run.records.certificate,
                download=RateLimit(settings.download_mbps),
            ) as sessions,
            _open_history(host, run, config, schema, settings.history) as history,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_tell_uploads, uploads, run_id, host.context, emit)
            sharing = StateSharing(shared, board, shelf, sessions, settings.directory, history, nursery)
            try:
                yield sharing
            finally:
                sharing.close()
                nursery.cancel_scope.cancel()
    finally:
        host.state.leave(run_id, run.membership, shelf)
