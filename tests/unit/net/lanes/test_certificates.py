"""Certificates and contexts on a pair of sockets: the handshakes that succeed, and those that fail."""

import os
import socket
import ssl
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.lanes import certificates
from p2pavg.net.lanes.certificates import (
    MAX_CERTIFICATE_BYTES,
    OwnCertificate,
    check_certificate,
    check_connection,
    listening_context,
)

TICKET = "ab" * 16


@pytest.fixture(scope="module")
def alice() -> OwnCertificate:
    return OwnCertificate("alice")


@pytest.fixture(scope="module")
def bob() -> OwnCertificate:
    return OwnCertificate("bob")


@pytest.fixture(scope="module")
def mallory() -> OwnCertificate:
    return OwnCertificate("mallory")


def self_signed(key: Any, algorithm: Any = None, *, days: int = 10) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=20))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, algorithm)
        .public_bytes(Encoding.DER)
    )


def shake(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str | None
) -> tuple[ssl.SSLSocket | Exception, ssl.SSLSocket | Exception]:
    """Return each side's outcome. The client's counts only after it has read the server's verdict."""
    here, there = socket.socketpair()
    found: list[ssl.SSLSocket | Exception] = []

    def serve() -> None:
        connection = server.wrap_socket(there, server_side=True, do_handshake_on_connect=False)
        try:
            connection.do_handshake()
            connection.sendall(b"!")
            found.append(connection)
        except OSError as error:
            connection.close()
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    mine = client.wrap_socket(here, server_hostname=name, do_handshake_on_connect=False)
    seen: ssl.SSLSocket | Exception = mine
    try:
        mine.do_handshake()
        mine.recv(1)
    except OSError as error:
        mine.close()
        seen = error
    thread.join()
    return seen, found[0]


def both_closed(ends: tuple[ssl.SSLSocket | Exception, ssl.SSLSocket | Exception]) -> bool:
    for end in ends:
        if isinstance(end, ssl.SSLSocket):
            end.close()
    return all(isinstance(end, Exception) for end in ends)


def door(context: ssl.SSLContext) -> ssl.SSLContext:
    return listening_context(lambda _, name: context if name == TICKET else None)


def test_peers_that_trust_each_other_agree_on_tls_1_3(alice: OwnCertificate, bob: OwnCertificate) -> None:
    client, server = shake(alice.client_context(bob.der), door(bob.server_context(alice.der)), TICKET)
    assert isinstance(client, ssl.SSLSocket)
    assert isinstance(server, ssl.SSLSocket)
    check_connection(client, bob.der)
    check_connection(server, alice.der)
    for connection, other in ((client, alice), (server, bob)):
        with pytest.raises(ssl.SSLError, match="another certificate"):
            check_connection(connection, other.der)
        connection.close()


@pytest.mark.parametrize("name", [None, "cd" * 16, TICKET.upper(), TICKET + "." + TICKET])
def test_a_missing_or_unknown_name_is_refused(
    name: str | None, alice: OwnCertificate, bob: OwnCertificate
) -> None:
    context = listening_context(
        lambda _, given: bob.server_context(alice.der) if given == "ef" * 16 else None
    )
    client, server = shake(alice.client_context(bob.der), context, name)
    assert "UNRECOGNIZED_NAME" in str(client)
    assert isinstance(server, Exception)


@pytest.mark.parametrize("name", [None, TICKET])
def test_a_client_without_a_certificate_is_refused(
    name: str | None, alice: OwnCertificate, bob: OwnCertificate
) -> None:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    assert both_closed(shake(trusting, door(bob.server_context(alice.der)), name))


def test_the_listening_context_finishes_no_handshake_itself(
    alice: OwnCertificate, bob: OwnCertificate
) -> None:
    """If the choice of a context were skipped, the listening context has no certificate and trusts none."""
    context = door(bob.server_context(alice.der))
    context.sni_callback = None
    assert both_closed(shake(alice.client_context(bob.der), context, TICKET))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509"] == 0


def test_a_server_with_another_certificate_is_refused(
    alice: OwnCertificate, bob: OwnCertificate, mallory: OwnCertificate
) -> None:
    client, _ = shake(alice.client_context(bob.der), door(mallory.server_context(alice.der)), TICKET)
    assert isinstance(client, ssl.SSLCertVerificationError)


def test_a_client_with_another_certificate_of_the_same_name_is_refused(
    alice: OwnCertificate, bob: OwnCertificate
) -> None:
    impostor = OwnCertificate("alice")
    _, server = shake(impostor.client_context(bob.der), door(bob.server_context(alice.der)), TICKET)
    assert isinstance(server, ssl.SSLCertVerificationError)


def test_an_older_tls_is_refused(alice: OwnCertificate, bob: OwnCertificate) -> None:
    old = alice.client_context(bob.der)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert both_closed(shake(old, door(bob.server_context(alice.der)), TICKET))


def test_an_expired_certificate_is_refused(
    alice: OwnCertificate, bob: OwnCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_LIFE", timedelta(hours=-1))
    old = OwnCertificate("old")
    _, server = shake(old.client_context(bob.der), door(bob.server_context(old.der)), TICKET)
    assert "expired" in str(server)


def test_a_server_sends_no_session_tickets(alice: OwnCertificate, bob: OwnCertificate) -> None:
    context = bob.server_context(alice.der)
    assert context.num_tickets == 0
    assert door(context).num_tickets == 0


Watched = list[tuple[int, int, list[Any]]]


def watch_loading(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Record the file's mode, its number of names and the directory's content, each time that a key is loaded."""
    seen: Watched = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: str) -> None:
        found = os.stat(path)
        seen.append((found.st_mode & 0o777, found.st_nlink, list(directory.rglob("*"))))
        load(context, path)

    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    return seen


@pytest.mark.parametrize("has_memfd", [True, False])
def test_the_key_is_in_no_directory_while_it_is_loaded(
    has_memfd: bool,
    alice: OwnCertificate,
    bob: OwnCertificate,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is killed at any moment leaves no key behind."""
    if has_memfd and not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memfd")
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    seen = watch_loading(tmp_path, monkeypatch)
    alice.client_context(bob.der)
    assert seen == [(0o600, 0, [])]
    assert not list(tmp_path.iterdir())


def test_a_key_file_is_in_a_private_directory_and_removed(
    alice: OwnCertificate, bob: OwnCertificate, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(certificates, "_DEV_FD", tmp_path / "nothing")
    seen = watch_loading(tmp_path, monkeypatch)
    alice.client_context(bob.der)
    ((mode, _, [directory, key]),) = seen
    assert mode == 0o600
    assert directory in key.parents
    assert not list(tmp_path.iterdir())


OURS = OwnCertificate("ours").der
P384 = ec.generate_private_key(ec.SECP384R1())
OTHERS = [
    (b"", "0 bytes"),
    (OURS + bytes(MAX_CERTIFICATE_BYTES), "4096 are allowed"),
    (OURS[:-1], "not a certificate"),
    (OURS + OURS, "not a certificate"),
    (b"\x30\x00", "not a certificate"),
    (bytes(range(256)), "not a certificate"),
    (self_signed(P384, hashes.SHA256()), "P-256"),
    (self_signed(ed25519.Ed25519PrivateKey.generate()), "P-256"),
    (self_signed(rsa.generate_private_key(65537, 2048), hashes.SHA256()), "P-256"),
]


@pytest.mark.parametrize(("der", "match"), OTHERS)
def test_other_bytes_are_no_certificate(der: bytes, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        check_certificate(der)
