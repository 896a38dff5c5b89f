"""The question of an audit: is this the average of these contributions? No I/O, no clock, no random source.

The auditor reduces a part again and compares bits. In nearly all cases, the bits are equal. But two processors, or two
versions of a library, may round a sum of floats differently in the last bit. No honest reducer may be taken for a liar
because of that. So where bits differ, each value may be off by rounding, and by no more:

* the average as sent is as close to the exact result as the best encoding is, plus a rounding error of
  ``ROUNDING`` times the largest contribution to that value.

A liar can use this freedom, but it moves each value by 1.5e-5 of the largest contribution to it at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2pavg.allreduce.errors import BadContributionError
from p2pavg.allreduce.norm_check import NormCheck
from p2pavg.allreduce.reduction import Contribution, bytes_of, decoded, reduce_part, scaled
from p2pavg.group.aggregation import Aggregation
from p2pavg.group.norms import norm_factors
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Buffer
from p2pavg_compression import MAX_MAGNITUDE, Codec, CodecError

ROUNDING = 2.0**-16
"""Of float32 sums of up to 128 contributions, each rounded to 24 bits, with a reserve of a factor of two."""


def what_is_wrong(
    codec: Codec,
    roster: Roster,
    aggregation: Aggregation,
    values: Sequence[torch.Tensor | Buffer],
    elements: int,
    average: Buffer,
) -> str:
    """Return why a part's average is not that of its contributions; empty if it is.

    Args:
        roster: of the attempt.
        values: of each contributor, in the roster's order: what the codec made of its part, or float32 values (the
            reducer's own).
        elements: length of the part.
        average: the part's average, as the reducer has sent it.
    """
    factors = norm_factors(roster, aggregation.max_norm)
    contributions = [
        Contribution(member.peer_id, member.weight, value, factors.get(member.peer_id, 1.0))
        for member, value in zip(roster.contributors, values, strict=True)
    ]
    exact = torch.empty(elements)
    check = None if aggregation.max_norm is None else NormCheck(roster)
    try:
        if check is not None:  # the reduction does not check a reducer's own values
            for contribution in contributions:
                if isinstance(contribution.values, torch.Tensor):
                    check.take(contribution.peer_id, contribution.values)
        reduce_part(codec, contributions, roster.total_weight, exact, robust=aggregation.robust, check=check)
    except BadContributionError as error:
        return f"it averaged a contribution of {error.peer_id} that counts in no round: {error}"
    exact.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    best = bytes_of(exact) if codec.is_identity else codec.encode(exact)
    if bytes(best) == bytes(average):
        return ""
    try:
        sent = codec.decode(average, elements, torch.empty(elements)).double()
    except CodecError as error:
        return f"its average does not decode: {error}"
    nearest = codec.decode(best, elements, torch.empty(elements)).double()
    largest = torch.zeros(elements, dtype=torch.float64)
    for contribution in contributions:
        torch.maximum(largest, _magnitudes(codec, contribution, elements), out=largest)
    precise = exact.double()
    allowed = (nearest - precise).abs() + ROUNDING * (largest + sent.abs())
    wrong = int(((sent - precise).abs() > allowed).sum())
    return f"{wrong} of {elements} values of a part are not the average of the contributions" if wrong else ""


def _magnitudes(codec: Codec, contribution: Contribution, elements: int) -> torch.Tensor:
    values = decoded(codec, contribution, torch.empty(elements))
    return scaled(contribution, values, torch.empty).double().abs()
