"""Combination of contributions: the weighted mean, or a rule that a few liars cannot move far.

The rules are data here: names, parameters and a text that all peers of a run share. :mod:`p2pavg.allreduce.robust`
computes them. No I/O, no clock, no random source.

A rule counts no weight above the median weight of the group (:func:`p2pavg.base.numbers.bounded_weights`): a weight is
a claim of its sender. "Weight" below is what is counted so.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from blake3 import blake3

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_AUDIT_CHARS, MAX_ROBUST_CHARS
from p2pavg.base.numbers import check_number, read_number
from p2pavg.group.topology import BUTTERFLY, Hierarchical, Topology, resolve_topology
from p2pavg_compression import Codec

# Audits of a group's averages: how often they are made, and the draw of the auditors and the parts.
#
# A reducer that lies gives all members the same false bits. So members that are drawn reduce some of its parts again,
# from the bytes that the contributors signed.

DEFAULT_PROBABILITY = 0.125
PARTS_PER_AUDIT = 3
"""An audit covers one of three parts of a share, rounded up."""

_DOMAIN = b"p2pavg-draw/1\0"
_DRAWS = 2**32


@dataclass(frozen=True, slots=True)
class Audits:
    """Audits of a group's averages.

    Args:
        probability: probability with which at least one member audits a share in a round; above 0 and at most 1.
        before: audit before the round is committed, so that an average that is found false is no result. A round then
            takes as long as its audits. Otherwise members audit after the commit: a liar is found, and its lie stays in
            the results of the rounds before.

    Raises:
        ConfigError: an argument is out of range.
    """

    probability: float = DEFAULT_PROBABILITY
    before: bool = False

    def __post_init__(self) -> None:
        check_number("probability of an audit", self.probability, 1.0)

    @property
    def text(self) -> str:
        """The setting as text."""
        return f"{'before' if self.before else 'after'}:{float(self.probability)!r}"


def resolve_audits(given: object) -> Audits | None:
    """Return the audits that a text names; return :class:`Audits` unchanged, and ``None`` for ``"off"``.

    Texts are ``"after"``, ``"before"``, ``"after:PROBABILITY"``, ``"before:PROBABILITY"`` and ``"off"``.

    Raises:
        ConfigError: it is none of these, or the probability is out of range.
    """
    if isinstance(given, Audits):
        return given
    if isinstance(given, str) and len(given) <= MAX_AUDIT_CHARS:
        moment, colon, probability = given.partition(":")
        if given == "off":
            return None
        if moment in ("after", "before"):
            return Audits(read_number(probability) if colon else DEFAULT_PROBABILITY, moment == "before")
    raise ConfigError(f"an audit is 'after:PROBABILITY', 'before:PROBABILITY' or 'off', got {given!r}")


def drawn_parts(
    audits: Audits, ticket: bytes, reducer: int, parts: int, auditors: int, stretches: int = 1
) -> tuple[int, ...]:
    """Return the indices of the parts of one share that one member has to audit; empty if it is not drawn.

    The draw follows from the member's own signature of the result. No other member can compute that signature before it
    has sent its averages, so a reducer that lies cannot know whether it will be audited. Every member can verify the
    draw afterwards, so a reducer need not answer a member that was not drawn.

    Args:
        ticket: signature of the auditor about the attempt.
        reducer: position of the reducer in the group's roster.
        parts: number of parts of the reducer's share.
        auditors: number of members that may audit it: those that hold the result, without the reducer itself.
        stretches: number of pieces of the share that are drawn and audited like shares of their own. One member that
            reduces for a whole group is audited like the reducers whose place it takes: by several auditors, each of
            which asks for no more than it would ask one of them.
    """
    if parts == 0 or auditors == 0:
        return ()
    pieces = min(stretches, parts)
    edges = [piece * parts // pieces for piece in range(pieces + 1)]
    return tuple(
        start + index
        for piece, (start, stop) in enumerate(itertools.pairwise(edges))
        for index in _drawn(audits, reducer, piece, ticket, stop - start, auditors)
    )


def _drawn(
    audits: Audits, reducer: int, piece: int, ticket: bytes, parts: int, auditors: int
) -> tuple[int, ...]:
    place = reducer.to_bytes(2, "big") + (piece.to_bytes(2, "big") if piece else b"")
    drawn = blake3(_DOMAIN + place + ticket).digest(8)
    chance, first = int.from_bytes(drawn[:4], "big"), int.from_bytes(drawn[4:], "big") % parts
    # The members draw independently of each other: at least one of them is drawn with the probability that is set.
    if chance >= (1.0 - (1.0 - audits.probability) ** (1.0 / auditors)) * _DRAWS:
        return ()
    count = -(-parts // PARTS_PER_AUDIT)
    return tuple(sorted((first + offset) % parts for offset in range(count)))


MAX_ITERATIONS = 16
_MAX_NORM = "max_norm:"
_AUDIT = "audit:"
_TOPOLOGY = "topology:"
_OFF = "off"
_DEFAULT_AUDITS = Audits()
MAX_RADIUS = 1e6
MOST_NORMS = 1e6
MAX_FRACTION = 0.499  # a trimmed mean of all but nothing is the median, which has a name of its own


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The coordinate-wise trimmed mean, by weight: Yin et al. 2018 (arXiv:1803.01498), definition 2.

    In each coordinate, the contributions are laid in the order of their values on a line, each as long as its weight.
    ``fraction`` of the line is cut off at each end, also in the midst of a contribution. The result is the mean of what
    is left. With n equal weights and a whole ``fraction * n`` this is the paper's definition.

    Liars with at most ``fraction`` of the weight cannot bring any coordinate out of the range of the honest values.

    Args:
        fraction: part of the total weight that is cut off at each end, above 0 and at most 0.499.

    Raises:
        ConfigError: ``fraction`` is out of range.
    """

    fraction: float = 0.25

    def __post_init__(self) -> None:
        check_number("fraction of a trimmed mean", self.fraction, MAX_FRACTION)

    @property
    def text(self) -> str:
        """The rule as text, with its parameters."""
        return f"trimmed_mean:{float(self.fraction)!r}"


@dataclass(frozen=True, slots=True)
class Median:
    """The coordinate-wise median, by weight: Yin et al. 2018 (arXiv:1803.01498), definition 1.

    In each coordinate, the result is the value in the middle of the line that :class:`TrimmedMean` describes. If the
    middle is exactly between two contributions, the result is the midpoint of the two.

    Liars with less than half of the weight cannot bring any coordinate out of the range of the honest values.
    """

    text: ClassVar[str] = "median"
    """The rule as text."""


@dataclass(frozen=True, slots=True)
class CenteredClip:
    """Centred clipping: Karimireddy et al. 2021 (arXiv:2012.10333), algorithm 2, part by part.

    A center v begins as the coordinate-wise :class:`Median` of the part. Each iteration moves it by the weighted mean
    of the contributions' differences from it, each difference shortened to a length of at most tau. A reducer keeps
    nothing from round to round, so v cannot begin at the last round's result, as it does in the paper.

    tau is ``radius`` times the weighted median of the distances between the contributions and the first center. Each
    reducer sees only its share, so distances are those of a part, and no radius in absolute numbers would suit all
    parts.

    Each iteration moves v by at most tau, so the result is within ``iterations * tau`` of the median.

    Args:
        radius: tau in median distances, above 0 and at most 1e6.
        iterations: 1 to 16.

    Raises:
        ConfigError: an argument is out of range.
    """

    radius: float = 1.0
    iterations: int = 3

    def __post_init__(self) -> None:
        check_number("radius of centered clipping", self.radius, MAX_RADIUS)
        whole = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        if not whole or not 1 <= self.iterations <= MAX_ITERATIONS:
            raise ConfigError(
                f"iterations of centered clipping must be a whole number from 1 to {MAX_ITERATIONS},"
                f" got {self.iterations!r}"
            )

    @property
    def text(self) -> str:
        """The rule as text, with its parameters."""
        return f"centered_clip:{float(self.radius)!r}:{self.iterations}"


RobustRule: TypeAlias = TrimmedMean | Median | CenteredClip


def resolve_rule(given: object) -> RobustRule | None:
    """Return the rule that a text names; return a rule or ``None`` unchanged.

    Texts are ``"trimmed_mean"``, ``"trimmed_mean:FRACTION"``, ``"median"``, ``"centered_clip"``,
    ``"centered_clip:RADIUS"`` and ``"centered_clip:RADIUS:ITERATIONS"``. ``resolve_rule(rule.text) == rule`` for every
    rule.

    Raises:
        ConfigError: it is none of these, or a parameter is out of range.
    """
    if given is None or isinstance(given, TrimmedMean | Median | CenteredClip):
        return given
    if isinstance(given, str) and len(given) <= MAX_ROBUST_CHARS:
        name, *parameters = given.split(":")
        numbers = [read_number(parameter) for parameter in parameters]
        match name, numbers:
            case "trimmed_mean", []:
                return TrimmedMean()
            case "trimmed_mean", [fraction]:
                return TrimmedMean(fraction)
            case "median", []:
                return Median()
            case "centered_clip", []:
                return CenteredClip()
            case "centered_clip", [radius]:
                return CenteredClip(radius)
            case "centered_clip", [radius, iterations] if iterations.is_integer():
                return CenteredClip(radius, int(iterations))
    raise ConfigError(
        f"a rule is 'trimmed_mean:FRACTION', 'median' or 'centered_clip:RADIUS:ITERATIONS', got {given!r}"
    )


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Everything that a group agrees on about how contributions are combined."""

    robust: RobustRule | None = None
    """``None``: the weighted mean."""
    max_norm: float | None = None
    """The longest contribution, in medians of the group's norms; ``None``: contributions may have any norm."""
    audits: Audits | None = _DEFAULT_AUDITS
    """The audits of the reducers' averages; ``None``: there are none, and members sign no inputs and no averages."""
    topology: Topology = BUTTERFLY
    """The members that reduce."""

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, MOST_NORMS, least=1.0)
        if isinstance(self.topology, Hierarchical):
            _check_for_sites(self)

    @property
    def text(self) -> str:
        """The text from which a run's keys are derived; empty for an audited weighted mean in a butterfly."""
        words = [] if self.robust is None else [self.robust.text]
        if self.max_norm is not None:
            words.append(f"{_MAX_NORM}{float(self.max_norm)!r}")
        if self.audits != _DEFAULT_AUDITS:
            words.append(_AUDIT + (_OFF if self.audits is None else self.audits.text))
        if self.topology != BUTTERFLY:
            words.append(_TOPOLOGY + self.topology.text)
        return " ".join(words)


PLAIN = Aggregation()
"""The weighted mean, with the usual audits."""


def check_combinable(robust: object, codec: Codec) -> None:
    """Raise ConfigError if a robust rule is given for a codec with which it finds only zeros."""
    if robust is not None and codec.is_sparse:
        raise ConfigError(
            f"robust cannot be combined with the codec {codec.name}: most peers send no value for an element, so that a"
            " median is 0 and an honest value looks like a lie; max_norm and audits work with every codec"
        )


def _check_for_sites(aggregation: Aggregation) -> None:
    """Raise ConfigError if a group of sites cannot keep what the aggregation promises."""
    with_sites = "with topology 'hierarchical'"
    if aggregation.robust is not None:
        raise ConfigError(
            f"robust must be None {with_sites}: a robust rule compares contributions, and other sites see sums only"
        )
    if aggregation.max_norm is not None:
        raise ConfigError(
            f"max_norm must be None {with_sites}: a reducer cannot check the norms of another site's contributions"
        )
    if aggregation.audits is not None:
        raise ConfigError(
            f"audit must be 'off' {with_sites}: an auditor cannot tell a false sum of a site from a true one"
        )


def check_codec_for(topology: Topology, codec: Codec) -> None:
    """Raise ConfigError if a topology cannot use a codec."""
    if isinstance(topology, Hierarchical) and codec.is_sparse:
        raise ConfigError(
            f"compression cannot be {codec.name} with topology 'hierarchical': it would leave out most of each site's"
            " sum again, and no peer's error feedback knows of that; take another codec, such as 'blockwise8'"
        )


def topology_in(text: str) -> str:
    """Return the name of the topology in an aggregation's text, which may be of a later version."""
    words = [word.removeprefix(_TOPOLOGY) for word in text.split(" ") if word.startswith(_TOPOLOGY)]
    return words[0] if words else BUTTERFLY.text


def read_aggregation(text: str) -> Aggregation:
    """Return the aggregation of a text that another peer published.

    Raises:
        ConfigError: no :class:`Aggregation` has this text.
    """
    rule, most = None, None
    audits: Audits | None = _DEFAULT_AUDITS
    topology: Topology = BUTTERFLY
    for word in text.split(" ") if text else []:
        if word.startswith(_MAX_NORM):
            most = read_number(word.removeprefix(_MAX_NORM))
        elif word.startswith(_AUDIT):
            audits = resolve_audits(word.removeprefix(_AUDIT))
        elif word.startswith(_TOPOLOGY):
            topology = resolve_topology(word.removeprefix(_TOPOLOGY))
        else:
            rule = resolve_rule(word)
    found = Aggregation(rule, most, audits, topology)
    if found.text != text:
        raise ConfigError(f"an aggregation's text is {found.text!r}, got {text!r}")
    return found
