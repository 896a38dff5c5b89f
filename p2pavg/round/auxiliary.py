"""A peer that trains nothing and helps those that do: it reduces a share of each group that takes it in."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from p2pavg.allreduce.attempt import AttemptTools, attempt_tools
from p2pavg.allreduce.lobby import ExpectedGroup
from p2pavg.config import AveragingConfig
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import ready_key
from p2pavg.group.roster import share_cutter
from p2pavg.matchmaking.actions import GaveUp, Report, Settings
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.net.limits.rate import RateLimit
from p2pavg.records.run_entry import RunEntry, read_entries, run_key
from p2pavg.round.exchange import Exchange, Outcome
from p2pavg_compression import resolve_codec

if TYPE_CHECKING:
    from p2pavg.peer import Peer

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
EXCHANGE_SECONDS = 60.0
# Different schemas of one run that are helped at once; the run's peers say what theirs are, and strangers may lie.
MAX_SCHEMAS = 4
# 256 MiB of averages; of contributions, a few parts each wait at a time.
MAX_SHARE_ELEMENTS = 2**26


async def assist(
    peer: Peer,
    run_id: str,
    *,
    bandwidth: float | None = None,
    max_upload_mbps: float | None = None,
    max_download_mbps: float | None = None,
) -> None:
    """Take part in rounds of a run with weight 0, until cancelled.

    Args:
        bandwidth: what this peer can send and receive, in Mbit/s; its share of a group's vector follows from it.
            ``None``: measured in rounds.
        max_upload_mbps: Mbit/s that it sends at most in all rounds of the run together, headers included; ``None`` is
            without limit.
        max_download_mbps: Mbit/s that it receives at most, likewise.

    Raises:
        ConfigError: an argument is out of the range that :class:`p2pavg.AveragingConfig` allows.
    """
    config = AveragingConfig(
        run_id=run_id,
        bandwidth=bandwidth,
        max_upload_mbps=max_upload_mbps,
        max_download_mbps=max_download_mbps,
    )
    limits = (RateLimit(max_upload_mbps), RateLimit(max_download_mbps))
    async with trio.open_nursery() as tails, trio.open_nursery() as nursery:
        helped: dict[bytes, trio.CancelScope] = {}
        while True:
            records = await peer.records.find(run_key(run_id))
            entries = _most_common(read_entries(records))
            for schema_hash in helped.keys() - entries.keys():
                helped.pop(schema_hash).cancel()
            for schema_hash, entry in entries.items():
                key = ready_key(run_id, schema_hash, entry.rule)
                if schema_hash not in helped and key not in peer.matchmakers:
                    helped[schema_hash] = scope = trio.CancelScope()
                    nursery.start_soon(_assist_schema, peer, config, limits, entry, tails, scope)
            await trio.sleep(LOOK_SECONDS)


def _most_common(entries: dict[str, RunEntry]) -> dict[bytes, RunEntry]:
    """One entry a schema, those of the most peers first; codecs that are not known here are left out."""
    chosen: dict[bytes, RunEntry] = {}
    for entry, _ in Counter(entries.values()).most_common():
        if len(chosen) < MAX_SCHEMAS and entry.schema_hash not in chosen and _known(entry.codec):
            chosen[entry.schema_hash] = entry
    return chosen


def _known(codec: str) -> bool:
    try:
        resolve_codec(codec)
    except ValueError:
        logger.warning("peers of the run use the codec %r, which this version does not have", codec)
        return False
    return True


async def _assist_schema(
    peer: Peer,
    config: AveragingConfig,
    limits: tuple[RateLimit, RateLimit],
    entry: RunEntry,
    tails: trio.Nursery,
    scope: trio.CancelScope,
) -> None:
    codec = resolve_codec(entry.codec)
    settings = Settings(
        target=entry.group_size,
        minimum=2,
        match_timeout=EXCHANGE_SECONDS,
        cut_shares=share_cutter(entry.elements, codec.granularity),
        choose_observers=None,  # it is theirs to know
        max_share=MAX_SHARE_ELEMENTS,
    )
    key = ready_key(config.run_id, entry.schema_hash, entry.rule)
    # Of this schema's rounds only: a meter sees one round at a time.
    meter = BandwidthMeter(max_upload_mbps=config.max_upload_mbps, max_download_mbps=config.max_download_mbps)
    matchmaker = Matchmaker(
        peer.around,
        key=key,
        settings=settings,
        codec=codec.name,
        bandwidth=lambda: meter.mbps if config.bandwidth is None else config.bandwidth,
    )
    peer.matchmakers[key] = matchmaker
    tools = attempt_tools(codec, min(entry.elements, MAX_SHARE_ELEMENTS), peer.around.run_in_thread)
    # Rounds of several schemas may run at once, over the one link.
    upload, download = limits
    tools = replace(tools, upload=upload, download=download)
    logger.info("helping peers that average %d tensors of %d elements", entry.tensors, entry.elements)
    try:
        with scope:
            while True:
                await _assist_round(peer, matchmaker, settings, tools, meter, tails)
    finally:
        del peer.matchmakers[key]


async def _assist_round(
    peer: Peer,
    matchmaker: Matchmaker,
    settings: Settings,
    tools: AttemptTools,
    meter: BandwidthMeter,
    tails: trio.Nursery,
) -> None:
    group: ExpectedGroup | None = None

    def expect(group_id: bytes | None) -> None:
        nonlocal group
        if group is not None:
            group.close()
        group = None if group_id is None else peer.lobby.expect(group_id, matchmaker.exchange_begun)

    try:
        found = await matchmaker.find_group(weight=0.0, auxiliary=True, on_report=_ignore, on_expect=expect)
        if isinstance(found, GaveUp) or group is None:
            return
        group.consists_of(member.peer_id for member in found.members)
        exchange = Exchange(
            transport=peer.around.transport,
            roster=found,
            group=group,
            lobby=peer.lobby,
            cut_shares=settings.cut_shares,
            tools=tools,
            meter=meter,
            vector=None,
            minimum=2,
            max_share=MAX_SHARE_ELEMENTS,
            timeout=EXCHANGE_SECONDS,
            on_milestone=peer.around.on_milestone,
        )
        group = None
        began = trio.current_time()
        outcome: Outcome = await tails.start(exchange.run)
        if outcome.verdict is None:
            matchmaker.finished_with(member.peer_id for member in outcome.roster.members)
        _log(peer, outcome, trio.current_time() - began)
    finally:
        if group is not None:
            group.close()


def _ignore(_report: Report) -> None:
    """An auxiliary's attempt has no match timeout to report."""


def _log(peer: Peer, outcome: Outcome, seconds: float) -> None:
    roster = outcome.roster
    name = roster.group_id.hex()[:8]
    if outcome.verdict is not None:
        logger.warning("group %s failed: %s", name, outcome.verdict.reason)
        return
    share = roster.shares[roster.position(peer.id)]
    logger.info(
        "group %s: reduced %d elements for %d peers in %.2f s, %.1f MB in, %.1f MB out",
        name,
        share,
        len(roster.holders),
        seconds,
        outcome.bytes_received / 1e6,
        outcome.bytes_sent / 1e6,
    )
