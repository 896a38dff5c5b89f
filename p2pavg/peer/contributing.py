"""The needs of the rounds of a run, besides the values: a matchmaker, the settings, and the peer's entry in the run."""

from __future__ import annotations

from functools import partial

import trio

from p2pavg.allreduce.context import run_context
from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import ready_key
from p2pavg.group.participation import observers
from p2pavg.group.roster import share_cutter
from p2pavg.group.topology import site_of
from p2pavg.matchmaking.actions import Settings
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.host import Host
from p2pavg.peer.joined_run import JoinedRun
from p2pavg.peer.presence import Presence
from p2pavg.round.rounds import Rounds, RoundSettings
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.run_entry import RunEntry


def open_rounds(
    host: Host,
    run: JoinedRun,
    config: AveragingConfig,
    schema: Schema,
    meter: BandwidthMeter,
    nursery: trio.Nursery,
    tails: trio.Nursery,
) -> Rounds:
    """Register with the peer for the rounds of one run, and publish this peer's entry in it.

    Args:
        schema: of the values that are averaged; what is published depends on it.
        meter: knows the bandwidth that candidates announce.
        nursery: publishes the entry.
        tails: see :class:`~p2pavg.round.rounds.Rounds`.
    """
    codec, aggregation = config.codec, config.aggregation
    key = ready_key(config.run_id, schema.hash, config.rule, aggregation.text)
    cut_shares = share_cutter(schema.elements, codec.granularity, aggregation.topology)
    matchmaker = Matchmaker(
        host.context,
        key=key,
        settings=Settings(
            target=config.group_size,
            minimum=config.min_group_size,
            match_timeout=config.match_timeout,
            cut_shares=cut_shares,
            choose_observers=partial(observers, config.participation),
            max_weight=config.most_weight,
            refuses=run.refuses,
        ),
        codec=codec.name,
        bandwidth=lambda: meter.announced_mbps if config.bandwidth is None else config.bandwidth,
        records=run.records,
        site=site_of(aggregation.topology),
    )
    host.registry.add_averager(key, matchmaker, config.run_id)
    entry = RunEntry(
        schema_hash=schema.hash,
        tensors=len(schema.shapes),
        elements=schema.elements,
        codec=codec.name,
        group_size=config.group_size,
        rule=config.rule,
        aggregation=aggregation.text,
    )
    presence = Presence(host, run.records, config.run_id, entry)
    nursery.start_soon(presence.publish)
    return Rounds(
        run_context(
            host.context,
            host.lobby,
            codec=codec,
            aggregation=aggregation,
            elements=schema.elements,
            group_size=config.group_size,
            meter=meter,
            cut_shares=cut_shares,
            upload=RateLimit(config.max_upload_mbps),
            download=RateLimit(config.max_download_mbps),
        ),
        matchmaker,
        RoundSettings(
            run_id=config.run_id,
            target=config.group_size,
            minimum=config.min_group_size,
            exchange_timeout=config.exchange_timeout,
        ),
        tails,
        presence.why_alone,
        run.accuse,
        leave=presence.withdraw,
    )
