"""Virtual machines: network namespaces, each with a link of a given rate to a common switch.

Each namespace has one end of a veth pair. The other end is a port of a bridge in a namespace of its own, so that the
machine's network is untouched. A token bucket at each end limits the member's sending and receiving rates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.benchmarks.crew import Place

PREFIX = "p2pavg-bench"
INTERFACE = "eth0"
SUBNET = "10.77.0"
SITES = "10.78"
"""Of the sites of :func:`routed`, and the links between their routers."""
BETWEEN = "10.79"
UPLINK = "wan"

# The default of most systems. BBR, the default of some, leaves a fifth of such a short path unused when several
# connections share it.
CONGESTION_CONTROL = "cubic"
# A bucket must hold one segment of the kernel; a larger one would give a head start that no real link gives.
LEAST_BURST_BYTES = 32 * 1024
BURST_SECONDS = 0.004
# Queue before a link, as in a home router. With a much shorter one, members that send to the same member at once would
# lose so many packets that the figure shows TCP and not the link.
QUEUE_SECONDS = 0.05
LEAST_QUEUE_BYTES = 64 * 1024


class NoNamespacesError(Exception):
    """Network namespaces cannot be made here; the message says why."""


def check() -> None:
    """Raise NoNamespacesError if namespaces or their links cannot be made here."""
    if os.name != "posix" or os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespacesError(f"network namespaces need {tool}, of the package iproute2")
    try:
        with switched([1.0]):
            pass
    except subprocess.CalledProcessError as error:
        raise NoNamespacesError(f"no network namespace can be made: {error.stderr.strip()}") from None


@contextmanager
def switched(
    rates_mbps: Sequence[float], downloads_mbps: Sequence[float] | None = None
) -> Iterator[list[Place]]:
    """Provide one place for each rate; remove them on every kind of exit.

    Args:
        rates_mbps: of each place's sending, in Mbit/s.
        downloads_mbps: of its receiving; ``None``: the same.
    """
    _remove_abandoned()
    hub = f"{PREFIX}-{os.getpid()}-hub"
    with ExitStack() as stack:
        _namespace(stack, hub)
        _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "switch", "up")
        both = zip(rates_mbps, downloads_mbps or rates_mbps, strict=True)
        yield [_member(stack, hub, index, up, down) for index, (up, down) in enumerate(both)]


def set_link(place: Place, *, up: bool) -> None:
    """Cut the link of a place of :func:`switched` at the switch, without a word to its processes, or mend it."""
    members, _, index = place.prefix[-1].rpartition("-")
    _run("ip", "-n", f"{members}-hub", "link", "set", f"port{index}", "up" if up else "down")


def _member(stack: ExitStack, hub: str, index: int, up_mbps: float, down_mbps: float) -> Place:
    name, port, host = f"{PREFIX}-{os.getpid()}-{index}", f"port{index}", f"{SUBNET}.{index + 1}"
    _attach(stack, hub, name, port, host)
    _run(
        "ip", "-n", name, "route", "change", f"{SUBNET}.0/24", "dev", INTERFACE, "congctl", CONGESTION_CONTROL
    )
    _limit(name, INTERFACE, up_mbps)
    _limit(hub, port, down_mbps)
    return Place(host=host, interface=INTERFACE, prefix=("ip", "netns", "exec", name))


def _attach(stack: ExitStack, hub: str, name: str, port: str, host: str) -> None:
    _namespace(stack, name)
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "-n", hub, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")


@contextmanager
def routed(members: Sequence[int], inside_mbps: float, between_mbps: float) -> Iterator[list[Place]]:
    """Provide places in sites, in the order of the sites; remove them on every kind of exit.

    Each site is a switch with a router in one namespace, and the routers meet in a namespace between them. All members
    of a site share its router's link, which is limited at both of its ends.

    Args:
        members: number of places of each site.
        inside_mbps: rate of each place's own link, each way, in Mbit/s.
        between_mbps: rate of each router's link to the others, each way.
    """
    _remove_abandoned()
    core = f"{PREFIX}-{os.getpid()}-core"
    with ExitStack() as stack:
        _namespace(stack, core)
        _forward(core)
        places = []
        for site, count in enumerate(members):
            hub = f"{PREFIX}-{os.getpid()}-site{site}"
            _site(stack, core, hub, site, between_mbps)
            for index in range(count):
                places.append(_inmate(stack, hub, site, index, inside_mbps))
        yield places


def _site(stack: ExitStack, core: str, hub: str, site: int, mbps: float) -> None:
    _namespace(stack, hub)
    _forward(hub)
    _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", hub, "address", "add", f"{SITES}.{site}.254/24", "dev", "switch")
    _run("ip", "-n", hub, "link", "set", "switch", "up")
    port = f"site{site}"
    _run("ip", "-n", core, "link", "add", port, "type", "veth", "peer", "name", UPLINK, "netns", hub)
    for namespace, device, last in ((core, port, 1), (hub, UPLINK, 2)):
        _run("ip", "-n", namespace, "address", "add", f"{BETWEEN}.{site}.{last}/30", "dev", device)
        _run("ip", "-n", namespace, "link", "set", device, "up")
        _limit(namespace, device, mbps)
    _run("ip", "-n", core, "route", "add", f"{SITES}.{site}.0/24", "via", f"{BETWEEN}.{site}.2")
    _run("ip", "-n", hub, "route", "add", "default", "via", f"{BETWEEN}.{site}.1")


def _inmate(stack: ExitStack, hub: str, site: int, index: int, mbps: float) -> Place:
    name, port, host = f"{hub}-{index}", f"port{index}", f"{SITES}.{site}.{index + 1}"
    _attach(stack, hub, name, port, host)
    _run(
        *("ip", "-n", name, "route", "add", "default", "via", f"{SITES}.{site}.254"),
        *("congctl", CONGESTION_CONTROL),
    )
    _limit(name, INTERFACE, mbps)
    _limit(hub, port, mbps)
    return Place(host=host, interface=INTERFACE, prefix=("ip", "netns", "exec", name))


def _forward(namespace: str) -> None:
    _run("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")


def _namespace(stack: ExitStack, name: str) -> None:
    stack.callback(_remove, name)  # registered before the creation, because a Ctrl-C may come between
    _run("ip", "netns", "add", name)


def _limit(namespace: str, interface: str, rate_mbps: float) -> None:
    bytes_a_second = rate_mbps * 1e6 / 8
    burst = int(max(bytes_a_second * BURST_SECONDS, LEAST_BURST_BYTES))
    limit = burst + int(max(bytes_a_second * QUEUE_SECONDS, LEAST_QUEUE_BYTES))
    bucket = ("tbf", "rate", f"{rate_mbps * 1e6:.0f}bit", "burst", str(burst), "limit", str(limit))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_abandoned() -> None:
    """Remove the namespaces of a process that was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        pid = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", pid).exists():
            _remove(name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
