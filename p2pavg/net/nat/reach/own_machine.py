"""The rule by which a peer stays on its own machine. No I/O, no clock, no random source.

A run without an authority has no members: any peer that knows its id reads and changes its averages. So a peer without
a certificate stays on this machine, unless its user asks for an open run by name. A peer stays here if all addresses
that its user names are loopback addresses. The transport then dials no other address, asks no router for a port, and
takes no relay, so no address that another process names leads out of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from p2pavg.base.hostnames import is_loopback
from p2pavg.net.addresses import check_is_list, is_circuit, parse_listen_address, parse_peer_address

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)

MAKE_A_RUN = (
    "make a run with `p2pavg run create NAME`, and open AveragingConfig.from_run(...) with what it prints; or set"
    " open_run=True (--open), with which any peer that knows the run's id can read and change its averages"
)
"""The remedy for a peer without a certificate that is to leave this machine."""


def way_out(listen: Sequence[str], bootstrap: Sequence[str], announce: Sequence[str]) -> str:
    """Return the first thing that leads out of this machine, as the subject of a sentence; empty if nothing does.

    Raises:
        AddressError: a text is no address; the message says what is wrong with it.
    """
    for name, texts in (("listen", listen), ("bootstrap", bootstrap), ("announce", announce)):
        check_is_list(name, texts)
    if not listen:
        return "listen=[], with which others reach a peer through relays,"
    for name, texts in (("listen", listen), ("announce", announce)):
        for text in texts:
            if not _is_loopback(parse_listen_address(text)):
                return f"the {name} address {text}"
    for text in bootstrap:
        # The peer behind a relay may be anywhere. The address of a name is known only when it is looked up.
        address, _ = parse_peer_address(text)
        if is_circuit(text) or not _is_loopback(address):
            return f"the bootstrap address {text}"
    return ""


def _is_loopback(address: Multiaddr) -> bool:
    first = next(iter(address.protocols()))
    return first.name in ("ip4", "ip6") and is_loopback(str(address.value_for_protocol(first.code)))
