"""The entry in which a peer of a run states what it averages, so that peers that cannot meet see the reason.

No I/O, no clock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.base.messages import pack, unpack
from p2pavg.base.names import is_rule
from p2pavg.group.aggregation import topology_in
from p2pavg.group.candidate import is_codec_name
from p2pavg.group.strategy import mark_in
from p2pavg_dht import Record

MAX_ELEMENTS = 2**34
MEAN = "the weighted mean"

_KEY_DOMAIN = "p2pavg/run/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """Description of what one peer of a run averages."""

    schema_hash: bytes
    tensors: int
    elements: int
    codec: str
    group_size: int
    rule: str
    """The participation rule, empty if all members contribute, and the mark of a strategy."""
    aggregation: str
    """The text of how contributions are combined; empty for the weighted mean."""


def run_key(run_id: str) -> bytes:
    """Return the key under which every peer of a run, ready or not, publishes its entry."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


def encode_entry(entry: RunEntry) -> bytes:
    """Return the value of a record."""
    return pack(
        3,
        entry.schema_hash,
        entry.tensors,
        entry.elements,
        entry.codec,
        entry.group_size,
        entry.rule,
        entry.aggregation,
    )


def read_entry(value: bytes) -> RunEntry:
    """Read an entry; raise RemoteProtocolError for anything that :func:`encode_entry` does not make."""
    version, schema_hash, tensors, elements, codec, group_size, rule, aggregation = unpack(
        value, int, bytes, int, int, str, int, str, str
    )
    if version != 3 or len(schema_hash) != 32 or not is_codec_name(codec):
        raise RemoteProtocolError("a run entry of another version, or without a schema or codec")
    if not is_rule(rule) or not is_rule(aggregation):
        raise RemoteProtocolError("a run entry whose rule is too long, or not printable")
    if tensors < 1 or not 0 <= elements <= MAX_ELEMENTS or not 2 <= group_size <= MAX_GROUP_SIZE:
        raise RemoteProtocolError("a run entry with numbers out of range")
    return RunEntry(
        schema_hash=schema_hash,
        tensors=tensors,
        elements=elements,
        codec=codec,
        group_size=group_size,
        rule=rule,
        aggregation=aggregation,
    )


def read_entries(records: Iterable[Record]) -> dict[str, RunEntry]:
    """Return the entry of each publisher; leave out malformed ones."""
    entries = {}
    for record in records:
        try:
            entries[record.publisher] = read_entry(record.value)
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
