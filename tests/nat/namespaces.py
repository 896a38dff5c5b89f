"""Network namespaces of one lab: made, used and removed with bounded commands.

The name of each namespace begins with the id of the process that made it, so that a later process finds and removes
what a killed one left behind.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

PREFIX = "p2pavg-lab"
COMMAND_SECONDS = 20.0  # of one command; on a busy machine they take 0.1 s at most

_labs = count()


class LabError(Exception):
    """The lab cannot be built, or a process in it did not do what it should."""


def run(*command: str, script: str | None = None) -> str:
    """Run one command with ``script`` as its standard input, and return what it prints.

    Raises:
        LabError: the command failed, or took longer than 20 s.
    """
    try:
        ended = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command)}: no end within {COMMAND_SECONDS:.0f} s") from None
    if ended.returncode:
        raise LabError(f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}")
    return ended.stdout


@functools.cache
def may_run() -> str:
    """Return the reason for which no lab can be built on this machine; empty if one can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("ss", "iproute2"),
        ("iptables-restore", "iptables"),
    ):
        if shutil.which(tool) is None:
            return f"a lab needs {tool}, of the package {package}"
    try:
        with Namespaces() as trial:
            name = trial.add("trial")
            _make_address_translation(name)
    except LabError as error:
        return f"the kernel makes no namespace with address translation: {error}"
    return ""


@functools.cache
def may_map_ports() -> str:
    """Return the reason for which no router of a lab can serve UPnP; empty if one can."""
    for tool, package in (
        ("miniupnpd", "miniupnpd-nftables"),
        ("nft", "nftables"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(tool) is None:
            return f"a UPnP router needs {tool}, of the package {package}"
    return may_run()


def clean() -> list[str]:
    """Remove the namespaces of labs whose processes have ended, and return their names."""
    if shutil.which("ip") is None:
        return []
    removed = []
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", owner).exists():
            _remove(name)
            removed.append(name)
    return removed


class Namespaces:
    """The namespaces of one lab. Leaving the ``with`` block removes them, with the processes in them."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}-{os.getpid()}-{next(_labs)}"
        self._names: list[str] = []

    def __enter__(self) -> Namespaces:
        clean()
        atexit.register(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, label: str) -> str:
        """Make a namespace, and return its name."""
        name = f"{self._prefix}-{label}"
        self._names.append(name)  # before it is made, because a Ctrl-C may come between
        run("ip", "netns", "add", name)
        ip(name, "link set lo up")
        return name

    def close(self) -> None:
        """Kill the processes in the namespaces, and remove these. Can be called several times."""
        atexit.unregister(self.close)
        while self._names:
            _remove(self._names.pop())


def ip(namespace: str, *commands: str) -> None:
    """Run commands of ``ip`` in a namespace, such as ``"link set eth0 up"``."""
    run("ip", "-n", namespace, "-batch", "-", script="\n".join(commands) + "\n")


def ip_json(namespace: str, *words: str) -> Any:
    """Return what ``ip`` tells about a namespace."""
    return json.loads(run("ip", "-n", namespace, "-json", *words))


def inside(namespace: str, *command: str, script: str | None = None) -> str:
    """Run one command in a namespace; see :func:`run`."""
    return run("ip", "netns", "exec", namespace, *command, script=script)


def link(first: str, first_name: str, second: str, second_name: str) -> None:
    """Connect two namespaces with a cable, whose ends get these names and are up."""
    ip(first, f"link add name {first_name} type veth peer name {second_name} netns {second}")
    ip(first, f"link set {first_name} up")
    ip(second, f"link set {second_name} up")


def settings(namespace: str, **values: int) -> None:
    """Set settings of the kernel below ``net``, in which ``__`` stands for a dot: ``ipv4__ip_forward=1``."""
    words = [f"net.{name.replace('__', '.')}={value}" for name, value in values.items()]
    inside(namespace, "sysctl", "-qw", *words)


def _make_address_translation(namespace: str) -> None:
    rules = "*nat\n-A POSTROUTING -o wan -j MASQUERADE --random-fully\nCOMMIT\n"
    inside(namespace, "iptables-restore", script=rules)


def _remove(name: str) -> None:
    """Remove one namespace. Never raises, so that the others are removed too."""
    with suppress(LabError):
        _kill(run("ip", "netns", "pids", name).split())
    with suppress(LabError):
        run("ip", "netns", "delete", name)


def _kill(pids: Sequence[str]) -> None:
    for pid in pids:
        if int(pid) != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
