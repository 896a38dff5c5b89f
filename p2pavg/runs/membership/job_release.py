"""Releases of a run's job: its root, signed by the run's authority. No I/O, no clock, no random source."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta
from msgspec.structs import replace

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.messages import Hash, Message
from p2pavg.runs.membership.certificate import SIGNATURE_BYTES
from p2pavg.runs.membership.revocation import MAX_NUMBER

DOMAIN = b"p2pavg-job/1\0"
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
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    @property
    def statement(self) -> bytes:
        """The bytes that are signed: the release without its signature."""
        return DOMAIN + replace(self, signature=b"").encode()

    @property
    def text(self) -> str:
        """The release as the value of a run file. :func:`read_release` reads it back."""
        return base64.b64encode(self.encode()).decode("ascii")


def sign_release(
    sign: Callable[[bytes], bytes], *, authority: bytes, number: int, root: bytes, size: int
) -> JobRelease:
    """Return a signed release.

    Args:
        sign: returns the Ed25519 signature of the authority.
    """
    unsigned = JobRelease(authority=authority, number=number, root=root, size=size).normalised()
    return replace(unsigned, signature=sign(unsigned.statement))


def read_release(text: str, authority: bytes) -> JobRelease:
    """Read the value of a run file and check its signature.

    Raises:
        ConfigError: it is no release that this authority has signed.
    """
    try:
        release = JobRelease.decode(base64.b64decode(text[:MAX_RELEASE_CHARS], validate=True))
    except (RemoteProtocolError, binascii.Error, ValueError):
        raise ConfigError("job is no release of a job; was a part of it lost when it was copied?") from None
    if release.authority != authority or not _is_genuine(release):
        raise ConfigError("job is a release that this run's authority has not signed")
    return release


def _is_genuine(release: JobRelease) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(release.authority)
        key.verify(release.signature, release.statement)
    except (InvalidSignature, ValueError):
        return False
    return True
