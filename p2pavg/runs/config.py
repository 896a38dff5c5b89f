"""The configuration of one averager."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import (
    EXCHANGE_SECONDS,
    MAX_CODEC_CHARS,
    MAX_RULE_CHARS,
    MAX_VERSION,
    MAX_WEIGHT,
    USUAL_GROUP_SIZE,
)
from p2pavg.base.numbers import check_number, is_rule
from p2pavg.group.aggregation import Aggregation, Audits, RobustRule, resolve_audits, resolve_rule
from p2pavg.group.participation import Participation, check_tags
from p2pavg.group.strategy import mark
from p2pavg.group.topology import Gossip, Hierarchical, Topology, resolve_topology
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.membership.run_file import PeerFiles, check_settings, check_size, read_access, read_run_file
from p2pavg.telemetry.status import MAX_NAME_CHARS, is_printable
from p2pavg_compression import Codec, resolve_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingConfig:
    """Settings with which an averager forms groups and exchanges.

    Args:
        run_id: name of the training run. Peers with different run ids never meet.
        group_size: number of members that a group aims at, 2 to 64, auxiliaries not counted. With the
            topology gossip it becomes ``degree + 1``: leave it out then.
        min_group_size: number of members that suffices once ``match_timeout`` has passed, 2 to ``group_size``.
        match_timeout: seconds that a peer looks for a full group before it accepts a smaller one.
        exchange_timeout: seconds after which an exchange that is not complete has failed.
        compression: the codec on the wire, by name (``"blockwise8"``, ``"int8:256"``, …) or as an object; ``None`` is
            fp32. Only peers with the same codec and block size form groups.
        bandwidth: Mbit/s that this peer can send and receive, 0.1 to 100,000; its share of the work follows from it.
            ``None``: measured in rounds.
        max_upload_mbps: Mbit/s that this peer sends at most, headers included; ``None`` is without limit.
        max_download_mbps: Mbit/s that this peer receives at most, likewise.
        participation: rule that decides which members of a group contribute and which only observe; ``None``: all
            contribute. All peers of a run need the same rule: peers with different rules never meet.
        tags: abilities of this peer, which participation rules can select by, e.g. ``("gpu", "fp16")``.
        max_weight: the most, in samples, that one contribution to a round may count. A peer that announces more is
            refused by name; this peer's own contribution counts ``max_weight`` when more has been accumulated. Choose a
            few times what one peer contributes to a round: a peer that lies about its samples counts no more than that.
            ``None``: 1e15.
        access: keys and certificate of a run that has an authority; ``None``: the run has none.
        open_run: let a peer without ``access`` leave this machine. Any peer that knows the ``run_id`` can then read and
            change the averages. Without it, such a peer listens on loopback addresses, dials no others, and asks no
            router: the processes of one machine average with each other.
        robust: rule that combines the contributions instead of their weighted mean, so that a few peers that lie cannot
            move the result far: :class:`TrimmedMean`, :class:`Median` or :class:`CenteredClip`, or the same as text
            (``"centered_clip:1.0:3"``, ``"median"``, ``"trimmed_mean:0.25"``). Begin with centred clipping: the other
            two make a steady bias of some peers worse than the mean does. A rule counts no weight above the median
            weight of the group, with or without ``max_weight``. All peers of a run need the same rule: peers with
            different rules never meet. ``None``: the weighted mean, which one peer moves as far as it likes.
        max_norm: a contribution that is longer (by the Euclidean norm of all of its values) than ``max_norm`` times the
            median of its group counts as if it were shortened to that length, 1 to 1e6. Each peer signs its norm, and
            :attr:`Success.clipped` names the peers that were shortened. All peers of a run need the same value.
            ``None``: contributions count as they are.
        audit: how members check each other's averages: :class:`Audits`, or text. ``"after"``: after each round, each
            share is audited by another member with probability 1/8 (``"after:0.5"``: 1/2). A reducer that lied is
            excluded from the run with evidence, and :attr:`Success.averaged` of the rounds before stays what it was.
            ``"before"``, ``"before:0.5"``: likewise before each round ends, which takes longer. ``"off"``: no audits.
            All peers of a run need the same value.
        recheck: how often each contribution is computed again by other members on average, 0 to 1, for
            :class:`~p2pavg.optim.AveragedOptimizer` with ``recompute``. It needs audits, and no topology
            ``"hierarchical"``. All peers of a run should have the same value: each checks what it is drawn for with its
            own.
        topology: the members that average: ``"butterfly"`` or :class:`Butterfly`, in which each member averages a share
            of the vector; ``"star"`` or :class:`Star`, in which the members elect one by announced ``bandwidth`` that
            averages everything; ``"hierarchical"`` or :class:`Hierarchical`, in which sites average before they
            exchange sums; ``"gossip"`` or :class:`Gossip`, in which a peer averages with a few others in each round,
            and with other ones in the next. All peers of a run need the same one: peers with different ones never
            meet.
        name: name of this peer for people, such as ``"garage, 3090"``: at most 40 printable characters. The other peers
            of the run see it (:meth:`DecentralizedAverager.members`); nothing depends on it. Empty: none.
        files: this peer's files in a run that has an authority, from :func:`p2pavg.join_run`: the peer of this
            configuration has the identity, the port and the bootstrap addresses of its folder. ``None``: none.
        strategy: text of the strategy with which the peers of the run train (:mod:`p2pavg.strategies`); empty: none.
            Peers with different strategies never meet, and hear why. ``Strategy.config`` sets it.
        version: version of the program with which the peers of the run train, 0 to 2**53. Optimizers of different
            versions neither average with each other nor follow each other. ``from_run`` takes it from the run's job.

    Raises:
        ConfigError: an argument is out of range; the message names it.
    """

    run_id: str
    group_size: int = USUAL_GROUP_SIZE
    min_group_size: int = 2
    match_timeout: float = 30.0
    exchange_timeout: float = EXCHANGE_SECONDS
    compression: str | Codec | None = "blockwise8"
    bandwidth: float | None = None
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    participation: Participation | None = None
    tags: tuple[str, ...] = ()
    max_weight: float | None = None
    access: RunAccess | None = None
    open_run: bool = False
    robust: str | RobustRule | None = None
    max_norm: float | None = None
    audit: str | Audits = "after"
    recheck: float = 0.0
    topology: str | Topology = "butterfly"
    name: str = ""
    strategy: str = ""
    version: int = 0
    files: PeerFiles | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.access is not None and not isinstance(self.access, RunAccess):
            raise ConfigError(f"access must be a RunAccess or None, got {type(self.access).__name__}")
        if self.files is not None and self.access is None:
            raise ConfigError("files must be None without access: they are those of a run with an authority")
        if not isinstance(self.open_run, bool):
            raise ConfigError(f"open_run must be True or False, got {self.open_run!r}")
        if self.open_run and self.access is not None:
            raise ConfigError("open_run must be False with access: a run with an authority has members")
        if self.participation is not None and not isinstance(self.participation, Participation):
            raise ConfigError(f"participation must be None or a rule, got {self.participation!r}")
        check_size("version", self.version, 0, MAX_VERSION)
        if not is_rule(self.rule):
            raise ConfigError(
                f"participation: a rule's text has at most {MAX_RULE_CHARS} printable characters"
            )
        check_tags(self.tags)
        if not isinstance(self.name, str) or not is_printable(self.name, MAX_NAME_CHARS):
            raise ConfigError(
                f"name must be text of at most {MAX_NAME_CHARS} printable characters, got {self.name!r}"
            )
        topology = self.aggregation.topology
        if self.recheck != 0.0:
            check_number("recheck", self.recheck, 1.0)
            if self.aggregation.audits is None or isinstance(topology, Hierarchical):
                raise ConfigError(
                    "recheck needs audits, whose inputs it compares, and a topology without sites; leave it out, or"
                    " take another audit or topology"
                )
        if isinstance(topology, Gossip) and self.participation is not None:
            raise ConfigError(
                f"participation must be None with the topology {topology.text!r}: all of a small group contribute"
            )
        name = self.codec.name
        if not 0 < len(name) <= MAX_CODEC_CHARS or not name.isprintable():
            raise ConfigError(
                f"compression: a codec's name has 1 to {MAX_CODEC_CHARS} printable characters: {name!r}"
            )

    @classmethod
    def from_run(
        cls, run_file: str | os.PathLike[str], *, certificate: str | os.PathLike[str], **overrides: Any
    ) -> AveragingConfig:
        """Return the configuration of a peer in a run that has an authority, by its files.

        :func:`p2pavg.join_run` finds the files, and also takes an invitation link.

        Args:
            run_file: the file that ``p2pavg run create`` has made.
            certificate: the file of this peer's certificate, which ``p2pavg run invite`` has made.
            overrides: settings of this peer that replace those of the run file, such as ``bandwidth``. ``run_id`` and
                ``access`` are always those of the files.

        Raises:
            ConfigError: a file cannot be read or is malformed, the certificate is of another run, or a setting is out
                of range; the message names the file or the setting.
        """
        run = read_run_file(run_file)
        access = read_access(run, certificate)
        for name in ("run_id", "access"):
            if name in overrides:
                raise ConfigError(f"{name} cannot be overridden: it follows from {os.fspath(run_file)}")
        return cls(**run.settings | overrides, access=access)

    @property
    def rule(self) -> str:
        """The text of ``participation`` and the mark of the strategy; empty without both."""
        text = "" if self.participation is None else self.participation.text
        return " ".join(filter(None, (text, mark(self.strategy))))

    @property
    def aggregation(self) -> Aggregation:
        """The rule by which a group combines its contributions, from ``robust`` and ``max_norm``; audits, topology."""
        most = None if self.max_norm is None else float(self.max_norm)
        audits, topology = resolve_audits(self.audit), resolve_topology(self.topology)
        return Aggregation(resolve_rule(self.robust), most, audits, topology)

    @property
    def most_weight(self) -> float:
        """The largest weight that any peer's contribution may have."""
        return MAX_WEIGHT if self.max_weight is None else float(self.max_weight)

    @property
    def own_most_weight(self) -> float:
        """The largest weight that this peer's contribution may have: its certificate may allow less."""
        return self.most_weight if self.access is None else min(self.most_weight, self.access.max_weight)

    @property
    def codec(self) -> Codec:
        """The codec that ``compression`` names."""
        return resolve_codec(self.compression)
