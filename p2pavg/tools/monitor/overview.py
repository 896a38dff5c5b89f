"""A run as its peers' statuses show it: for the page, the terminal and programs. No I/O, no clock.

Statuses are claims of peers that may be hostile. Each claim stays with the peer that made it: what a peer says of
others never changes their rows. The number of peers, rounds, series and events is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pavg.base.limits import CALM_LOOK_SECONDS, RECORD_LIFE_SECONDS
from p2pavg.telemetry.events import RoundKind, Way
from p2pavg.telemetry.status import PeerStatus, key_of
from p2pavg.tools.monitor.lineages import Compared, Reported, branches
from p2pavg.tools.monitor.rounds import MergedRound, MergedRounds
from p2pavg.tools.monitor.series import Series

MAX_PEERS = 1024
MAX_GONE = 64
"""Peers that are gone and still shown, each for as long as a record lives."""
MAX_NEWS = 60
MAX_SHOWN_ROUNDS = 40
MAX_SHOWN_EDGES = 512
FEW_PEERS = 64
"""Their lineages are compared at each change; those of more, at most once in CALM_LOOK_SECONDS."""


@dataclass(slots=True)
class _Row:
    status: PeerStatus
    first_seen: float
    last_seen: float
    gone: float | None = None
    reported: Reported = field(default_factory=Reported)


class Overview:
    """The run up to now. Calls are given ``now``, the wall clock in seconds.

    Args:
        run_id: names the run.
        me: id of the peer that looks on; empty if it is no peer of the run.
        begins: when it began to look.
    """

    def __init__(self, run_id: str, *, me: str = "", begins: float) -> None:
        self._run_id = run_id
        self._me = me
        self._began = begins
        self._rows: dict[str, _Row] = {}
        self._rounds = MergedRounds()
        self._series = Series()
        self._news: deque[dict[str, object]] = deque(maxlen=MAX_NEWS)
        self._excluded: Mapping[str, str] = {}
        self._compared: tuple[int, float, Compared] | None = None
        self._gives = ""
        self.version = 0
        """A number that grows with every change."""

    def receive(self, statuses: Mapping[str, tuple[PeerStatus, float]], now: float) -> None:
        """Note the live statuses of all peers; peers that are not among them are gone.

        Args:
            statuses: each peer's status by its id, and when it came.
        """
        for peer_id, (status, at) in statuses.items():
            row = self._rows.get(peer_id)
            # Invented peers push out no peer that is shown already.
            if row is None and len(self._rows) >= MAX_PEERS + MAX_GONE:
                continue
            if row is None or row.gone is not None:
                first, word = (now, "came") if row is None else (row.first_seen, "came back")
                # A peer that comes back may have begun anew. The states that it reported before do not count for it
                # then.
                row = self._rows[peer_id] = _Row(PeerStatus(), first, now)
                self._tell(now, "came", word, peer_id)
            # A status is read once, so the same object means that no new one has come.
            elif row.status is status:
                continue
            self._update(peer_id, row, status, at, now)
        # A peer that has ended withdraws its status, or lets it expire.
        for peer_id, row in self._rows.items():
            if peer_id not in statuses and row.gone is None:
                row.gone = now
                self._tell(now, "gone", "is gone", peer_id)
        self._forget(now)

    def exclude(self, excluded: Mapping[str, str], now: float) -> None:
        """Note the peers that evidence, which this peer has verified itself, excludes from the run."""
        for peer_id in excluded.keys() - self._excluded.keys():
            self._tell(now, "excluded", f"is excluded: {excluded[peer_id]}"[:200], peer_id)
        self._excluded = dict(excluded)

    def give(self, sentence: str) -> None:
        """Note what this machine has given to the run."""
        if sentence != self._gives:
            self._gives = sentence
            self.version += 1

    def _update(self, peer_id: str, row: _Row, status: PeerStatus, at: float, now: float) -> None:
        if status.drift and status.drift != row.status.drift:
            self._tell(now, "drift", f"says: {status.drift}", peer_id)
        row.status, row.last_seen = status, at
        row.reported.receive(status)
        self._series.receive(peer_id, status)
        for round_ in self._rounds.receive(peer_id, status, now):
            self._tell_round(peer_id, round_)
        self.version += 1

    def _tell_round(self, peer_id: str, round_: MergedRound) -> None:
        # Each text says which peer claims it: the others of the round may say something else.
        claim = round_.claims[peer_id]
        if claim.result is RoundKind.FAILED:
            self._tell(
                round_.at, "failed", f"says that round {round_.name[:8]} failed: {claim.reason}", peer_id
            )
        elif claim.lost:
            lost = ", ".join(self._name_of(key) for key in claim.lost)
            self._tell(round_.at, "lost", f"says that round {round_.name[:8]} lost {lost}", peer_id)

    def _tell(self, at: float, kind: str, text: str, peer_id: str) -> None:
        self._news.append({"at": at, "kind": kind, "peer": peer_id, "text": text})
        self.version += 1

    def _forget(self, now: float) -> None:
        gone = sorted((row.gone, peer_id) for peer_id, row in self._rows.items() if row.gone is not None)
        # Those that went first are forgotten first.
        over = len(gone) - MAX_GONE
        for index, (at, peer_id) in enumerate(gone):
            if index < over or at + RECORD_LIFE_SECONDS <= now:
                del self._rows[peer_id]
                self._series.forget(peer_id)
                self.version += 1

    def _name_of(self, key: bytes) -> str:
        # A status names other peers by short keys. Those that no known peer has may be invented.
        found = next((peer_id for peer_id in self._rows if key_of(peer_id) == key), "")
        return (self._rows[found].status.name or found[-8:]) if found else f"a peer {key.hex()[:6]}"

    # ------------------------------------------------------------------ as JSON values

    def shown(self, now: float) -> dict[str, object]:
        """Return the run as JSON values. Moments are wall clock, in seconds; sizes are bytes."""
        live = {peer_id: row for peer_id, row in self._rows.items() if row.gone is None}
        ids = {key_of(peer_id).hex(): peer_id for peer_id in self._rows}
        found, apart = self._branches(live, now)
        of_branch = {peer_id: index for index, branch in enumerate(found) for peer_id in branch.peers}
        return {
            "run": self._run_id,
            "now": now,
            "since": self._began,
            "me": self._me if self._me in live else "",
            "gives": self._gives,
            "summary": _summary(row.status for row in live.values()),
            "peers": [
                _peer(peer_id, row, of_branch.get(peer_id), peer_id == self._me)
                for peer_id, row in sorted(self._rows.items(), key=_order)
            ],
            "rounds": self._rounds.shown(MAX_SHOWN_ROUNDS, ids),
            "series": self._series.shown(),
            "lineages": [
                {"epoch": each.epoch, "state": each.state.hex(), "peers": list(each.peers)} for each in found
            ],
            "not_compared": list(apart),
            "transfers": [
                {
                    "peer": peer_id,
                    "upload": transfer.is_upload,
                    "done": transfer.done,
                    "total": transfer.total,
                    "bytes_per_second": transfer.bytes_per_second,
                    "peers": transfer.peers,
                }
                for peer_id, row in sorted(live.items())
                for transfer in row.status.transfers
            ],
            "exchanges": _exchanges(live, ids),
            "excluded": [{"peer": i, "reason": why[:200]} for i, why in sorted(self._excluded.items())],
            "news": list(reversed(self._news)),
        }

    def _branches(self, live: Mapping[str, _Row], now: float) -> Compared:
        """Return the branches, as they are now or, in a run of many peers, as they were up to 3 s ago."""
        if self._compared is not None:
            version, at, compared = self._compared
            # If the clock was set back, the last result would otherwise count for as long as that.
            if version == self.version or (len(live) > FEW_PEERS and at <= now < at + CALM_LOOK_SECONDS):
                return compared
        compared = branches({i: r.reported.states for i, r in live.items() if r.status.lineage})
        self._compared = self.version, now, compared
        return compared


def _order(shown: tuple[str, _Row]) -> tuple[bool, str, str]:
    peer_id, row = shown
    # "~" comes after the letters of ASCII, so peers without a name stand behind those that have one.
    return (row.gone is not None, row.status.name or "~", peer_id)


def _summary(statuses: Iterable[PeerStatus]) -> dict[str, object]:
    found = list(statuses)
    return {
        "peers": len(found),
        "epoch": max((status.epoch for status in found), default=0),
        "samples_per_second": sum(status.samples_per_second for status in found),
        "samples": sum(status.total_samples for status in found),
        "sent": sum(status.total_sent for status in found),
        "drifted": sum(bool(status.drift) for status in found),
    }


_SHOWN = (
    *(
        "name",
        "role",
        "expires",
        "reach",
        "reach_sentence",
        "activity",
        "epoch",
        "samples",
        "samples_per_second",
    ),
    *("upload_mbps", "download_mbps", "grad_norm", "learning_rate", "total_samples", "drift"),
)
"""Fields of a status that are shown under their own names."""


def _peer(peer_id: str, row: _Row, branch: int | None, is_me: bool) -> dict[str, object]:
    status = row.status
    return {
        "id": peer_id,
        "me": is_me,
        "version": status.software,
        "roles": list(status.roles),
        "branch": branch,
        **{name: getattr(status, name) for name in _SHOWN},
        "metrics": dict(status.metrics),
        "rounds": status.total_rounds,
        "failures": status.total_failures,
        "sent": status.total_sent,
        "received": status.total_received,
        "excludes": len(status.excluded),
        # Counted from when the status came, because the peer's own clock may be wrong.
        "up_since": row.last_seen - status.uptime,
        "first_seen": row.first_seen,
        "last_seen": row.last_seen,
        "gone": row.gone,
    }


def _exchanges(live: Mapping[str, _Row], ids: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the pairs of known peers of which one or both say that they exchanged in their last round."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for peer_id, row in sorted(live.items()):
        status = row.status
        for way, keys in (
            (Way.LANE, status.lanes),
            (Way.STREAM, status.streams),
            (Way.RELAYED, status.relayed),
        ):
            for other in (ids.get(key.hex()) for key in keys):
                # A peer may claim to have exchanged with any other. Only pairs of peers that are there are drawn.
                if other is not None and other in live and other != peer_id:
                    # Both ends may speak of one exchange. It is one edge, with what each of them says.
                    pair = (min(peer_id, other), max(peer_id, other))
                    found.setdefault(pair, {})[peer_id] = str(way)
    pairs = sorted(found.items())[:MAX_SHOWN_EDGES]
    return [{"one": one, "other": other, "said": said} for (one, other), said in pairs]
