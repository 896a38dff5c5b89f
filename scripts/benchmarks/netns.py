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


def _member(stack: ExitStack, hub: str, index: int, up_mbps: float, down_mbps: float) -> Place:
    name, port, host = f"{PREFIX}-{os.getpid()}-{index}", f"port{index}", f"{SUBNET}.{index + 1}"
    _namespace(stack, name)
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "-n", hub, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run(
        "ip", "-n", name, "route", "change", f"{SUBNET}.0/24", "dev", INTERFACE, "congctl", CONGESTION_CONTROL
    )
    _limit(name, INTERFACE, up_mbps)
    _limit(hub, port, down_mbps)
    return Place(host=host, interface=INTERFACE, prefix=("ip", "netns", "exec", name))


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
