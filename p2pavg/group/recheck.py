"""Spot checks of contributions: a member computes another one's gradient again, and compares. No I/O, no clock.

Audits show that a reducer averaged what came. They do not show that what came is the gradient of the samples that its
sender claims. Where the batches of a job follow from the run, the peer and the update, another member can compute it
again, at the same parameters. Who checks whom follows from the checker's signature of the result: no other peer can
know it before the result is fixed, and so choose a contribution that is not looked at, and the checker cannot choose
it.

This proves nothing to others: floating point differs between kinds of hardware. It is this member's own judgement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.base.result import DrawnContribution
from p2pavg.group.roster import Roster
from p2pavg_compression import Codec, CodecError

TOLERANCE = 0.08
"""Of the relative difference, beside what the codec loses. Gradients in float32 of two machines differ by less than a
thousandth; one in bfloat16 and one in float32 by up to 5 % (``scripts/faults rechecks``); those of half of the samples
by 15 % at least, and by about 100 % when the model has learned what there is to learn."""
CODEC_FACTOR = 2.0
"""Of the codec's own error: values near the edge between two steps of the codec may fall on either side."""

_DOMAIN = "p2pavg/recheck/1"


def drawn_targets(me: str, ticket: bytes, roster: Roster, fraction: float) -> list[str]:
    """Return the contributors whose gradients this member was drawn to compute again.

    Each contribution is checked ``fraction`` times on average, by other contributors that have reduced a share: they
    hold a part of it as it came. Anyone who has the signature of a member can tell what it was drawn for.

    Args:
        ticket: this member's signature of the committed result, as it stands in the certificate.
        roster: of the attempt that was committed, with its shares.
    """
    able = {
        member.peer_id
        for member, share in zip(roster.members, roster.shares, strict=True)
        if share and member in roster.contributors
    }
    if me not in able:
        return []
    found = []
    for target in roster.contributors:
        others = len(able - {target.peer_id})
        drawn = int.from_bytes(blake3(pack(_DOMAIN, ticket, target.peer_id)).digest(8), "big")
        if target.peer_id != me and drawn * others < fraction * 2.0**64:
            found.append(target.peer_id)
    return found


@dataclass(frozen=True, slots=True)
class Recheck:
    """The comparison of one contribution with what this member has computed."""

    peer_id: str
    theirs: float
    """L2 norm of the contribution, over the values that this member holds of it."""
    mine: float
    """That of the gradient that this member has computed, over the same values."""
    difference: float
    """L2 norm of the difference, in multiples of ``mine``."""
    allowed: float
    """The largest difference that different hardware and the codec explain."""

    @property
    def differs(self) -> bool:
        """True if the contribution is not what its samples give."""
        return not self.difference <= self.allowed  # also if it is not a number

    @property
    def why(self) -> str:
        """The finding as a sentence about the peer."""
        return (
            f"its contribution has the norm {self.theirs:.4g}, and its samples give {self.mine:.4g}: they differ by"
            f" {self.difference:.1%}, and {self.allowed:.1%} can be explained"
        )


def compare(drawn: DrawnContribution, gradients: Sequence[torch.Tensor], codec: Codec) -> Recheck:
    """Compare a contribution with gradients that were computed again.

    Args:
        gradients: in the order of the averaged vector, of any floating point dtype, on any device. The vector may have
            more behind them, such as buffers; those values are not compared.

    Raises:
        RemoteProtocolError: the contribution does not decode.
    """
    vector = torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in gradients])
    squares = torch.zeros(4, dtype=torch.float64, device="cpu")
    for start, stop, payload in drawn.parts:
        theirs = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        try:
            codec.decode(payload, stop - start, theirs)
        except CodecError as error:
            raise RemoteProtocolError(f"a contribution does not decode: {error}") from None
        mine = vector[start : min(stop, len(vector))]
        theirs = theirs[: len(mine)]
        if not len(mine):
            continue
        # What its sender would have sent of the right gradient: the codec's error is on both sides.
        sent = codec.decode(codec.encode(mine), len(mine))
        squares += torch.stack([_square(theirs), _square(mine), _square(theirs - sent), _square(mine - sent)])
    their_norm, my_norm, apart, lost = squares.sqrt().tolist()
    scale = my_norm or 1.0
    allowed = TOLERANCE + CODEC_FACTOR * lost / scale
    difference = apart / scale
    return Recheck(
        drawn.peer_id, their_norm, my_norm, difference if math.isfinite(difference) else math.inf, allowed
    )


def _square(values: torch.Tensor) -> torch.Tensor:
    return values.double().square().sum()
