"""The question of an audit: is this the average of these contributions? No I/O, no clock, no random source.

The auditor reduces a part again and compares bits. In nearly all cases, the bits are equal. But two processors, or two
versions of a library, may round a sum of floats differently in the last bit. No honest reducer may be taken for a liar
because of that. So where bits differ, each value may be off by rounding, and by no more:

* the average as sent is as close to the exact result as the best encoding is, plus a rounding error of
  ``ROUNDING`` times the largest contribution to that value. With a robust rule, only what the rule keeps of the
  contributions counts: a reducer's own values reach no other member, so it can show any.

A liar can use this freedom, but it moves each value by 1.5e-5 of the largest contribution to it at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2pavg.allreduce.events import BadContributionError
from p2pavg.allreduce.reduction import NormCheck, PartContribution, bytes_of, decoded, reduce_part, scaled
from p2pavg.allreduce.robust import largest_kept
from p2pavg.allreduce.vector.buffers import fresh_floats
from p2pavg.base.numbers import bounded_weights
from p2pavg.group.aggregation import Aggregation, RobustRule
from p2pavg.group.roster import Roster, norm_factors
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
        PartContribution(member.peer_id, member.weight, value, factors.get(member.peer_id, 1.0))
        for member, value in zip(roster.contributors, values, strict=True)
    ]
    # What others sent is checked when it is decoded. A reducer shows its own values as they are, and with NaN in them
    # there is no average at all.
    for contribution in contributions:
        own = contribution.values
        if isinstance(own, torch.Tensor) and not bool((own.abs() <= MAX_MAGNITUDE).all()):
            peer_id = contribution.peer_id
            return f"it averaged a contribution of {peer_id} that counts in no round: its values are out of range"
    exact = fresh_floats(elements)
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
        sent = codec.decode(average, elements, fresh_floats(elements)).double()
    except CodecError as error:
        return f"its average does not decode: {error}"
    nearest = codec.decode(best, elements, fresh_floats(elements)).double()
    largest = _largest(codec, contributions, elements, aggregation.robust).double()
    precise = exact.double()
    allowed = (nearest - precise).abs() + ROUNDING * (largest + sent.abs())
    wrong = int(((sent - precise).abs() > allowed).sum())
    return f"{wrong} of {elements} values of a part are not the average of the contributions" if wrong else ""


def _largest(
    codec: Codec, contributions: Sequence[PartContribution], elements: int, robust: RobustRule | None
) -> torch.Tensor:
    """Return the largest magnitude of what is averaged to each value."""
    rows = (
        scaled(contribution, decoded(codec, contribution, fresh_floats(elements)), fresh_floats)
        for contribution in contributions
    )
    if robust is not None:
        weights = bounded_weights([contribution.weight for contribution in contributions])
        return largest_kept(robust, list(rows), weights)
    largest = fresh_floats(elements).zero_()
    for row in rows:
        torch.maximum(largest, row.abs(), out=largest)
    return largest
