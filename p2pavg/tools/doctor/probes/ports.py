"""Facts of the addresses to listen on: whether each is free, and otherwise the process that has it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import replace

import psutil
from multiaddr import Multiaddr

from p2pavg.net.addresses import parse_listen_address
from p2pavg.net.transport import Transport
from p2pavg.tools.doctor.probes.addresses import meet
from p2pavg.tools.doctor.rules.network import DialOutcome, Port, PortState

_STATES = {
    errno.EADDRINUSE: PortState.TAKEN,
    errno.EACCES: PortState.FORBIDDEN,
    errno.EPERM: PortState.FORBIDDEN,
    errno.EADDRNOTAVAIL: PortState.NO_SUCH_HOST,
}


def try_ports(listen: Sequence[str]) -> list[Port]:
    """Listen at each address for a moment, and say how that went.

    It runs off the event loop: a system with many connections takes a moment to list them.
    """
    found = []
    for text in listen:
        address = parse_listen_address(text)
        host, port = _host_of(address), int(str(address.value_for_protocol("tcp")))
        family = socket.AF_INET if "ip4" in address else socket.AF_INET6
        state, owner, wrong = PortState.FREE, "", ""
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        except OSError as error:
            state, wrong = _STATES.get(error.errno or 0, PortState.FAILED), error.strerror or str(error)
            owner = _owner_of(port) if state is PortState.TAKEN else ""
        found.append(Port(address=text, port=port, state=state, owner=owner, error=wrong))
    return found


async def ask_owner(port: Port, transport: Transport, own_id: str | None) -> Port:
    """Return the port with the note whether this peer itself, which runs already, has it."""
    if port.state is not PortState.TAKEN or own_id is None:
        return port
    host = _host_of(parse_listen_address(port.address))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    version = "ip6" if ":" in host else "ip4"
    met = await meet(transport, f"/{version}/{host}/tcp/{port.port}/p2p/{own_id}")
    return replace(port, is_this_peer=met.answer is DialOutcome.REACHED)


def _host_of(address: Multiaddr) -> str:
    return str(address.value_for_protocol("ip4" if "ip4" in address else "ip6"))


def _owner_of(port: int) -> str:
    """Return the process that listens on a port; empty if the system does not tell this user."""
    try:
        found = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return ""
    for each in found:
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
            try:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
            except psutil.Error:  # it has just ended, or belongs to another user
                return f"process {each.pid}"
    return ""
