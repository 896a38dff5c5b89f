"""Addresses that lead through a relay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import AddressError
from p2pavg.net.addresses import (
    MAX_ADDRESS_CHARS,
    CircuitAddress,
    is_circuit,
    parse_address_of,
    parse_circuit_address,
    parse_peer_address,
)
from p2pavg_dht import Ed25519Signer

RELAY, PEER, OTHER = (Ed25519Signer(bytes([number]) * 32).peer_id for number in range(3))
AT_RELAY = f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}"
CIRCUIT = f"{AT_RELAY}/p2p-circuit/p2p/{PEER}"

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda host: f"/ip4/{host}"),
    st.ip_addresses(v=6).map(lambda host: f"/ip6/{host}"),
    st.sampled_from(["/dns4/example.org", "/dns6/example.org", "/dns/example.org"]),
)
pieces = st.sampled_from(
    [
        AT_RELAY,
        "/p2p-circuit",
        f"/p2p/{PEER}",
        f"/p2p/{RELAY}",
        "/ip4/127.0.0.1",
        "/tcp/80",
        "/p2p/x",
        "/",
        "é",
    ]
)


@given(hosts, st.integers(0, 65535))
def test_a_circuit_address_is_read_as_it_was_written(host: str, port: int) -> None:
    written = CircuitAddress(f"{host}/tcp/{port}/p2p/{RELAY}", RELAY, PEER)
    assert parse_circuit_address(str(written)) == written
    assert is_circuit(str(written))
    assert parse_peer_address(str(written))[1] == PEER


@pytest.mark.parametrize(
    "text",
    [
        f"{AT_RELAY}/p2p-circuit",
        f"{AT_RELAY}/p2p-circuit/p2p/",
        f"{AT_RELAY}/p2p-circuit/p2p/nonsense",
        f"{AT_RELAY}/p2p-circuit/p2p/{PEER}/tcp/80",
        f"{AT_RELAY}/p2p-circuit/p2p/{PEER}/p2p-circuit/p2p/{OTHER}",
        f"/p2p-circuit/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/4001/p2p-circuit/p2p/{PEER}",
        f"/ip4/203.0.113.7/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
        f"{AT_RELAY}/p2p-circuit/p2p/{RELAY}",
        f"{AT_RELAY}/p2p-circuit/p2p/{PEER}" + "/" * MAX_ADDRESS_CHARS,
        CIRCUIT[1:],
    ],
)
def test_other_circuits_are_refused(text: str) -> None:
    """Chains of relays, circuits without a relay or a peer, and a relay that leads to itself."""
    with pytest.raises(AddressError):
        parse_circuit_address(text)
    with pytest.raises(AddressError):
        parse_peer_address(text)


@given(st.one_of(st.text(), st.lists(pieces).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        circuit = parse_circuit_address(text)
    except AddressError:
        return
    assert str(circuit) == text
    assert parse_peer_address(circuit.relay_address)[1] == circuit.relay != circuit.target


def test_an_address_of_another_peer_is_refused() -> None:
    assert parse_address_of(PEER, CIRCUIT)
    with pytest.raises(AddressError, match="is not an address of"):
        parse_address_of(RELAY, CIRCUIT)
