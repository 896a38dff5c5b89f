"""Two homes behind two routers, in network namespaces with the kernel's own address translation.

``python -m tests.integration.punch.routers [keeping|symmetric] [COUNT]`` counts the punches that succeed. It needs
root, ``ip`` and ``iptables``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTER_HOSTS = ("203.0.113.1", "203.0.113.2")
ROOT = Path(__file__).resolve().parents[3]


def obstacle() -> str:
    """Return the reason for which this process cannot make such homes; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    probe = f"pp{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this process may make no network namespaces"
    found = _in(probe, "iptables -t nat -L -n", check=False)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return "" if found.returncode == 0 else "the kernel has no address translation"


def _in(namespace: str, command: str, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    words = ["ip", "netns", "exec", namespace, *command.split()]
    return subprocess.run(words, capture_output=True, check=check)


@contextmanager
def two_homes(*, symmetric: bool) -> Iterator[tuple[str, str]]:
    """Yield the namespaces of two machines, each behind a router of its own that drops what comes from outside."""
    prefix = f"pp{os.getpid()}"
    homes = (f"{prefix}-home1", f"{prefix}-home2")
    routers = (f"{prefix}-router1", f"{prefix}-router2")
    with ExitStack() as made:
        for name in (*homes, *routers):
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            _in(name, "ip link set lo up")
        _connect(routers[0], "wan", routers[1], "wan")
        for number, (home, router) in enumerate(zip(homes, routers, strict=True), start=1):
            _connect(home, "lan", router, "lan")
            _in(home, f"ip addr add 192.168.{number}.2/24 dev lan")
            _in(router, f"ip addr add 192.168.{number}.1/24 dev lan")
            _in(home, f"ip route add default via 192.168.{number}.1")
            _translate(router, OUTER_HOSTS[number - 1], symmetric=symmetric)
        yield homes


def _connect(one: str, device: str, other: str, other_device: str) -> None:
    words = f"ip link add {device} netns {one} type veth peer name {other_device} netns {other}"
    subprocess.run(words.split(), check=True)
    for namespace, name in ((one, device), (other, other_device)):
        _in(namespace, f"ip link set {name} up")


def _translate(router: str, outer_host: str, *, symmetric: bool) -> None:
    _in(router, f"ip addr add {outer_host}/24 dev wan")
    _in(router, "sysctl -qw net.ipv4.ip_forward=1")
    at_random = " --random-fully" if symmetric else ""
    for rule in (
        f"-t nat -A POSTROUTING -o wan -j MASQUERADE{at_random}",
        "-P FORWARD DROP",
        "-A FORWARD -m state --state ESTABLISHED,RELATED -j ACCEPT",
        "-A FORWARD ! -i wan -j ACCEPT",
        "-A INPUT -i wan -m state --state NEW -j DROP",
    ):
        _in(router, f"iptables {rule}")


@dataclass
class Tally:
    """The ends of the punches at both peers."""

    reports: list[tuple[dict[str, Any], dict[str, Any]]]
    """For each punch the report of the asker and that of the other peer."""

    @property
    def successes(self) -> int:
        return sum(not asker["error"] and other["made"] for asker, other in self.reports)

    @property
    def tries(self) -> Counter[int]:
        """The number of punches that succeeded at the first, second and third try."""
        return Counter(asker["tries"] for asker, _ in self.reports if not asker["error"])


def punches(homes: tuple[str, str], count: int, *, seconds: float = 2.5) -> Tally:
    """Let the machines of two homes punch ``count`` times.

    The messages of each punch go over a pair of sockets that leave no namespace, in place of a relay.
    """
    with ExitStack() as owned:
        pairs = [socket.socketpair() for _ in range(count)]
        for opened in (each for pair in pairs for each in pair):
            owned.callback(opened.close)
        askers, others = zip(*pairs, strict=True)
        workers = [
            _worker(owned, homes[0], ["ask", OUTER_HOSTS[0]], askers, seconds),
            _worker(owned, homes[1], ["answer", OUTER_HOSTS[1]], others, seconds),
        ]
        for opened in (each for pair in pairs for each in pair):
            opened.close()  # so that each worker sees when the other one has left
        asked, answered = (
            [json.loads(line) for line in worker.communicate(timeout=60.0 + 15.0 * count)[0].splitlines()]
            for worker in workers
        )
    return Tally(list(zip(asked, answered, strict=True)))


def _worker(
    owned: ExitStack, home: str, role: list[str], streams: Sequence[socket.socket], seconds: float
) -> subprocess.Popen[bytes]:
    descriptors = [opened.fileno() for opened in streams]
    module = [sys.executable, "-m", "tests.integration.punch.router_work"]
    words = [*module, *role, str(seconds), *map(str, descriptors)]
    started = subprocess.Popen(
        ["ip", "netns", "exec", home, *words], pass_fds=descriptors, stdout=subprocess.PIPE, cwd=ROOT
    )
    worker = owned.enter_context(started)
    owned.callback(worker.kill)
    return worker


def main(kind: str = "keeping", count: str = "100") -> None:
    """Print how many punches succeeded."""
    with two_homes(symmetric=kind == "symmetric") as homes:
        tally = punches(homes, int(count))
    print(
        f"{tally.successes} of {count} punches between {kind} routers succeeded; by tries: {dict(tally.tries)}"
    )
    for asker, _ in tally.reports:
        if asker["error"]:
            print(asker["error"])


if __name__ == "__main__":
    main(*sys.argv[1:])
