"""The packages of a job: read strictly, and written anew. No I/O, no clock, no random source.

An installer reads far more in such a list than names: options, URLs, other lists. So it never gets the author's bytes,
but a list that is made of what was understood here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText

MAX_PACKAGES = 1000
MAX_HASHES = 200
"""Of one package: one for each system and version of Python."""
_MAX_SHOWN = 80

_WANTED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[A-Za-z0-9._,-]*\])?==([A-Za-z0-9.!+_]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# Of an environment marker, such as python_version < "3.12" and sys_platform == 'linux'. It has no sign with which an
# option, a URL or a comment begins.
_MARKER = re.compile(r"[A-Za-z0-9_.'\"<>=!()~ ]{1,200}")


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """A package at one version, with the digests of the files that may be installed for it."""

    name: str
    extras: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The package as installers read it."""
        marker = f" ; {self.marker}" if self.marker else ""
        hashes = "".join(f" --hash=sha256:{each}" for each in self.hashes)
        return f"{self.name}{self.extras}=={self.version}{marker}{hashes}"


def read_packages(content: bytes) -> list[PinnedPackage]:
    """Read a list of packages as ``uv pip compile --generate-hashes`` writes it.

    Raises:
        ConfigError: a line is anything else than ``NAME==VERSION ; MARKER --hash=sha256:…``; the message shows it.
    """
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError("it is no plain text") from None
    # A comment ends its own line, whatever stands at its end. A line that ends with a backslash goes on in the next.
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in re.split(r"\r\n|\n", text)]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [_package(line.strip()) for line in joined.split("\n") if line.strip()]
    if len(found) > MAX_PACKAGES:
        raise ConfigError(f"it has {len(found)} packages, and a job may have {MAX_PACKAGES}")
    return found


def _package(line: str) -> PinnedPackage:
    wanted, *hashes = re.split(r"\s+(?=--hash=)", line)
    requirement, semicolon, marker = (part.strip() for part in wanted.partition(";"))
    read = _WANTED.fullmatch(requirement)
    digests = [_HASH.fullmatch(each) for each in hashes]
    if (
        read is None
        or not 0 < len(digests) <= MAX_HASHES
        or (semicolon and _MARKER.fullmatch(marker) is None)
        or not all(digests)
    ):
        raise ConfigError(
            f"{PeerText(line[:_MAX_SHOWN])!r} must be NAME==VERSION with --hash=sha256:…, as `uv pip compile"
            " --generate-hashes` writes it"
        )
    name, extras, version = read.groups()
    return PinnedPackage(
        name, extras or "", version, marker, tuple(each.group(1) for each in digests if each is not None)
    )


def packages_text(packages: list[PinnedPackage]) -> bytes:
    """Return the list that an installer gets."""
    return "".join(f"{package.line}\n" for package in packages).encode()
