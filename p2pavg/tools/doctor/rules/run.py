"""The run, its peers, and the bandwidth to some of them. No I/O, no clock, no random source.

Everything here may come from strangers. The texts were checked where they came in: codecs, rules and fields of recipes
are short and printable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from p2pavg.base.formats import count
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.reasons import unreached_peers
from p2pavg.optim.coordination.word import RecipeRecord
from p2pavg.runs.records.run_entry import MEAN, RunEntry
from p2pavg.tools.doctor.findings import Finding, fault, not_known, note, ok, warning

SLOW_MBPS = 1.0
MAX_TOLD = 3  # differences, refused peers, or recipes that are named; the others are counted
_BYTES_OF = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
_BYTES_OF_OTHERS = 1.1  # the codecs of 8 bits, with their scales


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run as its members' records describe it."""

    run_id: str
    known: int
    """Peers of the network that answered."""
    entries: Mapping[str, RunEntry]
    """The entry of each peer, by peer id."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The reason for which a publisher's record does not count, by peer id."""
    ready: tuple[Candidate, ...] = ()
    """The peers that are ready for a round at this moment."""
    unreached: tuple[tuple[Candidate, str], ...] = ()
    """Ready peers that could not be reached, each with the reason."""
    words: Mapping[str, RecipeRecord] = field(default_factory=dict)
    """The recipe of each peer that trains with an optimizer of p2pavg, by peer id."""
    codec: str | None = None
    """The codec of the run file; ``None`` without one."""
    aggregation: str | None = None
    """The text of the run file's rule; ``None`` without one, empty for the weighted mean."""
    sealed: bool = False
    """True if the run has an authority."""


_peers = partial(count, thing="peer")


def judge_run(run: FoundRun | None, *, asked: bool) -> list[Finding]:
    """Judge whether the run was found.

    Args:
        run: ``None`` if the network was not reached.
        asked: true if the user named a run.
    """
    if not asked:
        return [not_known("run", "no run was named: add --run FILE or --run-id ID")]
    if run is None:
        return [not_known("run", "no peer of the network was reached")]
    if run.entries:
        return [ok("run", f"{_peers(len(run.entries))} of the run {run.run_id!r}")]
    remedy = "start a peer of the run, and compare the run id with that of the other peers"
    # The keys of a run's records follow from its secret. With another secret, a peer looks in other places.
    if run.sealed:
        remedy += "; all peers need the same run file: `p2pavg run rotate` makes one with another secret"
    network = (
        f"the {_peers(run.known)} of this network" if run.known else "this network, in which no peer answers,"
    )
    cause = f"none of {network} takes part in it, or the peers of the run are in another network"
    return [fault("run", f"no peer of the run {run.run_id!r} was found", cause, remedy)]


def judge_peers(run: FoundRun | None, own_id: str | None) -> list[Finding]:
    """Judge whether the peers of a run can meet each other, and this one.

    Args:
        own_id: this peer's id. If it runs already, the others are compared with it.
    """
    if run is None:
        return []
    found = [
        *_judge_entries(run, own_id),
        *_judge_recipes(run, own_id),
        *_judge_refused(run),
        *_judge_unreached(run),
    ]
    if not found and run.entries:
        found.append(ok("peers", f"{_peers(len(run.entries))} can meet"))
    return [*found, *_judge_ready(run)]


# ------------------------------------------------------------------ what peers average


_REMEDIES = {
    "schema": "give all peers the same model, with tensors of the same names, shapes and dtypes",
    "codec": "give all peers the same compression=…",
    "participation rule": "give all peers the same participation=… and strategy",
    "aggregation": "give all peers the same robust=…, max_norm=…, audit=… and topology=…",
}


def _told(entry: RunEntry) -> dict[str, str]:
    """Return the parts of an entry that all peers must have alike, in words."""
    return {
        "schema": f"{entry.tensors} tensors of {entry.elements} elements",
        "codec": entry.codec,
        "participation rule": entry.rule or "none",
        "aggregation": entry.aggregation or MEAN,
    }


def _judge_entries(run: FoundRun, own_id: str | None) -> list[Finding]:
    if not run.entries:
        return []
    # If this peer runs, the user wants to know what is wrong with it, whatever most peers do.
    own = run.entries.get(own_id or "")
    reference = own or Counter(run.entries.values()).most_common(1)[0][0]
    expected = dict.fromkeys(_REMEDIES, "most peers" if own is None else "this peer")
    right = _told(reference)
    # What the run file says is right even if most peers have something else.
    if run.codec is not None:
        right["codec"], expected["codec"] = run.codec, "the run file"
    if run.aggregation is not None:
        right["aggregation"], expected["aggregation"] = run.aggregation or MEAN, "the run file"
    found = []
    for name, remedy in _REMEDIES.items():
        others = Counter(
            entry
            for entry in run.entries.values()
            if _told(entry)[name] != right[name]
            # The hash covers names, shapes and dtypes as well, so it may differ although the numbers agree.
            or (name == "schema" and entry.schema_hash != reference.schema_hash)
        )
        if not others:
            continue
        # One example is enough: all that differ need the same remedy.
        told = _told(others.most_common(1)[0][0])[name]
        if told == right[name]:
            told += " with other names, shapes or dtypes"
        them = "the others" if expected[name] == "most peers" else "this one"
        what = f"{others.total()} of {_peers(len(run.entries))} of the run cannot meet {them}"
        found.append(fault("peers", what, f"{name}: {told}, {expected[name]} {right[name]}", remedy))
    return found


def _judge_recipes(run: FoundRun, own_id: str | None) -> list[Finding]:
    words = run.words
    if len(words) < 2:
        return []
    own = words.get(own_id or "")
    kinds = Counter((word.recipe, word.origin) for word in words.values())
    common = (own.recipe, own.origin) if own is not None else kinds.most_common(1)[0][0]
    reference = own or next(word for word in words.values() if (word.recipe, word.origin) == common)
    odd = [word for word in words.values() if (word.recipe, word.origin) != common]
    if not odd:
        return []
    whose = "most peers" if own is None else "this peer"
    # Many peers with the same mistake are told once.
    causes = dict.fromkeys(text for word in odd for text in _recipe_differences(word, reference, whose))
    return [
        fault(
            "peers",
            f"{len(odd)} of {_peers(len(words))} of the run train with another recipe",
            f"recipe: {'; '.join(list(causes)[:MAX_TOLD])}",
            "start all peers with the same program, settings and seed",
        )
    ]


def _recipe_differences(word: RecipeRecord, reference: RecipeRecord, whose: str) -> list[str]:
    its, own = dict(word.fields), dict(reference.fields)
    found = [
        f"{name} {its.get(name, 'none')}, {whose} {own.get(name, 'none')}"
        for name in dict.fromkeys([*own, *its])
        if its.get(name) != own.get(name)
    ]
    if (word.tensors, word.elements) != (reference.tensors, reference.elements):
        counts = f"{word.tensors} tensors of {word.elements} elements"
        found.insert(0, f"{counts}, {whose} {reference.tensors} of {reference.elements}")
    # The digest covers the whole recipe, and the fields are as many as a word has room for.
    if not found and word.recipe != reference.recipe:
        found.append("settings that are not published")
    if word.origin != reference.origin:
        found.append("other first parameters (another seed?)")
    return found


def _judge_refused(run: FoundRun) -> list[Finding]:
    kinds = Counter(run.refused.values())
    if not kinds:
        return []
    told = [f"{_peers(number)}: {why}" for why, number in kinds.most_common(MAX_TOLD)]
    what = f"members do not meet {_peers(len(run.refused))} that publish{'' if len(run.refused) > 1 else 'es'} here"
    remedy = "these peers need valid certificates of this run: `p2pavg run invite`"
    return [warning("peers", what, f"certificate: {'; '.join(told)}", remedy)]


def _judge_unreached(run: FoundRun) -> list[Finding]:
    if not run.unreached:
        return []
    return [
        warning(
            "peers",
            f"{len(run.unreached)} of {_peers(len(run.ready))} that are ready for a round cannot be reached from here",
            unreached_peers(run.unreached),
            "start the doctor on their machines: firewall, router and port mapping show why",
        )
    ]


def _judge_ready(run: FoundRun) -> list[Finding]:
    """Say how many peers are ready, and whether they are at different updates, as it happens between two rounds."""
    if not run.entries:
        return []
    # An auxiliary has no state: it helps with any.
    contributing = [each for each in run.ready if not each.auxiliary]
    what = (
        f"{_peers(len(contributing))} of the run look{'s' if len(contributing) == 1 else ''} for a group now"
    )
    states = Counter(each.state for each in contributing)
    if len(states) < 2:
        return [note("peers", what)]
    _, most = states.most_common(1)[0]
    cause = f"state: {len(contributing) - most} of them average with other parameters than the others"
    return [
        note(
            "peers", what, cause, "if it stays so, give all peers the same seed, first parameters and updates"
        )
    ]


# ------------------------------------------------------------------ bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The bandwidth between this machine and one peer."""

    peer_id: str
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    seconds: float = 0.0
    """The round trip."""
    error: str = ""
    """The reason for which it was not measured; empty if it was."""


def judge_bandwidth(
    measured: Sequence[Measured], elements: int, codec: str, exchange_timeout: float
) -> list[Finding]:
    """Judge the bandwidth to some peers.

    Args:
        elements: length of the run's longest vector; 0 if it is not known.
        codec: the run's codec.
        exchange_timeout: seconds that an exchange of the run may take.
    """
    if not measured:
        return [not_known("bandwidth", "no other peer was reached")]
    return [_judge_measured(each, elements, codec, exchange_timeout) for each in measured]


def _judge_measured(each: Measured, elements: int, codec: str, exchange_timeout: float) -> Finding:
    name = f"..{each.peer_id[-6:]}"
    if each.error:
        return not_known("bandwidth", f"{name}: {each.error}")
    what = f"{name}: {each.up_mbps:.1f} Mbit/s up, {each.down_mbps:.1f} Mbit/s down, {each.seconds * 1000:.0f} ms"
    slowest = min(each.up_mbps, each.down_mbps)
    size = elements * _BYTES_OF.get(codec.partition(":")[0], _BYTES_OF_OTHERS)
    # Reduce-scatter and all-gather each move about one vector in each direction.
    needed = 2 * 8 * size / (slowest * 1e6) if slowest else float("inf")
    if elements and needed > exchange_timeout:
        return warning(
            "bandwidth",
            what,
            f"at this speed, an exchange of {size / 1e6:.0f} MB takes about {needed:.0f} s, "
            f"and may take {exchange_timeout:.0f} s",
            "use a faster link, a codec with fewer bits, or a longer exchange_timeout",
        )
    # A slow link is told even if the run's vector is small, or not known.
    if slowest < SLOW_MBPS:
        cause = "the link of one of the two is slow, or busy at the moment"
        return warning("bandwidth", what, cause, "measure again when the link is idle, or use a faster one")
    return note("bandwidth", what) if not elements else ok("bandwidth", what)
