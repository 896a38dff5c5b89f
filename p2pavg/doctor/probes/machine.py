"""Facts of this machine: versions, open files, memory, GPU, and the addresses of its interfaces."""

from __future__ import annotations

import importlib
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

import psutil
import torch

from p2pavg.doctor.rules.machine import Gpu
from p2pavg.doctor.rules.versions import Installed, read_requirement
from p2pavg.net.lanes.limits import MAX_IDLE, MAX_INBOUND
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.limits.open_files import RESERVED_FILES

if sys.platform != "win32":
    import resource

_PACKAGE = "p2pavg"
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/dxg"))  # dxg: WSL


def python_version() -> tuple[str, str]:
    """Return the version of Python, and the versions that p2pavg allows; empty if they are not recorded."""
    try:
        wanted = metadata.metadata(_PACKAGE)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return platform.python_version(), ""
    return platform.python_version(), wanted or ""


def installed_packages() -> list[Installed]:
    """Return the packages that p2pavg needs. The list is empty if p2pavg is not installed as a package."""
    try:
        requirements = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    wanted = [found for text in requirements if (found := read_requirement(text)) is not None]
    return [Installed(name, versions, _version_of(name)) for name, versions in wanted]


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def open_files() -> tuple[int | None, int]:
    """Return the hard limit of open files, ``None`` without one, and the number that a peer may use."""
    limits = ConnectionLimits()
    wanted = limits.connections + limits.unfinished + MAX_INBOUND + 2 * MAX_IDLE + RESERVED_FILES
    if sys.platform == "win32":
        return None, wanted
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (None if hard == resource.RLIM_INFINITY else hard), wanted


def available_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of its container."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or "max"
        return free
    return max(0, min(free, limit - used))


def gpu() -> Gpu:
    """Return what torch and the system say of GPUs. Importing bitsandbytes takes seconds, so only a GPU is worth it."""
    available = torch.cuda.is_available()
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Gpu(
        torch=torch.__version__,
        built_for=torch.version.cuda,
        available=available,
        names=names if available else (),
        driver=any(map(os.path.exists, _NVIDIA)),
        bitsandbytes=_import_error("bitsandbytes.functional") if available else "",
    )


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a native library that does not fit raises anything
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def own_hosts() -> frozenset[str]:
    """Return the IP addresses of this machine's interfaces."""
    return frozenset(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
