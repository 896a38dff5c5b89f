"""The entry in which a peer of a run states what it averages, so that peers that cannot meet see the reason.

No I/O, no clock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.base.numbers import is_rule
from p2pavg.group.aggregation import topology_in
from p2pavg.group.candidate import is_codec_name
from p2pavg.group.strategy import mark_in
from p2pavg_dht import Record

MAX_ELEMENTS = 2**34
MEAN = "the weighted mean"

_KEY_DOMAIN = "p2pavg/run/2"


class RunEntry(Message, frozen=True, kw_only=True, tag=3):
    """Description of what one peer of a run averages."""

    schema_hash: Hash
    tensors: Annotated[int, Meta(ge=1)]
    elements: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
    codec: str
    group_size: Annotated[int, Meta(ge=2, le=MAX_GROUP_SIZE)]
    rule: str
    """The participation rule, empty if all members contribute, and the mark of a strategy."""
    aggregation: str
    """The text of how contributions are combined; empty for the weighted mean."""

    def __post_init__(self) -> None:
        if not is_codec_name(self.codec):
            raise ValueError("a run entry without a codec")
        if not is_rule(self.rule) or not is_rule(self.aggregation):
            raise ValueError("a run entry whose rule is too long, or not printable")


def run_key(run_id: str) -> bytes:
    """Return the key under which every peer of a run, ready or not, publishes its entry."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


def read_entries(records: Iterable[Record]) -> dict[str, RunEntry]:
    """Return the entry of each publisher; leave out malformed ones."""
    entries = {}
    for record in records:
        try:
            entries[record.publisher] = RunEntry.decode(record.value)
        except RemoteProtocolError:
            continue
    return entries


def why_apart(mine: RunEntry, others: Iterable[RunEntry]) -> str:
    """Return one sentence for each kind of peer of this run that cannot meet this one; empty if there is none."""
    apart = (entry for entry in others if _meets(entry) != _meets(mine))
    kinds = Counter(_difference(mine, entry) for entry in apart)
    return "; ".join(
        f"{count} peer{'s' if count > 1 else ''} of this run average{'' if count > 1 else 's'} {what}"
        for what, count in kinds.most_common(3)
    )


def _meets(entry: RunEntry) -> tuple[bytes, str, str, str]:
    return (entry.schema_hash, entry.codec, entry.rule, entry.aggregation)


def _difference(mine: RunEntry, other: RunEntry) -> str:
    if other.tensors != mine.tensors:
        return f"{other.tensors} tensors, you have {mine.tensors}"
    if other.elements != mine.elements:
        return f"{other.elements} elements, you have {mine.elements}"
    if other.schema_hash != mine.schema_hash:
        return "tensors of other names, shapes or dtypes than yours"
    if mark_in(other.rule) != mark_in(mine.rule):
        return _another_strategy(bool(mark_in(mine.rule)), bool(mark_in(other.rule)))
    if other.rule != mine.rule:
        return "with another participation rule than yours"
    if topology_in(other.aggregation) != topology_in(mine.aggregation):
        return f"with the topology {topology_in(other.aggregation)}, you with {topology_in(mine.aggregation)}"
    if other.aggregation != mine.aggregation:
        return f"by {other.aggregation or MEAN}, you by {mine.aggregation or MEAN}"
    return f"with the codec {other.codec}, you with {mine.codec}"


def _another_strategy(mine: bool, its: bool) -> str:
    if mine and its:
        return "with another strategy than yours"
    return "without your strategy" if mine else "with a strategy, and you have none"
