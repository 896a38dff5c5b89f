"""Bounded influence: the factors by which long contributions are shortened. No I/O, no clock, no random source.

Each member signs the Euclidean norm of its contribution in its readiness record, as it signs its weight: both belong to
the contribution that is set aside before the record is signed. The roster carries these records. So all members of a
group, and of a later attempt among some of them, compute the same factors from the same bytes.

A median of earlier rounds would not do. Members remember different rounds, because each was in other groups, was lost
or has just joined, and reducers with different factors would average different things.
"""

from __future__ import annotations

from p2pavg.base.weights import bounded_weights, lower_median
from p2pavg.group.roster import Roster


def norm_factors(roster: Roster, max_norm: float | None) -> dict[str, float]:
    """Return the factor for each contribution that is longer than ``max_norm`` times the group's median norm.

    The median is the lower weighted median of the norms that the contributors signed, with
    :func:`~p2pavg.base.weights.bounded_weights`. Contributors that lie about their norms cannot raise it above the
    largest honest norm, unless they have more than half of this weight.

    Args:
        max_norm: 1 or more; ``None`` bounds nothing.

    Returns:
        Factors from 0 to below 1, by peer id, in the roster's order. Other contributions are averaged as they are.
    """
    if max_norm is None:
        return {}
    members = roster.contributors
    weights = bounded_weights([member.weight for member in members])
    longest = max_norm * lower_median([member.norm for member in members], weights)
    return {member.peer_id: longest / member.norm for member in members if member.norm > longest}
