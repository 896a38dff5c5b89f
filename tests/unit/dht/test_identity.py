import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg_dht import Ed25519Signer, PeerIdError, public_key_of

SIGNER = Ed25519Signer(bytes(range(32)))


def test_the_peer_id_is_the_one_that_libp2p_gives_this_key() -> None:
    # identity multihash (00), 36 bytes (24), protobuf: KeyType Ed25519 (08 01), Data of 32 bytes (12 20)
    public = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
    assert base58.b58decode(SIGNER.peer_id) == bytes.fromhex("002408011220") + public
    assert SIGNER.peer_id.startswith("12D3Koo")


def test_the_key_inside_the_peer_id_verifies_signatures() -> None:
    public_key_of(SIGNER.peer_id).verify(SIGNER.sign(b"message"), b"message")


@pytest.mark.parametrize(
    ("peer_id", "reason"),
    [
        ("", "52 characters, not 0"),
        (SIGNER.peer_id + "1", "52 characters, not 53"),
        ("1" * 10_000_000, "52 characters, not 10000000"),
        # base58 decoders accept a trailing blank, which would be a second name of the same peer.
        (SIGNER.peer_id[:-1] + " ", "not canonical base58"),
        (SIGNER.peer_id[:-1] + "0", "not base58"),
        (SIGNER.peer_id[:-1] + "é", "not base58"),
        ("z" * 52, "not the peer id of an Ed25519 key"),
        ("1" * 52, "not the peer id of an Ed25519 key"),
        # The id of an RSA key is the hash of the key, with which no signature can be checked.
        ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "52 characters, not 46"),
    ],
)
def test_other_texts_are_no_peer_ids(peer_id: str, reason: str) -> None:
    with pytest.raises(PeerIdError, match=reason):
        public_key_of(peer_id)


def test_a_seed_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="32"):
        Ed25519Signer(b"short")
