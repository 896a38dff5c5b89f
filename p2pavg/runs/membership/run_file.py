"""Run files: what all members of a run that has an authority must know alike. No I/O, no clock, no random source.

A run file is TOML. It holds the run's secret, so it goes to members only, over a private channel.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import read_text
from p2pavg.base.limits import (
    MAX_AUDIT_CHARS,
    MAX_BANDWIDTH,
    MAX_CODEC_CHARS,
    MAX_GROUP_SIZE,
    MAX_MBPS,
    MAX_ROBUST_CHARS,
    MAX_RUN_ID_CHARS,
    MAX_TIMEOUT_SECONDS,
    MAX_TOPOLOGY_CHARS,
    MAX_WEIGHT,
    MIN_BANDWIDTH,
    USUAL_GROUP_SIZE,
)
from p2pavg.group.aggregation import (
    MOST_NORMS,
    Aggregation,
    check_codec_for,
    check_combinable,
    resolve_audits,
    resolve_rule,
)
from p2pavg.group.strategy import canonical, check_text, read_table, toml_lines
from p2pavg.group.topology import BUTTERFLY, resolve_topology, size_of_groups
from p2pavg.runs.membership.armour import MAX_TEXT_CHARS, parse_certificate, parse_revocations
from p2pavg.runs.membership.certificate import AUTHORITY_BYTES, Certificate
from p2pavg.runs.membership.job_release import MAX_RELEASE_CHARS, JobRelease, read_release
from p2pavg.runs.membership.membership import SECRET_BYTES, RunAccess
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.membership.tokens import MAX_ADDRESS_CHARS, is_peer_address
from p2pavg_compression import resolve_codec

T = TypeVar("T")

VERSION = 1
MAX_BOOTSTRAP = 8
MAX_RUN_FILE_BYTES = 7168
"""Length of :attr:`RunFile.text`. A file that a user has edited may have comments, up to ``MAX_EDITED_BYTES``."""
MAX_EDITED_BYTES = 16 * 1024
_USUAL_TOPOLOGY = ("topology", BUTTERFLY.text)
COMMENT = "# p2pavg run file. It holds the run's secret: give it to members only, over a private channel."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The keys of a run, and the settings that its members share.

    Args:
        run_id: name of the run.
        authority: Ed25519 public key of the run's authority, 32 bytes.
        secret: 32 bytes from which the keys of the run's records follow.
        group_size, min_group_size, match_timeout, exchange_timeout, max_weight, max_norm: see
            :class:`~p2pavg.AveragingConfig`.
        compression: name of the codec.
        robust: text of the rule that combines contributions; ``None``: the weighted mean.
        audit: text of the audits of averages, such as ``"after:0.125"``.
        topology: text of the topology, such as ``"star"``. ``"hierarchical"`` needs an ``audit`` of ``"off"``;
            ``"gossip"`` needs no ``group_size``.
        bandwidth, max_upload_mbps, max_download_mbps: what members announce and use, in Mbit/s, unless they say
            otherwise; see :class:`~p2pavg.AveragingConfig`.
        relay_mbps: what members carry for peers that cannot be dialled, in Mbit/s, unless they say otherwise.
        bootstrap: addresses of peers that are usually online, 8 at most, each ending in ``/p2p/<peer id>``.
        job: what the run trains, as the text of a :class:`~p2pavg.runs.membership.job_release.JobRelease`; empty:
            each member has its own program.
        strategy: text of the strategy with which all members train (:mod:`p2pavg.strategies`); empty: none. In the file
            it is the table ``[strategy]``.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    run_id: str
    authority: bytes
    secret: bytes = field(repr=False)
    group_size: int = USUAL_GROUP_SIZE
    min_group_size: int = 2
    match_timeout: float = 30.0
    exchange_timeout: float = 60.0
    compression: str = "blockwise8"
    max_weight: float | None = None
    robust: str | None = None
    max_norm: float | None = None
    audit: str = "after"
    topology: str = BUTTERFLY.text
    bandwidth: float | None = None
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    relay_mbps: float | None = None
    bootstrap: tuple[str, ...] = ()
    job: str = ""
    strategy: str = ""

    def __post_init__(self) -> None:
        _check_bytes("authority", self.authority, AUTHORITY_BYTES)
        _check_bytes("secret", self.secret, SECRET_BYTES)
        # These are texts here. An AveragingConfig takes objects, too.
        for name, most in _MOST_CHARS.items():
            if getattr(self, name) is not None or name != "robust":
                _check_text(name, getattr(self, name), most)
        check_settings(self)
        if self.relay_mbps is not None and self.relay_mbps != 0:  # 0: relay nothing
            _check_number("relay_mbps", self.relay_mbps, MAX_BANDWIDTH)
        _check_bootstrap(self.bootstrap)
        if self.job != "":
            _check_text("job", self.job, MAX_RELEASE_CHARS)
            read_release(self.job, self.authority, self.run_id)

    @property
    def text(self) -> str:
        """The file's text, at most :data:`MAX_RUN_FILE_BYTES` long. :func:`parse_run_file` reads it back."""
        lines = [COMMENT, f"version = {VERSION}"]
        for each in fields(self):
            value = getattr(self, each.name)
            # Run files of a butterfly are those of versions that have no other topology.
            if value not in (None, "") and each.name != "strategy" and (each.name, value) != _USUAL_TOPOLOGY:
                lines.append(f"{each.name} = {_toml(value)}")
        if self.strategy:  # a table comes after all values
            lines += ["", *toml_lines(read_table(self.strategy), "strategy")]
        return "\n".join(lines) + "\n"

    @property
    def release(self) -> JobRelease | None:
        """The job that the run trains, if it has one."""
        return read_release(self.job, self.authority, self.run_id) if self.job else None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that :class:`~p2pavg.AveragingConfig` has as well, by name."""
        own = ("authority", "secret", "relay_mbps", "bootstrap", "job")
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}
        return {**found, "version": 0 if self.release is None else self.release.number}


_MOST_CHARS = {
    "topology": MAX_TOPOLOGY_CHARS,
    "robust": MAX_ROBUST_CHARS,
    "audit": MAX_AUDIT_CHARS,
    "compression": MAX_CODEC_CHARS,
}
_RANGES: dict[str, tuple[float, float]] = {
    "match_timeout": (0.0, MAX_TIMEOUT_SECONDS),
    "exchange_timeout": (0.0, MAX_TIMEOUT_SECONDS),
    "max_weight": (0.0, MAX_WEIGHT),
    "max_norm": (1.0, MOST_NORMS),
    "bandwidth": (MIN_BANDWIDTH, MAX_BANDWIDTH),
    "max_upload_mbps": (0.0, MAX_MBPS),
    "max_download_mbps": (0.0, MAX_MBPS),
}


def check_settings(settings: Any) -> None:
    """Check what a run file and an :class:`~p2pavg.AveragingConfig` have both; set the topology's size of groups.

    Raises:
        ConfigError: a setting is out of range, or does not go with another; the message names it.
    """
    _check_text("run_id", settings.run_id, MAX_RUN_ID_CHARS)
    # The topology comes first, because it has a say in the size of groups.
    topology = _resolved(settings, "topology", resolve_topology)
    check_size("group_size", settings.group_size, 2, MAX_GROUP_SIZE)
    object.__setattr__(settings, "group_size", size_of_groups(topology, settings.group_size))
    check_size("min_group_size", settings.min_group_size, 2, settings.group_size)
    for name, (least, most) in _RANGES.items():
        value = getattr(settings, name)
        if value is not None or name in ("match_timeout", "exchange_timeout"):
            _check_number(name, value, most, least=least)
    robust, audits = _resolved(settings, "robust", resolve_rule), _resolved(settings, "audit", resolve_audits)
    codec = _resolved(settings, "compression", resolve_codec)
    check_combinable(robust, codec)
    # It raises an error if they do not fit together.
    Aggregation(robust, settings.max_norm, audits, topology)
    check_codec_for(topology, codec)
    if settings.strategy != "":
        check_text(settings.strategy)


def _resolved(settings: Any, name: str, resolve: Callable[[Any], T]) -> T:
    try:
        return resolve(getattr(settings, name))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {error}") from None


_KEY = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_KEYS = {each.name: each.default is MISSING for each in fields(RunFile)}  # name -> it is required


def parse_run_file(text: str) -> RunFile:
    """Read a run file.

    Raises:
        ConfigError: the text is no run file; the message names the key that is wrong.
    """
    if len(text) > MAX_EDITED_BYTES:
        raise ConfigError(f"a run file has at most {MAX_EDITED_BYTES} characters, not {len(text)}")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with thousands of digits
        raise ConfigError(f"it is not TOML: {str(error) or 'too deeply nested'}") from None
    if "version" not in found:
        raise ConfigError("version is missing; a run file begins with it")
    version = found.pop("version")
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"version must be {VERSION}, got {_shown(version)}; this p2pavg reads no other")
    # A misspelt key would leave its setting at the default, and this member apart from the others.
    if unknown := sorted(found.keys() - _KEYS.keys()):
        raise ConfigError(f"unknown key {_shown(unknown[0])}; a run file has version, {', '.join(_KEYS)}")
    if missing := [name for name, required in _KEYS.items() if required and name not in found]:
        raise ConfigError(f"{missing[0]} is missing")
    for name in ("authority", "secret"):
        if not isinstance(found[name], str) or not _KEY.fullmatch(found[name]):
            raise ConfigError(f"{name} must be 64 hexadecimal digits in quotation marks")
        found[name] = bytes.fromhex(found[name])
    # Anything else than a list is refused by name when the run file is made.
    if isinstance(addresses := found.get("bootstrap"), list):
        found["bootstrap"] = tuple(addresses)
    if "strategy" in found:
        if not isinstance(found["strategy"], dict):
            raise ConfigError("strategy must be a table, [strategy]")
        found["strategy"] = canonical(found["strategy"])
    return RunFile(**found)


def _toml(value: object) -> str:
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    assert isinstance(value, int | float)
    # A plain number: subclasses, such as numpy's, have texts of their own, which no reader of TOML takes.
    return repr(float(value) if isinstance(value, float) else int(value))


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character


def _check_text(name: str, value: object, most: int) -> None:
    # Terminals obey control characters, and lone surrogates, which are not printable either, cannot be encoded.
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ConfigError(f"{name} must be text of 1 to {most} printable characters, got {_shown(value)}")


def _check_bytes(name: str, value: object, size: int) -> None:
    if not isinstance(value, bytes) or len(value) != size:
        raise ConfigError(f"{name} must be {size} bytes")


def check_size(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless a setting is a whole number in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {_shown(value)}")


def _check_number(name: str, value: object, most: float, *, least: float = 0.0) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= most or value < least:  # type: ignore[operator]
        range_of = f"from {least:g} to {most:g}" if least else f"above 0 and at most {most:g}"
        raise ConfigError(f"{name} must be a number {range_of}, got {_shown(value)}")


def _check_bootstrap(value: object) -> None:
    if not isinstance(value, tuple) or len(value) > MAX_BOOTSTRAP:
        raise ConfigError(f"bootstrap must be a list of at most {MAX_BOOTSTRAP} addresses")
    for address in value:
        _check_text("each address of bootstrap", address, MAX_ADDRESS_CHARS)
        if not is_peer_address(address):
            raise ConfigError(
                "each address of bootstrap must be like /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID, "
                f"got {_shown(address)}"
            )


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # The text of a longer integer may have too many digits for Python.
    is_long = isinstance(value, int) and value.bit_length() > 64
    shown = ascii(value) if isinstance(value, str | int | float | None) and not is_long else ""
    return shown[:80] if shown else type(value).__name__


# The files with which one peer takes part in a run that has an authority.


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """The folder of a peer in a run, and its files, which may be elsewhere."""

    folder: Path
    """It also has the peer's port, and the addresses of peers that it knew."""
    run_file: Path
    certificate: Path
    identity: Path
    gate: Path | None = None
    """Socket of the process that has this peer's network and key; ``None``: this process has them."""


# Reads the files of a run that has an authority. Errors name the file.


def read_run_file(path: str | os.PathLike[str]) -> RunFile:
    """Read a run file.

    Raises:
        ConfigError: the file cannot be read or is no run file; the message names the file and the key.
    """
    text = read_text(Path(path), "run file", max_bytes=MAX_EDITED_BYTES)
    with _naming(path):
        return parse_run_file(text)


def read_certificate_file(path: str | os.PathLike[str]) -> Certificate:
    """Read a certificate. Its signatures are not checked.

    Raises:
        ConfigError: the file cannot be read or is no certificate; the message names the file.
    """
    text = read_text(Path(path), "certificate", max_bytes=MAX_TEXT_CHARS)
    with _naming(path):
        return parse_certificate(text)


def read_revocations_file(path: str | os.PathLike[str], authority: bytes) -> RevocationList:
    """Read a list of revoked certificates and check its signature.

    Raises:
        ConfigError: the file cannot be read or is no list of this authority; the message names the file.
    """
    text = read_text(Path(path), "list of revoked certificates", max_bytes=MAX_TEXT_CHARS)
    with _naming(path):
        return parse_revocations(text, authority)


def read_access(run_file: RunFile, certificate: str | os.PathLike[str]) -> RunAccess:
    """Return the access of the peer whose certificate is in a file.

    Raises:
        ConfigError: the file cannot be read, or is no certificate of this run; the message names the file.
    """
    data = read_certificate_file(certificate).data
    with _naming(certificate):
        return RunAccess(authority=run_file.authority, secret=run_file.secret, certificate=data)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None
