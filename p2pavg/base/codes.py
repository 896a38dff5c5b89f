"""Codes of the results that are no success, for programs; the sentence beside each is for people.

The values are stable: programs, dashboards and alerts may compare and store them. A later version may add values.

No I/O, no clock.
"""

from __future__ import annotations

from enum import StrEnum


class NoPeersCode(StrEnum):
    """The reason why a round has found no group. :attr:`remedy` says what to do."""

    NOTHING_ACCUMULATED = "nothing_accumulated"
    """Nothing waits for a round."""
    NO_PEER_READY = "no_peer_ready"
    """No other peer of the run was ready in time."""
    UNREACHABLE = "unreachable"
    """Other peers were ready, and this one could not reach them, or they did not answer."""
    REFUSED = "refused"
    """Other peers were ready, and this peer refuses them, e.g. because they lied or are no members of the run."""
    NOT_ADMITTED = "not_admitted"
    """This peer's own certificate does not hold: it has ended, or was revoked."""
    OTHER_PARAMETERS = "other_parameters"
    """Peers of the run were ready with other parameters (another state) than this one."""
    OTHER_SETTINGS = "other_settings"
    """Peers of the run average other tensors, or with another codec or rule."""
    CLOCK_OR_VERSION = "clock_or_version"
    """No peer was ready, and this peer's clock or protocol versions differ from those of the peers that it knows."""
    CANCELLED = "cancelled"
    """The caller cancelled matchmaking."""
    NO_GROUP = "no_group"
    """The attempt ended without a group for another reason, which the sentence gives."""

    @property
    def remedy(self) -> str:
        """A sentence on what to do."""
        return _NO_PEERS_REMEDIES[self]


class FailedCode(StrEnum):
    """The reason why a round with a group gave this peer no result. :attr:`remedy` says what to do."""

    TIMED_OUT = "timed_out"
    """The exchange took longer than ``exchange_timeout``."""
    PEERS_LOST = "peers_lost"
    """So many members were lost that those left could not end the round."""
    LEFT_OUT = "left_out"
    """The others gave this peer up, and ended the round without it."""
    RESULT_MISSED = "result_missed"
    """The others have a result with this peer's contribution, and this peer lacks it."""
    RESULTS_DIFFER = "results_differ"
    """This peer holds another result than the other members."""
    OTHER_RANK = "other_rank"
    """Another rank of this peer has no result, or is still in a round."""
    PARAMETERS_REPLACED = "parameters_replaced"
    """The round averaged parameters that were replaced meanwhile."""
    TOO_FAR_APART = "too_far_apart"
    """The members of the group were too many outer steps apart to average."""
    OTHER = "other"
    """A program made this result, and gave no code."""

    @property
    def remedy(self) -> str:
        """A sentence on what to do."""
        return _FAILED_REMEDIES[self]


_NO_PEERS_REMEDIES = {
    NoPeersCode.NOTHING_ACCUMULATED: "call accumulate() before step(), or declare() and step(observe=True)",
    NoPeersCode.NO_PEER_READY: "start another peer of the run, and check that both bootstrap from the same network",
    NoPeersCode.UNREACHABLE: "run `p2pavg doctor` on both machines; open a port, or start a peer that relays",
    NoPeersCode.REFUSED: "ask the owners of the named peers; the sentence has the reason",
    NoPeersCode.NOT_ADMITTED: "ask the run's owner for a new certificate: `p2pavg run invite`",
    NoPeersCode.OTHER_PARAMETERS: "load the run's state (RunState), or start from the same seed or checkpoint",
    NoPeersCode.OTHER_SETTINGS: "give all peers of the run the same model, codec and rules",
    NoPeersCode.CLOCK_OR_VERSION: "set this machine's clock by NTP, and install the version that the run uses",
    NoPeersCode.CANCELLED: "call step() again when a round is wanted",
    NoPeersCode.NO_GROUP: "call step() again; if it happens again, run `p2pavg doctor`",
}

_FAILED_REMEDIES = {
    FailedCode.TIMED_OUT: "call step() again; if it happens again, raise exchange_timeout or use a smaller codec",
    FailedCode.PEERS_LOST: "call step() again: the next round is among the peers that are left",
    FailedCode.LEFT_OUT: "call step() again; if it happens again, check this machine's link with `p2pavg doctor`",
    FailedCode.RESULT_MISSED: "fetch the run's state (RunState): the others are one update ahead",
    FailedCode.RESULTS_DIFFER: "call step() again; if it happens again, the sentence names the peer that lies",
    FailedCode.OTHER_RANK: "call step() again on all ranks",
    FailedCode.PARAMETERS_REPLACED: "call step() again: the next round averages the present parameters",
    FailedCode.TOO_FAR_APART: "load the saved state of another peer on the one that is behind, or raise max_lag",
    FailedCode.OTHER: "read the sentence",
}
