"""Sentences that explain why peers are not in one group. No I/O, no clock, no random source.

They end up in logs and results, so the text of other peers is cut and made printable here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from p2pavg.base.formats import PeerText
from p2pavg.base.result import NoPeersCode
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.attempt_state import AttemptPhase, AttemptState
from p2pavg.net.addresses import CIRCUIT

MAX_NAMED = 3  # peers that a sentence names; the others are only counted
_MAX_ADDRESSES = 2
_MAX_WHY_CHARS = 100


def short(peer_id: str) -> str:
    """Return a short form of a peer id. Peer ids differ at the end; the beginning is the same for all."""
    return f"{peer_id[:4]}..{peer_id[-6:]}"


def why_apart(state: AttemptState, followers: Collection[str]) -> list[str]:
    """Return the reasons for which peers that were seen are not in this peer's group."""
    peers, me = state.peers, state.me
    leader = state.leader if state.phase is not AttemptPhase.ASKING else None
    others = [known for known in peers if known.peer_id not in followers]
    if leader is not None:
        others = [known for known in others if known.peer_id != leader.peer_id]
    unreached = [known.unreached for known in others if known.unreached is not None]
    declined = {
        known.peer_id: known.declined
        for known in others
        if known.declined is not None and known.unreached is None
    }
    refused = {known.peer_id: known.refused for known in peers if known.refused is not None}
    refused |= {known.peer_id: known.banned for known in peers if known.banned is not None}
    silent = [known.peer_id for known in others if known.is_silent and known.unreached is None]
    of_other_states = sum(
        candidate.codec == me.codec and not candidate.fits(me) for candidate in peers.candidates.values()
    )
    found = []
    if (own := state.own_refusal) is not None:
        found.append(f"this peer is not admitted to the run: {own}")
    if unreached:
        found.append(unreached_peers(unreached))
    if silent:
        found.append(
            f"{_peers(len(silent))} did not answer: {_named([short(peer_id) for peer_id in silent])}"
        )
    if declined:
        found.append(f"{_peers(len(declined))} declined: {_with_reasons(declined)}")
    if refused:
        found.append(f"this peer does not meet {_peers(len(refused))}: {_with_reasons(refused)}")
    if of_other_states:
        count = "1 peer" if of_other_states == 1 else f"{of_other_states} peers"
        do = "averages" if of_other_states == 1 else "average"
        found.append(
            f"{count} of this run {do} with other parameters (state): another seed, other first weights or another"
            " number of updates"
        )
    return found


def code_apart(state: AttemptState, followers: Collection[str]) -> NoPeersCode:
    """Return the weightiest of the reasons of :func:`why_apart`, for programs."""
    others = [known for known in state.peers if known.peer_id not in followers]
    found = {
        NoPeersCode.NOT_ADMITTED: state.own_refusal is not None,
        NoPeersCode.UNREACHABLE: any(known.unreached is not None or known.is_silent for known in others),
        NoPeersCode.REFUSED: any(known.refused is not None or known.banned is not None for known in others),
        NoPeersCode.OTHER_PARAMETERS: any(
            candidate.codec == state.me.codec and not candidate.fits(state.me)
            for candidate in state.peers.candidates.values()
        ),
    }
    return next((code for code, holds in found.items() if holds), NoPeersCode.NO_PEER_READY)


def unreached_peers(unreached: Sequence[tuple[Candidate, str]]) -> str:
    """Return a sentence about peers that were seen but could not be reached, with their number and addresses."""
    if not unreached:
        return ""
    them = "them" if len(unreached) > 1 else "it"
    found = [_unreached(candidate, why) for candidate, why in unreached]
    return f"saw {_peers(len(unreached))} and could not reach {them}: {_named(found)}"


def leader_wait(leader: Candidate, ready: int, target: int) -> str:
    """Return a sentence about the leader that a follower waits for."""
    return f"waiting for {short(leader.peer_id)}, which leads {ready} of {target} members, to form a group"


def _peers(count: int) -> str:
    return f"{count} other peer{'s' if count > 1 else ''}"


def _named(found: Sequence[str]) -> str:
    more = len(found) - MAX_NAMED
    return ", ".join(found[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _with_reasons(reasons: Mapping[str, str]) -> str:
    return _named([f"{short(peer_id)} ({_clean(why)})" for peer_id, why in reasons.items()])


def _unreached(candidate: Candidate, why: str) -> str:
    if not any(CIRCUIT in address for address in candidate.addresses):
        return f"{_where(candidate)} ({_why(candidate, why)})"
    ways = [
        f"{_way(address)}: {_clean(_why_at(address, candidate, why))}"
        for address in (*candidate.addresses[:_MAX_ADDRESSES], *candidate.addresses[-_MAX_ADDRESSES:])
    ]
    ways = list(dict.fromkeys(ways))  # a peer's relays come last
    return f"{short(candidate.peer_id)} ({'; '.join(ways)})"


def _way(address: str) -> str:
    """Return a description of the way that an address leads."""
    host, _, rest = address.partition("/p2p/")
    relay = rest.partition(CIRCUIT)[0]
    return f"through relay {short(relay)}" if CIRCUIT in rest else f"directly at {host}"


def _why_at(address: str, candidate: Candidate, why: str) -> str:
    """Return the reason that the transport's error gives for one of a peer's addresses."""
    _, found, rest = why.partition(f"{address}: ")
    if not found:
        return _why(candidate, why)
    for other in candidate.addresses:
        rest = rest.partition(f"; {other}: ")[0]
    return rest


def _where(candidate: Candidate) -> str:
    hosts = [address.partition("/p2p/")[0] for address in candidate.addresses[:_MAX_ADDRESSES]]
    return f"{short(candidate.peer_id)} at {', '.join(hosts)}" if hosts else short(candidate.peer_id)


def _why(candidate: Candidate, why: str) -> str:
    if not candidate.addresses:
        return "it announces no address, neither its own nor one of a relay"
    # The transport's error repeats the peer and its addresses.
    text = why.replace(f"no connection to {candidate.peer_id}: ", "").replace(f" to {candidate.peer_id}", "")
    for address in candidate.addresses:
        text = text.replace(f"{address}: ", "")
    return _clean("timed out" if text.startswith("no stream within") else text)


def _clean(text: str) -> str:
    printable = PeerText(text)  # an error's text, which may repeat what the peer wrote
    return printable if len(printable) <= _MAX_WHY_CHARS else printable[: _MAX_WHY_CHARS - 1] + "…"
