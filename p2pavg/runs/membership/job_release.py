"""Releases of a run's job: its root, signed by the run's authority. No I/O, no clock, no random source."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta
from msgspec.structs import replace

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.runs.membership.certificate import SIGNATURE_BYTES
from p2pavg.runs.membership.revocation import MAX_NUMBER

DOMAIN = "p2pavg-job/1"
MAX_RELEASE_BYTES = 2**27
"""Of a job's file: twice what a job may have, for its names."""
MAX_RELEASE_CHARS = 400


class JobRelease(Message, frozen=True, kw_only=True, tag=1):
    """A version of a run's job."""

    authority: Hash
    """Its public key. A run file of another authority does not take the release."""
    number: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    """Grows with every version."""
    root: Hash
    """Of the job's file: see :func:`p2pavg.state.tree.root_of`."""
    size: Annotated[int, Meta(ge=1, le=MAX_RELEASE_BYTES)]
    """Bytes of the job's file."""
    since: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    """The update after which members change to this version."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    def statement(self, run_id: str) -> bytes:
        """Return the bytes that are signed: the run's name, and the release without its signature."""
        # With the name, because an authority may have several runs: a release of one counts in no other.
        return pack(DOMAIN, run_id, replace(self, signature=b"").encode())

    @property
    def text(self) -> str:
        """The release as the value of a run file. :func:`read_release` reads it back."""
        return base64.b64encode(self.encode()).decode("ascii")


def sign_release(
    sign: Callable[[bytes], bytes],
    *,
    authority: bytes,
    run_id: str,
    number: int,
    root: bytes,
    size: int,
    since: int = 0,
) -> JobRelease:
    """Return a signed release.

    Args:
        sign: returns the Ed25519 signature of the authority.
    """
    unsigned = JobRelease(authority=authority, number=number, root=root, size=size, since=since).normalised()
    return replace(unsigned, signature=sign(unsigned.statement(run_id)))


def read_release(text: str, authority: bytes, run_id: str) -> JobRelease:
    """Read the value of a run file and check its signature.

    Raises:
        ConfigError: it is no release of this run that this authority has signed.
    """
    try:
        data = base64.b64decode(text[:MAX_RELEASE_CHARS], validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("job is no release of a job; was a part of it lost when it was copied?") from None
    try:
        return decode_release(data, authority, run_id)
    except RemoteProtocolError as error:
        raise ConfigError(f"job is {error}") from None


def decode_release(data: bytes, authority: bytes, run_id: str) -> JobRelease:
    """Read a release that another peer has sent, and check its signature.

    Raises:
        RemoteProtocolError: it is no release of this run that this authority has signed.
    """
    release = JobRelease.decode(data)
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(release.signature, release.statement(run_id))
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError("a release that this run's authority has not signed") from None
    return release


@dataclass(frozen=True, slots=True)
class SeenProgress:
    """The progress of a run, as far as a peer has seen that others trained."""

    version: int
    """The latest one of the job with which any peer trains; 0 if none was seen."""
    epoch: int
    """Latest update of those that train with it."""


def release_to_start(newest: JobRelease, older: JobRelease, seen: SeenProgress) -> JobRelease:
    """Return the version of a job with which a peer begins, of two that it knows.

    Peers of different versions do not average. Until the update at which all change, the run is where the older one is;
    a peer that began with the newer one would wait there.
    """
    is_before = seen.version == older.number and seen.epoch < newest.since
    return older if is_before else newest
