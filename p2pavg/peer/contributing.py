"""The needs of the rounds of a run, besides the values: a matchmaker, the settings, and the peer's entry in the run."""

from __future__ import annotations

from functools import partial

import trio

from p2pavg.allreduce.context import run_context
from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.base.limits import RECORD_LIFE_SECONDS
from p2pavg.base.result import NoPeersCode
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import ready_key
from p2pavg.group.participation import observers
from p2pavg.group.roster import ShareCutter
from p2pavg.group.topology import site_of
from p2pavg.matchmaking.actions import Settings
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.round.rounds import Alone, Rounds, RoundSettings
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.hello import no_peer_of_the_run
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key, why_apart
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.runs.records.spread_records import SpreadRecords

# This peer's place in a run: its run entry, and the reasons why peers of the run do not meet.

_WHY_SECONDS = 3.0  # to look up why a round found no group; a lookup among peers that are there takes 0.1 s


class Presence:
    """This peer's entry among those of its run.

    Args:
        records: of the run.
        entry: describes what this peer averages.
    """

    def __init__(self, host: Host, records: RunRecords, run_id: str, entry: RunEntry) -> None:
        self._host = host
        self._records = SpreadRecords(records, host.id)
        self._run_id = run_id
        self._entry = entry

    async def publish(self) -> None:
        """Publish the entry, which stays until :meth:`withdraw`."""
        key = run_key(self._run_id)
        await self._records.publish(key, self._entry.encode(), ttl=RECORD_LIFE_SECONDS)
        await self._records.settle(key)

    async def withdraw(self) -> None:
        """Withdraw the entry."""
        await self._records.withdraw(run_key(self._run_id))

    async def why_alone(self) -> Alone:
        """Return why peers of the run may be there and yet not meet this one."""
        entries: dict[str, RunEntry] | None = None
        with trio.move_on_after(_WHY_SECONDS):  # keepers that do not answer must not hold up the result
            entries = read_entries(await self._records.find(run_key(self._run_id)))
            entries.pop(self._host.id, None)
        heard = await self._host.greeter.poll()
        apart = why_apart(self._entry, entries.values()) if entries else ""
        found = [apart]
        if entries == {}:
            found.append(
                no_peer_of_the_run(
                    self._run_id,
                    known=len(self._host.records.contacts),
                    heard=heard,
                    addresses=self._host.addresses,
                )
            )
        differences = self._host.greeter.differences(heard)
        code = NoPeersCode.NO_PEER_READY
        if apart or differences:
            code = NoPeersCode.OTHER_SETTINGS if apart else NoPeersCode.CLOCK_OR_VERSION
        return Alone("; ".join(filter(None, [*found, *differences])), code)


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
    cutter = ShareCutter(schema.elements, codec.granularity, aggregation.topology)
    matchmaker = Matchmaker(
        host.context,
        key=key,
        settings=Settings(
            target=config.group_size,
            minimum=config.min_group_size,
            match_timeout=config.match_timeout,
            cutter=cutter,
            choose_observers=partial(observers, config.participation),
            max_weight=config.most_weight,
            refuses=run.refuses,
        ),
        codec=codec.name,
        meter=meter,
        records=run.records,
        site=site_of(aggregation.topology),
    )
    host.registry.add_averager(key, matchmaker, config.run_id)
    run.matchmakers.append(matchmaker)
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
            cutter=cutter,
            upload=RateLimit(config.max_upload_mbps),
            download=RateLimit(config.max_download_mbps),
            recheck=float(config.recheck),
        ),
        matchmaker,
        RoundSettings(
            run_id=config.run_id,
            target=config.group_size,
            minimum=config.min_group_size,
            exchange_timeout=config.exchange_timeout,
        ),
        tails,
        run,
        presence,
    )
