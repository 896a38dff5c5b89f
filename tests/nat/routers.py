"""Routers of a lab: their rules of address translation and filtering, and the daemon that maps ports for hosts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from tests.nat.namespaces import COMMAND_SECONDS, LabError, inside, settings

WAN = "wan"
LAN = "lan"
FORWARDED_PORT = 4001
"""The port of a router that is forwarded to a host, the same inside and outside."""

_STOP_SECONDS = 3.0
_INSIDE = ("ip", "netns", "exec")
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Lets the kernel kill a daemon when the test that started it is killed."""

# Netfilter's netlink message that deletes all entries of the table of connections: IPCTNL_MSG_CT_DELETE without a
# tuple, as `conntrack -F` sends it. A namespace's table can be reached from inside only.
_FORGET = """
import socket, struct
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
netlink.sendto(struct.pack("=IHHIIBBH", 20, (1 << 8) | 2, 1 | 4, 1, 0, 0, 0, 0), (0, 0))
error = struct.unpack("=IHHIIi", netlink.recv(4096)[:20])[5]
raise SystemExit(f"netlink: error {-error}" if error else 0)
"""

# miniupnpd of Debian writes its rules into these chains. Traffic that it redirects passes the filter of iptables as
# traffic whose destination was translated.
_CHAINS = """
table inet upnp {
    chain forward_upnp { }
    chain prerouting_upnp { type nat hook prerouting priority -100; policy accept; }
    chain postrouting_upnp { type nat hook postrouting priority 90; policy accept; }
}
"""


def make_router(
    namespace: str, *, symmetric: bool = False, rejects: bool = False, forward_to: str = "", port: int = 0
) -> None:
    """Let a namespace translate what leaves by its wide-area interface, and drop what comes unasked.

    Args:
        symmetric: each connection gets a random outer port; otherwise the port is kept where it is free.
        rejects: answer what comes unasked with a reset, instead of dropping it.
        forward_to: the host to which connections to ``port`` are forwarded; empty forwards none.
    """
    # By default, the kernel picks up connections that it has not seen begin. A connection that goes on after its
    # mapping is forgotten would hide the loss.
    settings(namespace, ipv4__ip_forward=1, netfilter__nf_conntrack_tcp_loose=0)
    random = " --random-fully" if symmetric else ""
    refuse = "-p tcp -j REJECT --reject-with tcp-reset" if rejects else "-j DROP"
    forward = (
        f"-A PREROUTING -i {WAN} -p tcp --dport {port} -j DNAT --to-destination {forward_to}:{port}\n"
        if forward_to
        else ""
    )
    rules = (
        f"*nat\n{forward}-A POSTROUTING -o {WAN} -j MASQUERADE{random}\nCOMMIT\n"
        "*filter\n:FORWARD DROP\n"
        "-A FORWARD -m conntrack --ctstate INVALID -j DROP\n"
        "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT\n"
        f"-A FORWARD ! -i {WAN} -j ACCEPT\n"
        f"-A INPUT -i {WAN} -m conntrack --ctstate NEW,INVALID {refuse}\n"
        "COMMIT\n"
    )
    inside(namespace, "iptables-restore", script=rules)


def make_filter6(namespace: str) -> None:
    """Let a router pass IPv6 on as it is, and drop what comes unasked."""
    settings(namespace, ipv6__conf__all__forwarding=1)
    rules = (
        "*filter\n:FORWARD DROP\n"
        "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n"
        f"-A FORWARD ! -i {WAN} -j ACCEPT\n"
        "COMMIT\n"
    )
    inside(namespace, "ip6tables-restore", script=rules)


def forget_connections(namespace: str) -> None:
    """Let a router forget all connections and mappings, as if it had been restarted."""
    inside(namespace, sys.executable, "-S", "-c", _FORGET)


class PortMappingDaemon:
    """A real ``miniupnpd`` on a router, which answers UPnP and NAT-PMP. The caller stops it.

    Args:
        folder: for its settings, its log and its list of mappings.
    """

    def __init__(self, namespace: str, folder: Path) -> None:
        inside(namespace, "nft", "-f", "-", script=_CHAINS)
        self._namespace = namespace
        self._files = folder / namespace
        self._files.with_suffix(".conf").write_text(_settings(self._files.with_suffix(".leases")))
        self.start()

    def start(self) -> None:
        """Start the daemon, and wait until it listens."""
        file, pid, log = (str(self._files.with_suffix(suffix)) for suffix in (".conf", ".pid", ".log"))
        command = [*_INSIDE, self._namespace, *_WITH_PARENT, "miniupnpd", "-d", "-f", file, "-P", pid]
        with open(log, "w") as opened:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened, process_group=0
            )
        deadline = time.monotonic() + COMMAND_SECONDS
        while "HTTP listening on port" not in (said := Path(log).read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise LabError(f"miniupnpd does not start: {said[-500:]}")
            time.sleep(0.02)

    def switch_off(self) -> None:
        """Kill the daemon, and forget all mappings."""
        self._process.kill()
        self._process.wait()
        self._files.with_suffix(".leases").unlink(missing_ok=True)
        inside(self._namespace, "nft", "flush", "table", "inet", "upnp")

    def stop(self) -> None:
        """End the daemon."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def mapped_ports(namespace: str) -> set[int]:
    """Return the outer ports that miniupnpd has mapped."""
    rules = inside(namespace, "nft", "list", "chain", "inet", "upnp", "prerouting_upnp")
    return {int(port) for port in re.findall(r"dport (\d+)", rules)}


def _settings(leases: Path) -> str:
    return "\n".join(
        (
            f"ext_ifname={WAN}",
            f"listening_ip={LAN}",
            "enable_upnp=yes",
            "enable_natpmp=yes",
            "secure_mode=yes",
            "system_uptime=no",  # a router that was switched off begins its clock anew
            "port=5000",
            "uuid=7b6880f4-b4f2-45f6-b135-e978975111e4",
            "upnp_table_name=upnp",
            "upnp_nat_table_name=upnp",
            "upnp_forward_chain=forward_upnp",
            "upnp_nat_chain=prerouting_upnp",
            "upnp_nat_postrouting_chain=postrouting_upnp",
            f"lease_file={leases}",
            "allow 1024-65535 0.0.0.0/0 1024-65535",
            "deny 0-65535 0.0.0.0/0 0-65535",
            "",
        )
    )
