"""TLS between two peers that know each other: each trusts exactly the one certificate that the other has named.

A process makes its certificate at the first use and never stores it. The other peer learns it over a libp2p stream,
which is authenticated. OpenSSL does the verification: each context here has it switched on, with one trust anchor or
none.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from p2pavg.base.errors import RemoteProtocolError

MAX_CERTIFICATE_BYTES = 4096

# Directories in which open files have names: on Linux, and on most other systems.
_PROC_FD = Path("/proc/self/fd")
_DEV_FD = Path("/dev/fd")

_CLOCK_SKEW = timedelta(days=1)
_LIFE = timedelta(days=3653)

ChooseContext = Callable[[ssl.SSLObject | ssl.SSLSocket, str | None], ssl.SSLContext | None]
"""Returns the context for a connection with this server name; ``None`` refuses the connection."""


class OwnCertificate:
    """The certificate of this process, and its private key."""

    def __init__(self, common_name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _self_signed(common_name, key)
        self.der = certificate.public_bytes(Encoding.DER)
        self._pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )

    def client_context(self, trusted: bytes) -> ssl.SSLContext:
        """Return a context for connections to the one server whose certificate is ``trusted``."""
        context = _bare_context(ssl.PROTOCOL_TLS_CLIENT)
        return self._between_two(context, trusted)

    def server_context(self, trusted: bytes) -> ssl.SSLContext:
        """Return a context for connections of the one client whose certificate is ``trusted``."""
        context = _bare_context(ssl.PROTOCOL_TLS_SERVER)
        return self._between_two(context, trusted)

    def _between_two(self, context: ssl.SSLContext, trusted: bytes) -> ssl.SSLContext:
        context.load_verify_locations(cadata=trusted)
        with _readable_as_file(self._pem) as path:  # the ssl module loads keys from files only
            context.load_cert_chain(path)
        return context


@contextmanager
def _readable_as_file(secret: bytes) -> Iterator[str]:
    """Return a path from which ``secret`` can be read while the block runs.

    - On Linux, the path leads to anonymous memory, which has no name in any directory.
    - On systems with ``/dev/fd``, it leads to a file that is unlinked before anything is written to it.
    - Elsewhere, it is a file that only this user may read, in a directory that only this user may open. Both are
      removed at the end of the block. Only here does a killed process leave the secret behind.
    """
    if hasattr(os, "memfd_create") and _PROC_FD.is_dir():
        with open(os.memfd_create("p2pavg", os.MFD_CLOEXEC), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(secret)
            file.flush()
            yield f"{_PROC_FD}/{file.fileno()}"
    elif _DEV_FD.is_dir():
        with TemporaryFile(prefix="p2pavg-") as file:
            file.write(secret)
            file.seek(0)  # opening a path in /dev/fd shares the position
            yield f"{_DEV_FD}/{file.fileno()}"
    else:
        with TemporaryDirectory(prefix="p2pavg-") as directory:
            path = Path(directory, "key")
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secret)
            yield str(path)


def listening_context(choose: ChooseContext) -> ssl.SSLContext:
    """Return a context for inbound connections whose peer is unknown until their first message.

    ``choose`` maps the server name in that message to the context that continues the handshake. The context returned
    here has no certificate and trusts none, so that no handshake can finish with it.
    """

    def on_name(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> int | None:
        chosen = choose(connection, name)
        if chosen is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = chosen
        return None

    context = _bare_context(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = on_name
    return context


def check_certificate(der: bytes) -> None:
    """Raise RemoteProtocolError unless ``der`` is one certificate of the kind that :class:`OwnCertificate` makes."""
    if not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(f"a certificate of {len(der)} bytes; {MAX_CERTIFICATE_BYTES} are allowed")
    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        canonical = certificate.public_bytes(Encoding.DER)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RemoteProtocolError(f"not a certificate: {error}") from None
    # OpenSSL can verify other kinds of keys too. A stranger would choose the slowest one.
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RemoteProtocolError("a certificate whose key is not on the curve P-256")
    if canonical != der:
        raise RemoteProtocolError("a certificate that is not in its canonical form")


def check_connection(connection: ssl.SSLObject | ssl.SSLSocket, trusted: bytes) -> None:
    """Raise ``ssl.SSLError`` unless the peer showed ``trusted`` over TLS 1.3.

    A second check: OpenSSL has verified both already, so this is not expected to raise.
    """
    if connection.getpeercert(binary_form=True) != trusted:
        raise ssl.SSLError("the other side has shown another certificate, not the one that it had named")
    if connection.version() != "TLSv1.3":
        raise ssl.SSLError(f"agreed on {connection.version()} instead of TLS 1.3")


def _bare_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # the name is a ticket; the certificate proves the identity
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Session tickets. A client that never reads would close with one unread, and the system would send a reset.
        context.num_tickets = 0
    return context


def _self_signed(common_name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now, public = datetime.now(UTC), key.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
