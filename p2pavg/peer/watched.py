"""An averager as others see it: its events, its status, and the statuses of the run's peers."""

from __future__ import annotations

import trio

from p2pavg.base.version import __version__
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.peer.statuses import Statuses
from p2pavg.round.reports import RoundReports
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import Role, read_certificate
from p2pavg.runs.records.boards import Boards
from p2pavg.telemetry.hub import Events
from p2pavg.telemetry.keeper import StatusKeeper
from p2pavg.telemetry.round_log import log_round
from p2pavg.telemetry.status import MAX_STATUS_SECONDS, PeerStatus


class Telemetry:
    """The events, the boards and the statuses of one averager, or of one auxiliary.

    Args:
        nursery: publishes the status and the texts of the boards, and reads those of the others.
        role: of this peer in the run, as it begins.
    """

    def __init__(
        self,
        host: Host,
        config: AveragingConfig,
        run: JoinedRun,
        nursery: trio.Nursery,
        meter: BandwidthMeter,
        role: Role = Role.CONTRIBUTOR,
    ) -> None:
        self.events = Events(parent=host.events)
        self.boards = Boards(host.context, run.records, run_id=config.run_id, nursery=nursery)
        self.reports = RoundReports(self.events, run_id=config.run_id, context=host.context, run=run)
        keeper = StatusKeeper(_first_status(config, role))
        self.events.subscribe(keeper.take)
        self.events.subscribe(log_round)
        self.statuses = Statuses(
            host.context,
            self.boards,
            self.events,
            keeper,
            host.registry.statuses,
            run_id=config.run_id,
            meter=meter,
        )
        nursery.start_soon(self.statuses.run)


def _first_status(config: AveragingConfig, role: Role) -> PeerStatus:
    begins = PeerStatus(name=config.name, software=__version__, role=str(role))
    if config.access is None:
        return begins
    certificate = read_certificate(config.access.certificate)
    return PeerStatus(
        name=config.name,
        software=__version__,
        role=str(role),
        roles=tuple(sorted(certificate.roles)),
        expires=min(certificate.expires, MAX_STATUS_SECONDS),
    )
