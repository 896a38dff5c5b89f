"""One process of the floor under an all-reduce: the same bytes over TLS, then the same work of the codec's kernels.

No member waits for another but for its bytes, nothing is checked, signed or agreed on, and nothing is averaged: the
parts have the right lengths only. What an all-reduce takes beyond that is its own.
"""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg_compression import Codec, resolve_codec
from scripts.benchmarks.codecs import compile_now
from scripts.benchmarks.worker import Line, serve

WRITE_BYTES = 1 << 18
DIRECTIONS = 2  # a share comes to its reducer, and goes back


class Member:
    """A :class:`~scripts.benchmarks.worker.System`. Each connection carries one direction between two members."""

    def __init__(
        self, codec: Codec, elements: int, outward: Sequence[ssl.SSLSocket], inward: Sequence[ssl.SSLSocket]
    ) -> None:
        self._codec, self._elements, self._outward, self._inward = codec, elements, outward, inward
        count = len(outward) + 1
        self._share = -(-elements // (count * codec.granularity)) * codec.granularity
        self._values = torch.zeros(count * self._share)
        self._part = bytearray(codec.encode(torch.randn(self._share)))
        self._room = [memoryview(bytearray(len(self._part))) for _ in inward]

    def prepare(self, values: torch.Tensor) -> None:
        self._values[: len(values)] = values

    def run(self) -> dict[str, float]:
        began = time.monotonic()
        _at_once(
            [partial(_send, each, self._part) for each in self._outward]
            + [partial(_receive, each, room) for each, room in zip(self._inward, self._room, strict=True)]
        )
        exchange = time.monotonic() - began
        self._kernels()
        return {"exchange": exchange}

    def _kernels(self) -> None:
        """Encode all other shares, average one's own, and decode the averages of the others."""
        own, *others = torch.split(self._values, self._share)
        encoded = [self._codec.encode(values) for values in others]
        given = [PartContribution("", 1.0, own), *(PartContribution("", 1.0, each) for each in encoded)]
        average = average_part(self._codec, given, float(len(given)), own)
        for values in others:
            self._codec.averages.decode(average, self._share, values)

    def result(self) -> torch.Tensor:
        return self._values[: self._elements]


def _at_once(tasks: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(connection: ssl.SSLSocket, data: bytearray) -> None:
    view = memoryview(data)
    for _ in range(DIRECTIONS):
        for at in range(0, len(view), WRITE_BYTES):
            connection.sendall(view[at : at + WRITE_BYTES])


def _receive(connection: ssl.SSLSocket, room: memoryview) -> None:
    for _ in range(DIRECTIONS):
        at = 0
        while at < len(room):
            got = connection.recv_into(room[at : at + WRITE_BYTES])
            if got == 0:
                raise RuntimeError("a member has closed its connection")
            at += got


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client, which check nobody's name."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    today = datetime.datetime.now(datetime.UTC)
    tomorrow, serial = today + datetime.timedelta(1), x509.random_serial_number()
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), serial, today, tomorrow)
    certificate = unsigned.sign(key, SHA256())
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    pem = serialization.Encoding.PEM
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "both.pem")
        file.write_bytes(text + certificate.public_bytes(pem))
        server.load_cert_chain(file)
    return server, client


def _addresses(setup: dict[str, Any], listener: socket.socket, line: Line) -> list[Any]:
    """Exchange the members' addresses by way of the first one; return those of all."""
    own = listener.getsockname()
    if setup["index"] > 0:
        with socket.create_connection(tuple(setup["bootstrap"][0])) as first, first.makefile("rw") as file:
            line.report(address="")
            file.write(json.dumps(own) + "\n")
            file.flush()
            return list(json.loads(file.readline()))
    with socket.create_server((setup["host"], 0)) as meeting:
        line.report(address=meeting.getsockname())
        files = [meeting.accept()[0].makefile("rw") for _ in range(setup["count"] - 1)]
    found = [own, *(json.loads(file.readline()) for file in files)]
    for file in files:
        file.write(json.dumps(found) + "\n")
        file.close()
    return found


def _inward(listener: socket.socket, server: ssl.SSLContext, count: int, found: list[ssl.SSLSocket]) -> None:
    found.extend(server.wrap_socket(listener.accept()[0], server_side=True) for _ in range(count))


def main() -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    codec = resolve_codec(setup["codec"])
    compile_now(codec)
    server, client = _contexts()
    inward: list[ssl.SSLSocket] = []
    with socket.create_server((setup["host"], 0), backlog=setup["count"]) as listener:
        others = _addresses(setup, listener, line)
        del others[setup["index"]]
        accepting = threading.Thread(target=_inward, args=(listener, server, len(others), inward))
        accepting.start()
        outward = [client.wrap_socket(socket.create_connection(tuple(each))) for each in others]
        accepting.join()
    serve(line, Member(codec, setup["elements"], outward, inward), setup)


if __name__ == "__main__":
    main()
