"""Conclusions from other peers' clocks, protocol versions and number of runs. No I/O, no clock, no random source.

The protocol ``/p2pavg/hello/1`` is one question and one answer: the time of day, the protocols that the peer serves,
and the number of runs it takes part in. It never changes, so that peers of all versions can tell each other their
versions. Run ids stay private: only their number is sent. :mod:`p2pavg.runs.records.greeting` asks and answers.

Every answer may be false. Answers only affect log lines and ``NoPeers.reason``. The median of the clocks counts, and
the sentence gives the number of peers behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Message, pack

PROTOCOL = "/p2pavg/hello/1"
QUESTION = pack(1)
MAX_HELLO_BYTES = 2048
MAX_PROTOCOLS = 16
MAX_PROTOCOL_CHARS = 64
MAX_RUNS = 10_000
MAX_CLOCK = 1e11  # seconds since 1970; thousands of years
SKEW_SECONDS = 5.0
"""A smaller error does no harm. A follower leaves a leader that is 5 s late by the follower's own clock."""

_VERSIONED = re.compile(r"/p2pavg/([a-z]{1,16})/([0-9]{1,4}(?:\.[0-9]{1,4}){0,2})")


class PeerHello(Message, frozen=True, kw_only=True, tag=1):
    """One peer's answer."""

    clock: Annotated[float, Meta(ge=0.0, le=MAX_CLOCK)]
    """Wall clock, seconds since 1970."""
    protocols: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_PROTOCOL_CHARS)], ...], Meta(max_length=MAX_PROTOCOLS)
    ]
    runs: Annotated[int, Meta(ge=0, le=MAX_RUNS)]


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """An answer, and how far its clock is ahead of this peer's, in seconds."""

    hello: PeerHello
    ahead: float


def compare(hello: PeerHello, asked: float, answered: float) -> HelloAnswer:
    """Return an answer with the certain part of the clock difference: what the call's duration cannot explain.

    Args:
        asked: this peer's wall clock when it asked.
        answered: this peer's wall clock when the answer arrived.
    """
    if hello.clock > answered:
        return HelloAnswer(hello, hello.clock - answered)
    return HelloAnswer(hello, min(0.0, hello.clock - asked))


def clock_error(heard: Sequence[HelloAnswer]) -> float:
    """Return the seconds by which the median of other peers' clocks is ahead of this one; 0.0 if it shows no error."""
    if not heard:
        return 0.0
    sorted_ahead = sorted(answer.ahead for answer in heard)
    middle = (sorted_ahead[(len(heard) - 1) // 2], sorted_ahead[len(heard) // 2])
    ahead = min(middle, key=abs)
    return 0.0 if abs(ahead) <= SKEW_SECONDS else ahead


def wrong_clock(heard: Sequence[HelloAnswer]) -> str:
    """Return a sentence that this peer's clock is off; empty when the median of the answers shows no error."""
    ahead = clock_error(heard)
    if not ahead:
        return ""
    like = sum(answer.ahead * ahead > 0 and abs(answer.ahead) > SKEW_SECONDS for answer in heard)
    of = "" if like == len(heard) else f" of {len(heard)}"
    way = "behind" if ahead > 0 else "ahead of"
    return f"your clock is {abs(ahead):.0f} s {way} {like}{of} peer{'s' if len(heard) > 1 else ''}; set it"


def other_versions(mine: Sequence[str], heard: Sequence[HelloAnswer]) -> str:
    """Return a sentence on the peers that speak another version of one of this peer's protocols; empty if none does."""
    own = _versions(mine)
    found = Counter[tuple[str, str]]()
    for answer in heard:
        theirs = _versions(answer.hello.protocols)
        for name in sorted(own.keys() & theirs.keys()):
            if not own[name] & theirs[name]:
                found[name, _newest(theirs[name])] += 1
    return "; ".join(
        f"{count} peer{'s speak' if count > 1 else ' speaks'} {name}/{version}, this one {name}/{_newest(own[name])}"
        for (name, version), count in found.most_common(3)
    )


def _newest(versions: Iterable[str]) -> str:
    """Return the highest version, compared as a number: 10 is above 9."""
    return max(versions, key=lambda version: tuple(map(int, version.split("."))))


def _versions(protocols: Sequence[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for protocol in protocols:
        if (match := _VERSIONED.fullmatch(protocol)) is not None:
            found.setdefault(match[1], set()).add(match[2])
    return found


def no_peer_of_the_run(
    run_id: str, *, known: int, heard: Sequence[HelloAnswer], addresses: Sequence[str]
) -> str:
    """Describe the network to a peer that finds no other peer of its run.

    Args:
        known: peers in the network that answered lately.
        addresses: addresses at which this peer can be dialled.
    """
    if not known:
        if not addresses:
            return "no other peer is in this network, and none can join it through this peer, which cannot be dialled"
        return f"no other peer is in this network; others join with bootstrap=[{addresses[0]!r}]"
    are = "peers are" if known > 1 else "peer is"
    none = "none of them takes" if known > 1 else "it does not take"
    sentence = f"{known} other {are} in this network; {none} part in run {run_id!r}"
    elsewhere = sum(answer.hello.runs > 0 for answer in heard)
    if elsewhere:
        sentence += f"; {elsewhere} of {len(heard)} asked take part in other runs"
    return sentence
