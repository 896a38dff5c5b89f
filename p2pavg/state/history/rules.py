"""The rules by which the averages of a segment are checked, and who contributed how much to one. No I/O, no clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from p2pavg.allreduce.vector.accumulation import AVERAGED_DTYPES, Schema
from p2pavg.base.errors import ConfigError, RemoteProtocolError, StateError
from p2pavg.base.numbers import bounded_weights
from p2pavg.consensus.certificate import verified_commit
from p2pavg.group.aggregation import Aggregation, read_aggregation
from p2pavg.group.candidate import ready_key
from p2pavg.group.roster import Roster, ShareCutter, norm_factors
from p2pavg.state.average import MIN_TRUSTED_SIGNERS, Expected
from p2pavg.state.history.entries import SegmentBeginning
from p2pavg_compression import Codec, CodecError, resolve_codec

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in AVERAGED_DTYPES}


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """What follows from the first entry of a segment."""

    key: bytes
    """Ready key of the run, which members sign: a segment with other tensors or rules than the run's has another."""
    codec: Codec
    aggregation: Aggregation
    schema: Schema
    cutter: ShareCutter

    def expected(self) -> Expected:
        """Return how an average is checked. Who its members are is checked apart from it."""
        return Expected(
            group_id=None,
            key=self.key,
            codec=self.codec,
            elements=self.schema.elements,
            robust=self.aggregation.robust is not None,
            cutter=self.cutter,
            trusts=lambda _: True,
        )

    def contributions(self, certificate: bytes) -> Contributions:
        """Verify a certificate, and return what is in its average; raise RemoteProtocolError as :meth:`committed`."""
        return self.contributions_in(self.committed(certificate))

    def committed(self, certificate: bytes) -> Roster:
        """Verify a certificate, and return the roster of the attempt that was committed.

        Raises:
            RemoteProtocolError: it is malformed, not genuine, or of a run with other rules.
        """
        whole, commit = verified_commit(certificate)
        # One member alone can make a group of itself and of records that others have published.
        if len(commit.signatures) < MIN_TRUSTED_SIGNERS:
            raise RemoteProtocolError(
                f"a certificate that {len(commit.signatures)} members have signed, {MIN_TRUSTED_SIGNERS} are needed"
            )
        if whole.members[0].record.key != self.key or whole.members[0].codec != self.codec.name:
            raise RemoteProtocolError("the certificate of a group with other tensors or rules")
        if sum(whole.shares) != self.schema.elements:
            raise RemoteProtocolError(f"the certificate of an average of {sum(whole.shares)} elements")
        return whole.among(commit.attempt, commit.members, self.cutter)

    def contributions_in(self, roster: Roster) -> Contributions:
        """Return what is in the average of a group, by the roster of the attempt that was committed."""
        members = roster.contributors
        weights = [member.weight for member in members]
        # A robust rule counts no claim above the median claim, so no more is credited. How much of a contribution
        # lies outside of the clipping radius is not in the roster, and is not struck out.
        if self.aggregation.robust is not None:
            weights = bounded_weights(weights)
        factors = norm_factors(roster, self.aggregation.max_norm)
        return Contributions(
            time=statistics.median_low(member.deadline for member in roster.members),
            samples={
                member.peer_id: weight * factors.get(member.peer_id, 1.0)
                for member, weight in zip(members, weights, strict=True)
            },
            before=roster.holders[0].state,
        )


@dataclass(frozen=True, slots=True)
class Contributions:
    """The contributions to one update."""

    time: float
    """Seconds since 1970: the lower median of the moments that the members have signed."""
    samples: dict[str, float]
    """By peer id, as the run's rules count them."""
    before: bytes
    """State of the lineage before the update, which all holders have signed."""


def rules_of(beginning: SegmentBeginning) -> SegmentRules:
    """Return the rules of a segment.

    Raises:
        StateError: this version does not know one of them; the message names it.
    """
    try:
        codec = resolve_codec(beginning.codec)
        aggregation = read_aggregation(beginning.aggregation)
    except (ConfigError, CodecError, ValueError, TypeError) as error:
        raise StateError(f"rules that this version does not know: {error}") from None
    unknown = set(beginning.dtypes) - _DTYPES.keys()
    if unknown:
        raise StateError(f"averages of the dtype {min(unknown)!r}, which is not averaged")
    schema = Schema(
        names=None,
        shapes=beginning.shapes,
        dtypes=tuple(_DTYPES[name] for name in beginning.dtypes),
        devices=(torch.device("cpu"),) * len(beginning.shapes),
    )
    return SegmentRules(
        key=ready_key(beginning.run_id, schema.hash, beginning.rule, beginning.aggregation),
        codec=codec,
        aggregation=aggregation,
        schema=schema,
        cutter=ShareCutter(schema.elements, codec.granularity, aggregation.topology),
    )


def dtype_names(schema: Schema) -> tuple[str, ...]:
    """Return the names of a schema's dtypes, as a segment has them."""
    return tuple(str(dtype).removeprefix("torch.") for dtype in schema.dtypes)
