"""Candidates and rosters with fixed keys, so every byte of them is fixed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from p2pavg.base.messages import pack
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.roster import Roster
from p2pavg_dht import Ed25519Signer, Record, sign_record

SIGNERS = [Ed25519Signer(bytes([index + 1]) * 32) for index in range(8)]
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
DEADLINE = 1_800_000_000.25
EXPIRATION = 1_800_003_600.0


def candidate(index: int, **changes: Any) -> Candidate:
    """Return the signed candidate of one of the fixed keys."""
    auxiliary = changes.get("auxiliary", False)
    fields: dict[str, Any] = {
        "key": KEY,
        "deadline": DEADLINE + index,
        "expiration_time": EXPIRATION,
        "weight": 0.0 if auxiliary else 8.0 * (index + 1),
        "bandwidth": 100.0,
        "codec": "blockwise8:64",
        "auxiliary": False,
        "addresses": (f"/ip4/192.0.2.{index}/tcp/4001",),
    }
    return sign_candidate(SIGNERS[index], **(fields | changes))


def roster(
    members: Sequence[Candidate],
    shares: Sequence[int] | None = None,
    proposal: int = 0,
    observers: Iterable[Candidate] = (),
) -> Roster:
    """Return a roster. Shares have 1000 elements each unless they are given."""
    return Roster(
        members=tuple(members),
        shares=tuple([1000] * len(members) if shares is None else shares),
        proposal=proposal,
        observers=frozenset(member.peer_id for member in observers),
    )


def record_of(index: int, *fields: Any, key: bytes = KEY) -> Record:
    """Return a genuine readiness record of any fields."""
    return signed(index, pack(*fields), key=key)


def signed(index: int, value: bytes, *, key: bytes = KEY) -> Record:
    """Return a genuine record of any value."""
    return sign_record(SIGNERS[index], key=key, sequence=1, expiration_time=EXPIRATION, value=value)
