"""Read a history of p2pavg without p2pavg: python read_history.py DIR. It needs msgpack, blake3 and cryptography.

It checks the chain of entries, the digest of each payload and the archivist's seals, and prints who contributed what.
It does not check certificates or replay updates: `p2pavg history verify` does.
"""

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAGIC = b"p2pavg-history/1\n"
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
MAX_BODY = 2**24
FIELDS = {
    "begin": "number time archivist certificate run_id authority codec rule aggregation version shapes dtypes names",
    "snapshot": "time epoch state root size",
    "update": "time epoch before after certificate digests numbers digest size",
    "notice": "time kind digest size",
    "seal": "time archivist run_id number entries root credits signature",
}


def merkle_root(leaves: list[bytes]) -> bytes:
    """Return the root of RFC 9162, section 2.1.1."""
    level = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    while len(level) > 1:
        pairs = [level[at] + level[at + 1] for at in range(0, len(level) - 1, 2)]
        level = [hashlib.sha256(b"\1" + pair).digest() for pair in pairs] + level[2 * len(pairs) :]
    return level[0]


def payload_digest(kind: str, payload: bytes) -> bytes:
    """Return the digest that an entry names: of a snapshot, the root over its chunks of 1 MiB."""
    if kind != "snapshot":
        return blake3(payload).digest()
    chunks = [blake3(payload[at : at + 2**20]).digest() for at in range(0, len(payload), 2**20)]
    return blake3(b"p2pavg/state/root/1\0" + len(payload).to_bytes(8, "big") + b"".join(chunks)).digest()


def public_key(peer_id: str) -> Ed25519PublicKey:
    """Return the key inside a peer id: base58 of 6 fixed bytes and the 32 of the key."""
    number = 0
    for character in peer_id:
        number = number * 58 + ALPHABET.index(character)
    return Ed25519PublicKey.from_public_bytes(number.to_bytes(38, "big")[6:])


def entries(data: bytes) -> Iterator[tuple[str, dict[str, Any], bytes, bytes]]:
    """Yield kind, fields, payload and hash of each entry."""
    at, last = len(MAGIC), None
    while at < len(data):
        length, previous = struct.unpack_from(">I32s", data, at)
        if length > MAX_BODY or (last is not None and previous != last):
            raise SystemExit(f"the entry at byte {at} does not follow on the one before")
        body = data[at + 36 : at + 36 + length]
        kind, *values = msgpack.unpackb(body)
        fields = dict(zip(FIELDS[kind].split(), values, strict=True))
        at += 36 + length
        payload = data[at : at + fields.get("size", 0)]
        at += len(payload)
        last = hashlib.sha256(b"p2pavg-history-entry/1\0" + previous + body).digest()
        if payload and payload_digest(kind, payload) != fields.get("digest", fields.get("root")):
            raise SystemExit(f"the payload before byte {at} has other bytes than its entry names")
        yield kind, fields, payload, last


def contributors(certificate: bytes) -> dict[str, float]:
    """Return the samples of each member that contributed, from the signed roster."""
    begin = len(b"p2pavg-commit/1\0")
    (length,) = struct.unpack_from(">I", certificate, begin)
    records, _, _, observers = msgpack.unpackb(certificate[begin + 4 : begin + 4 + length])
    _, committed, *_ = msgpack.unpackb(certificate[begin + 4 + length :])
    counted = [records[place] for place in committed if place not in observers]
    # A record is (key, peer id, sequence, expiration, value, signature), and its value (kind, deadline, weight, ...).
    return {record[1]: weight for record in counted if (weight := msgpack.unpackb(record[4])[2])}


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.history")):
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            raise SystemExit(f"{path} is no history of version 1")
        hashes: list[bytes] = []
        for kind, fields, payload, digest in entries(data):
            if kind == "update":
                said = " ".join(
                    f"{peer[-6:]}:{weight:g}" for peer, weight in contributors(fields["certificate"]).items()
                )
                print(f"update {fields['epoch']}: {len(payload)} bytes, {said}")
            elif kind == "seal":
                signed = b"p2pavg-history-seal/1\0" + msgpack.packb(
                    ["seal", *list(fields.values())[:-1], b""]
                )
                try:
                    public_key(fields["archivist"]).verify(fields["signature"], signed)
                except InvalidSignature:
                    raise SystemExit(f"{path}: the seal is forged") from None
                if (fields["entries"], fields["root"]) != (len(hashes), merkle_root(hashes)):
                    raise SystemExit(f"{path}: the seal is on other entries")
                print(f"sealed by {fields['archivist']}")
            hashes.append(digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
