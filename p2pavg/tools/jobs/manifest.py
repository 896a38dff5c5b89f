"""The manifest of a job, and the rules for its files. No I/O, no clock, no random source.

A job is a folder. Its ``job.toml`` says who made it, what it does, which program runs, which packages that needs, and
what it asks of a volunteer's machine. Everything in a job is a stranger's word: it is bounded here, before a volunteer
is asked, and nothing of it names a place outside of the job's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText

MANIFEST = "job.toml"
MAX_MANIFEST_BYTES = 64 * 1024
MAX_JOB_BYTES = 64 * 2**20
"""Of all files that members carry."""
LARGER_DATA = "name a larger file in [[files]] of job.toml: volunteers fetch it from a mirror"
MAX_FILES = 4096
MAX_LARGE_FILES = 256
MAX_LARGE_BYTES = 2**40
MAX_MIRRORS = 8
MAX_HOST_CHARS = 100
"""More would fill the page that a volunteer reads."""
MAX_NAME_CHARS = 200
MAX_DEPTH = 16
MAX_ABOUT_LINES = 20
"""More would scroll away what the page says before."""
MAX_ERROR_CHARS = 300
MAX_PACKAGES = 1000
MAX_HASHES = 200
"""Of one package: one for each system and version of Python."""
_MAX_SHOWN_CHARS = 80

_WANTED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[A-Za-z0-9._,-]*\])?==([A-Za-z0-9.!+_]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# Of an environment marker, such as python_version < "3.12" and sys_platform == 'linux'. It has no sign with which an
# option, a URL or a comment begins.
_MARKER = re.compile(r"[A-Za-z0-9_.'\"<>=!()~ ]{1,200}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

FileName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Meta(min_length=1, max_length=2000)]


class Needs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Most that a job takes of a machine. Its limits are set to this."""

    memory_gb: Annotated[float, Meta(gt=0.0, le=4096.0)]
    disk_gb: Annotated[float, Meta(gt=0.0, le=65536.0)]
    gpu_memory_gb: Annotated[float, Meta(ge=0.0, le=4096.0)] = 0.0


class LargeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that is too large for members to carry, such as a base model: from a mirror, or the volunteer has it."""

    name: FileName
    """In the job's folder."""
    bytes: Annotated[int, Meta(gt=0, le=MAX_LARGE_BYTES)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    urls: Annotated[
        tuple[Annotated[str, Meta(max_length=1000, pattern=r"^https?://[!-~]+$")], ...],
        Meta(max_length=MAX_MIRRORS),
    ] = ()
    """Of its mirrors, which are asked in this order. Only the bytes of the digest are taken."""


class JobManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of ``job.toml``."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    author: Annotated[str, Meta(min_length=1, max_length=200)]
    about: Text
    """Its purpose, in its author's words."""
    program: FileName
    """The program in the job's folder that trains: ``python PROGRAM`` runs it."""
    needs: Needs
    packages: FileName | None = None
    """File with the packages that the program needs, one a line, as ``pip install --require-hashes`` reads them."""
    files: Annotated[tuple[LargeFile, ...], Meta(max_length=MAX_LARGE_FILES)] = ()
    """Those that are too large for members to carry."""
    network: bool = False
    """True if the program itself opens connections. A volunteer is asked for that."""


def what_is_wrong_with(name: str) -> str:
    """Return why a job cannot have a file of this name; empty if it can.

    A name is one that every system keeps inside of a folder, and that no two systems read differently.
    """
    parts = name.split("/")
    if not 0 < len(name) <= MAX_NAME_CHARS or len(parts) > MAX_DEPTH:
        return f"it has more than {MAX_NAME_CHARS} characters, or more than {MAX_DEPTH} folders"
    if not (name.isascii() and name.isprintable()) or any(sign in name for sign in '\\:*?"<>|'):
        return "it has a character that some systems do not take in a name"
    if any(part in ("", ".", "..") or part.startswith("~") or part[-1] in ". " for part in parts):
        return "it is no plain name below the job's folder"
    return ""


def read_manifest(text: bytes) -> JobManifest:
    """Read a manifest.

    Raises:
        ConfigError: it is malformed; the message says where, and what is expected.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{MANIFEST} has {len(text)} bytes, and may have {MAX_MANIFEST_BYTES}")
    try:
        found = msgspec.toml.decode(text, type=JobManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # It quotes what the author has written, which a terminal must not obey.
        raise ConfigError(f"{MANIFEST}: {PeerText(str(error)[:MAX_ERROR_CHARS])}") from None
    if _NAME.fullmatch(found.name) is None:
        raise ConfigError(
            f"{MANIFEST}: name must be letters, digits, '.', '_' and '-', beginning with a letter or digit, got"
            f" {found.name!r}"
        )
    named = [
        found.program,
        *([found.packages] if found.packages else []),
        *(file.name for file in found.files),
    ]
    for name in named:
        if why := what_is_wrong_with(name):
            raise ConfigError(f"{MANIFEST}: {name!r} cannot be a file of a job: {why}")
    for file in found.files:
        if not all(map(origin_of, file.urls)):
            raise ConfigError(
                f"{MANIFEST}: a URL of {file.name!r} has no host, or none that a person can read"
            )
    for text_of in (found.author, found.about):
        if not text_of.replace("\n", "").isprintable():
            raise ConfigError(f"{MANIFEST}: author and about must be printable text")
    if found.about.count("\n") >= MAX_ABOUT_LINES:
        raise ConfigError(f"{MANIFEST}: about may have {MAX_ABOUT_LINES} lines")
    return found


def problems(files: Mapping[str, bytes]) -> list[str]:
    """Return what keeps files from being a job, as sentences; empty if they are one.

    Args:
        files: content by name, with ``/`` between folders.
    """
    found = [
        f"{name!r} cannot be a file of a job: {why}" for name in files if (why := what_is_wrong_with(name))
    ]
    if len(files) > MAX_FILES:
        found.append(f"there are {len(files)} files, and a job may have {MAX_FILES}")
    if (size := sum(map(len, files.values()))) > MAX_JOB_BYTES:
        found.append(
            f"the files have {size} bytes together, and a job may have {MAX_JOB_BYTES}: {LARGER_DATA}"
        )
    if MANIFEST not in files:
        return [*found, *_clashes(files), f"there is no {MANIFEST}"]
    try:
        manifest = read_manifest(files[MANIFEST])
    except ConfigError as error:
        return [*found, *_clashes(files), str(error)]
    found += _clashes([*files, *(file.name for file in manifest.files)])
    if manifest.program not in files:
        found.append(f"the program {manifest.program!r} is not there")
    if manifest.packages is not None:
        if manifest.packages not in files:
            found.append(f"the packages' file {manifest.packages!r} is not there")
        else:
            try:
                read_packages(files[manifest.packages])
            except ConfigError as error:
                found.append(f"{manifest.packages}: {error}")
    return found


def origin_of(url: str) -> str:
    """Return the server of a URL as a volunteer reads it, such as "http://10.0.0.1:8080"; empty if it names none."""
    try:
        found = urlsplit(url)
        host, port = found.hostname or "", found.port
    except ValueError:
        return ""
    labels = host.removesuffix(".").split(".")
    if ":" in host:  # an address of IPv6
        host = f"[{host}]"
    elif len(host) > MAX_HOST_CHARS or not all(0 < len(each) < 64 for each in labels):
        return ""
    if not all(sign.isalnum() or sign in ".-_:[]" for sign in host):
        return ""
    return f"{found.scheme}://{host}" + ("" if port is None else f":{port}")


def _clashes(names: Iterable[str]) -> list[str]:
    """Return sentences on names that are one place on a system that does not tell A from a, or a file and a folder."""
    found: list[str] = []
    taken: dict[str, tuple[str, bool]] = {}
    ordered = sorted(names)
    found += [f"{name!r} is there twice" for name, after in pairwise(ordered) if name == after]
    for name in dict.fromkeys(ordered):
        parts = name.casefold().split("/")
        for depth in range(1, len(parts) + 1):
            is_folder = depth < len(parts)
            other, was_folder = taken.setdefault("/".join(parts[:depth]), (name, is_folder))
            if was_folder != is_folder or (not is_folder and other != name):
                found.append(f"{other!r} and {name!r} are one place on some systems")
                break
    return found


def read_packages(content: bytes) -> list[str]:
    """Read a list of packages as ``uv pip compile --generate-hashes`` writes it; return a line for each.

    An installer reads far more in such a list than names: options, URLs, other lists. So it never gets the author's
    bytes, but lines that are made of what was understood here.

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


def _package(line: str) -> str:
    """Return a package at one version, with the digests of its files, as installers read it."""
    wanted, *hashes = re.split(r"\s+(?=--hash=)", line)
    requirement, semicolon, marker = (part.strip() for part in wanted.partition(";"))
    if (
        _WANTED.fullmatch(requirement) is None
        or not 0 < len(hashes) <= MAX_HASHES
        or (semicolon and _MARKER.fullmatch(marker) is None)
        or not all(map(_HASH.fullmatch, hashes))
    ):
        raise ConfigError(
            f"{PeerText(line[:_MAX_SHOWN_CHARS])!r} must be NAME==VERSION with --hash=sha256:…, as `uv pip compile"
            " --generate-hashes` writes it"
        )
    return " ".join([requirement, *([f"; {marker}"] if marker else []), *hashes])
