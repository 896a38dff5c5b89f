"""This peer's place in a run: its run entry, and the reasons why peers of the run do not meet."""

from __future__ import annotations

import trio

from p2pavg.base.codes import NoPeersCode
from p2pavg.base.limits import RECORD_LIFE_SECONDS
from p2pavg.peer.host import Host
from p2pavg.round.rounds import Alone
from p2pavg.runs.records.hello import no_peer_of_the_run
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key, why_apart
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.runs.records.spread_records import SpreadRecords

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
