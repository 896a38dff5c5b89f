"""Receipts: small files that prove what one peer has contributed, against the seals of an archivist. No I/O, no clock.

Also the statement of several identities that they are one contributor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import Hash, Message
from p2pavg.runs.membership.certificate import refusal
from p2pavg.state.history.entries import Credit, PeerIdText, Seal, merkle_proof, proven_root
from p2pavg_dht import Signer
from p2pavg_dht.identity import PeerIdError, public_key_of

MAX_PARTS = 2**16  # segments: 64 million updates
MAX_SAME = 64
_SAME = b"p2pavg-history-same/1\0"


def is_signed(peer_id: str, signature: bytes, statement: bytes) -> bool:
    """Return whether a peer has signed a statement."""
    try:
        public_key_of(peer_id).verify(signature, statement)
    except (InvalidSignature, PeerIdError):
        return False
    return True


class ReceiptPart(Message, frozen=True, kw_only=True):
    """The contributions of a peer that one segment proves."""

    seal: Seal
    credit: Credit
    index: Annotated[int, Meta(ge=0, lt=2**32)]
    """Of the credit among those of the segment."""
    count: Annotated[int, Meta(ge=1, lt=2**32)]
    proof: Annotated[tuple[Hash, ...], Meta(max_length=32)]


class Receipt(Message, frozen=True, kw_only=True, tag="p2pavg-receipt/1"):
    """The contributions of a peer that one archivist's segments prove."""

    run_id: Annotated[str, Meta(min_length=1, max_length=128)]
    authority: Annotated[bytes, Meta(max_length=32)]
    archivist: PeerIdText
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    """Of the archivist's membership; empty in an open run."""
    peer_id: PeerIdText
    parts: Annotated[tuple[ReceiptPart, ...], Meta(min_length=1, max_length=MAX_PARTS)]


def receipt_part(seal: Seal, credited: Sequence[Credit], peer_id: str) -> ReceiptPart | None:
    """Return what a segment proves of a peer; ``None`` if the peer is not in it."""
    leaves = [credit.encode() for credit in credited]
    for index, credit in enumerate(credited):
        if credit.peer_id == peer_id:
            proof = merkle_proof(leaves, index)
            return ReceiptPart(seal=seal, credit=credit, index=index, count=len(leaves), proof=proof)
    return None


def read_receipt(data: bytes) -> Receipt:
    """Read a receipt, and check every proof and signature in it.

    It proves that the archivist has signed these credits. Whose history to believe is for its reader to decide.

    Raises:
        StateError: it is malformed, or a proof or a signature in it is wrong; the message says which.
    """
    try:
        receipt = Receipt.decode(data)
    except RemoteProtocolError as error:
        raise StateError(f"no receipt: {error}") from None
    numbers = [part.seal.number for part in receipt.parts]
    # A segment that stands twice would count twice.
    if numbers != sorted(set(numbers)):
        raise StateError("a receipt whose segments are out of order, or stand twice")
    for part in receipt.parts:
        where = f"segment {part.seal.number}"
        if (part.seal.archivist, part.seal.run_id) != (receipt.archivist, receipt.run_id):
            raise StateError(f"{where}: a seal of another archivist or run")
        if part.credit.peer_id != receipt.peer_id:
            raise StateError(f"{where}: the credit of another peer")
        if not is_signed(receipt.archivist, part.seal.signature, part.seal.statement):
            raise StateError(f"{where}: the seal is forged: its archivist has not signed it")
        if proven_root(part.credit.encode(), part.index, part.count, part.proof) != part.seal.credits:
            raise StateError(f"{where}: the credit is not under the seal")
    if receipt.authority:
        why = refusal(
            receipt.certificate,
            authority=receipt.authority,
            peer_id=receipt.archivist,
            now=receipt.parts[0].seal.time,
        )
        if why is not None:
            raise StateError(f"the archivist is no member of the run: {why}")
    return receipt


class SamePeers(Message, frozen=True, kw_only=True, tag="p2pavg-same/1"):
    """Several identities that are one contributor. Each of them has signed the list."""

    peers: Annotated[tuple[PeerIdText, ...], Meta(min_length=2, max_length=MAX_SAME)]
    signatures: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=MAX_SAME)] = ()

    def __post_init__(self) -> None:
        if list(self.peers) != sorted(set(self.peers)):
            raise ValueError("peers that are out of order, or stand twice")

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        return _SAME + SamePeers(peers=self.peers).encode()


def same_peers(signers: Sequence[Signer]) -> SamePeers:
    """Return the signed statement that these identities are one contributor.

    Raises:
        StateError: they are fewer than two, or more than 64.
    """
    found = {signer.peer_id: signer for signer in signers}
    if not 2 <= len(found) <= MAX_SAME:
        raise StateError(f"a statement is of 2 to {MAX_SAME} different identities, not of {len(found)}")
    peers = tuple(sorted(found))
    statement = SamePeers(peers=peers).statement
    return SamePeers(peers=peers, signatures=tuple(found[peer_id].sign(statement) for peer_id in peers))


def read_same(data: bytes) -> tuple[str, ...]:
    """Return the identities of a statement, each of which has signed it.

    Raises:
        StateError: it is malformed, or one of them has not.
    """
    try:
        said = SamePeers.decode(data)
    except RemoteProtocolError as error:
        raise StateError(f"no statement on identities: {error}") from None
    if len(said.signatures) != len(said.peers):
        raise StateError("a statement that not all of its identities have signed")
    for peer_id, signature in zip(said.peers, said.signatures, strict=True):
        if not is_signed(peer_id, signature, said.statement):
            raise StateError(f"a statement that {peer_id} has not signed")
    return said.peers
