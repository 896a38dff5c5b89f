"""A router with a real ``miniupnpd`` between a machine at home and one on the internet, in network namespaces.

``home`` (192.168.1.2) - ``router`` (192.168.1.1, 5.0.0.1) - ``outside`` (5.0.0.10). The router masquerades, drops what
comes from outside, and maps ports by UPnP and NAT-PMP. miniupnpd refuses outer addresses that are private or reserved,
also those for documentation, so the lab's internet is 5.0.0.0/24.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HOME, INSIDE, OUTER, OUTSIDE = "192.168.1.2", "192.168.1.1", "5.0.0.1", "5.0.0.10"
TABLE = """
table inet upnp {
    chain miniupnpd { }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
    chain forward { type filter hook forward priority 0; jump miniupnpd; }
    chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
    chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; }
    chain outbound { type nat hook postrouting priority 110; oifname "wan" masquerade; }
    chain closed {
        type filter hook forward priority 10; policy drop;
        ct state established,related accept
        iifname != "wan" accept
        ct status dnat accept
    }
    chain input { type filter hook input priority 0; iifname "wan" ct state new drop; }
}
"""
SETTINGS = """
ext_ifname=wan
listening_ip=lan
enable_upnp={upnp}
enable_natpmp={natpmp}
secure_mode=yes
system_uptime=no
uuid=7b6880f4-b4f2-45f6-b135-e978975111e4
upnp_table_name=upnp
upnp_nat_table_name=upnp
allow 1-65535 192.168.1.0/24 1-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def reason_to_skip() -> str:
    """Return the reason why this machine cannot run the lab; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft", "miniupnpd"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"p2pavg-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    tables = subprocess.run([*_in(name), "nft", "list", "tables"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if not tables.returncode else "no packet filter in network namespaces"


def _in(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


class RouterLab:
    """The three machines; made by :func:`open_router_lab`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {name: f"p2pavg-{os.getpid()}-{name}" for name in ("home", "router", "outside")}
        self._daemon: subprocess.Popen[bytes] | None = None

    def command(self, machine: str, *command: str) -> list[str]:
        """Return the command line that runs a command on a machine."""
        return [*_in(self._names[machine]), *command]

    def start(self) -> None:
        """Make the machines and their links."""
        for name in self._names.values():
            _run(["ip", "netns", "add", name])
        for machine in self._names:
            _run(self.command(machine, "ip", "link", "set", "lo", "up"))
        self._link("home", "lan", HOME, "lan", INSIDE)
        self._link("outside", "wan", OUTSIDE, "wan", OUTER)
        _run(self.command("home", "ip", "route", "add", "default", "via", INSIDE))
        _run(self.command("router", "sysctl", "-qw", "net.ipv4.ip_forward=1"))
        _run(self.command("router", "nft", "-f", "-"), TABLE)

    def _link(self, machine: str, device: str, host: str, routers_device: str, routers_host: str) -> None:
        there, router = self._names[machine], self._names["router"]
        ends = ["ip", "link", "add", device, "netns", there, "type", "veth"]
        _run([*ends, "peer", "name", routers_device, "netns", router])
        for name, its_device, its_host in ((machine, device, host), ("router", routers_device, routers_host)):
            _run(self.command(name, "ip", "addr", "add", f"{its_host}/24", "dev", its_device))
            _run(self.command(name, "ip", "link", "set", its_device, "up"))

    def start_router(self, *, upnp: bool, natpmp: bool) -> None:
        """Start the daemon that maps ports, and wait until it listens."""
        words = {True: "yes", False: "no"}
        settings = self._folder / "miniupnpd.conf"
        settings.write_text(SETTINGS.format(upnp=words[upnp], natpmp=words[natpmp]), encoding="utf-8")
        daemon = ["miniupnpd", "-d", "-f", str(settings), "-P", str(self._folder / "miniupnpd.pid")]
        self._daemon = subprocess.Popen(
            self.command("router", *daemon), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert self._daemon.stderr is not None
        wanted = b"NAT-PMP" if natpmp else b"HTTP listening"
        for line in self._daemon.stderr:
            if wanted in line and b"istening" in line:
                return
        raise AssertionError("miniupnpd has ended")

    def kill_router(self) -> None:
        """Kill the daemon, and forget all mappings, like a router that is switched off and on."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.communicate()
            self._daemon = None
            for chain in ("miniupnpd", "prerouting_miniupnpd", "postrouting_miniupnpd"):
                _run(self.command("router", "nft", "flush", "chain", "inet", "upnp", chain))

    def stop(self) -> None:
        """Remove everything."""
        self.kill_router()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(command: Sequence[str], given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def open_router_lab(folder: Path) -> Iterator[RouterLab]:
    """Make the machines for as long as the block runs. The daemon's files are in ``folder``."""
    lab = RouterLab(folder)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
