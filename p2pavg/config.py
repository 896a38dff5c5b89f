"""What one averager is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.errors import ConfigError
from p2pavg.names import MAX_RULE_CHARS, is_rule
from p2pavg.participation import MAX_MBPS, Participation, check_tags
from p2pavg_compression import Codec, resolve_codec

MAX_GROUP_SIZE = 64
MAX_RUN_ID_CHARS = 128
MAX_CODEC_CHARS = 64
MAX_TIMEOUT_SECONDS = 1800.0  # half of what a signed candidate counts for


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingConfig:
    """How an averager forms groups and exchanges.

    Args:
        run_id: who trains together; peers with another run id never meet.
        group_size: members a group aims at, 2 to 64; those that only help (auxiliaries) do not count.
        min_group_size: members that are enough once ``match_timeout`` is over, 2 to ``group_size``.
        match_timeout: seconds a peer looks for a group before it takes a smaller one.
        exchange_timeout: seconds after which an exchange that is not complete has failed.
        compression: the codec on the wire, by name (``"blockwise8"``, ``"int8:256"``, …) or as an object; ``None`` is
            fp32. Only peers with the same codec and block size form groups.
        bandwidth: what this peer can send and receive, in Mbit/s; its share of the work follows from it. ``None``:
            measured in rounds.
        max_upload_mbps: Mbit/s that this peer sends at most, headers included; ``None`` is without limit.
        max_download_mbps: Mbit/s that this peer receives at most, likewise.
        participation: who of a group contributes, and who only listens; ``None``: all contribute. The same for all
            peers of a run: those with another rule never meet.
        tags: what this peer can, for others' rules to choose by, e.g. ``("gpu", "fp16")``.

    Raises:
        ConfigError: an argument is out of range; the message names it.
    """

    run_id: str
    group_size: int = 4
    min_group_size: int = 2
    match_timeout: float = 30.0
    exchange_timeout: float = 60.0
    compression: str | Codec | None = "blockwise8"
    bandwidth: float | None = None
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    participation: Participation | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_text(self.run_id) or not 0 < len(self.run_id) <= MAX_RUN_ID_CHARS:
            raise ConfigError(
                f"run_id must be text of 1 to {MAX_RUN_ID_CHARS} characters, got {self.run_id!r}"
            )
        _check_size("group_size", self.group_size, 2, MAX_GROUP_SIZE)
        _check_size("min_group_size", self.min_group_size, 2, self.group_size)
        _check_number("match_timeout", self.match_timeout, MAX_TIMEOUT_SECONDS)
        _check_number("exchange_timeout", self.exchange_timeout, MAX_TIMEOUT_SECONDS)
        for name in ("bandwidth", "max_upload_mbps", "max_download_mbps"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), MAX_MBPS)
        if self.participation is not None and not isinstance(self.participation, Participation):
            raise ConfigError(f"participation must be None or a rule, got {self.participation!r}")
        if not is_rule(self.rule):
            raise ConfigError(
                f"participation: a rule's text has at most {MAX_RULE_CHARS} printable characters"
            )
        check_tags(self.tags)
        try:
            name = resolve_codec(self.compression).name
        except (ValueError, TypeError) as error:
            raise ConfigError(f"compression: {error}") from None
        if not 0 < len(name) <= MAX_CODEC_CHARS or not name.isprintable():
            raise ConfigError(
                f"compression: a codec's name has 1 to {MAX_CODEC_CHARS} printable characters: {name!r}"
            )

    @property
    def rule(self) -> str:
        """The text of ``participation``; empty without one."""
        return "" if self.participation is None else self.participation.text

    @property
    def codec(self) -> Codec:
        """The codec that ``compression`` names."""
        return resolve_codec(self.compression)


def _is_text(value: object) -> bool:
    # A lone surrogate, which is what undecodable bytes of a command line become, has no bytes on the wire.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _check_size(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def _check_number(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ConfigError(f"{name} must be a number above 0 and at most {most:g}, got {value!r}")
