"""The fence around a job's program, which is a stranger's: bubblewrap, where Linux has it.

Inside of it, there is the system's own software to read, the job's folder to read, one folder to write to, and one
socket, behind which the peer's process has the network. There is no home folder, no other process, no network, and no
way to more rights.
"""

from __future__ import annotations

import os
import platform
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.tools.jobs.limited import seccomp_filter
from p2pavg.tools.jobs.limits import MAX_TASKS

BWRAP = "bwrap"
OWN_PACKAGES = ("p2pavg", "p2pavg_dht", "p2pavg_compression")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIGURATION = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs")
JOB = "/job"
SCRATCH = "/scratch"
HANDED = "/p2pavg"
PRLIMIT = "/usr/bin/prlimit"
SMALL_BYTES = 64 * 2**20  # of /tmp, which is in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedPlaces:
    """The folders that a job's program sees."""

    job: Path
    """Its own, to read; it is :data:`JOB` inside."""
    scratch: Path
    """To write to; :data:`SCRATCH` inside."""
    handed: Path
    """With the gate's socket, the run file and the certificate, to read; :data:`HANDED` inside."""
    python: tuple[Path, ...]
    """Of the interpreter and its packages, to read; the same names inside."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """The job's larger files by name, to read: they are in :data:`JOB` inside, where an empty file stands for each."""


def limited(command: Sequence[str], file_bytes: int) -> list[str]:
    """Return the command that runs a command, such as a fenced one, within the limits of :mod:`.limited`.

    Args:
        file_bytes: of the largest file that it may write.
    """
    script = Path(__file__).with_name("limited.py")
    return [sys.executable, "-I", str(script), str(file_bytes), *command]


def missing_fence() -> str:
    """Return why this machine has no fence, as a sentence; empty if it has one."""
    if not sys.platform.startswith("linux"):
        return f"there is none for {sys.platform}"
    if not seccomp_filter(platform.machine()):
        return f"there is no filter of system calls for this processor, {platform.machine()}"
    if shutil.which(BWRAP) is None:
        return "the program bwrap is not installed (the package bubblewrap of your distribution)"
    try:
        # The whole of it: an older bubblewrap lacks a word, and a container may forbid a part.
        with tempfile.TemporaryDirectory() as folder:
            places = FencedPlaces(job=Path(folder), scratch=Path(folder), handed=Path(folder), python=())
            command = fenced(
                ["true"], places, {"PATH": "/usr/bin:/bin"}, network=False, gpu=False, shared_bytes=2**20
            )
            tried = subprocess.run(
                limited(command, 2**20), capture_output=True, timeout=REPLY_SECONDS, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap cannot be started: {error}"
    if tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().splitlines()
        return f"bwrap does not work here: {said[-1] if said else tried.returncode}"
    return ""


def fenced(
    command: Sequence[str],
    places: FencedPlaces,
    environment: Mapping[str, str],
    *,
    network: bool,
    gpu: bool,
    shared_bytes: int,
) -> list[str]:
    """Return the command that runs a command inside the fence.

    Args:
        environment: the only variables that the command has.
        network: true if it may open connections itself.
        gpu: true if it may use the machine's GPUs.
        shared_bytes: of memory that its processes share.
    """
    # Everything is unshared: users, processes, network, names of the host, shared memory and control groups.
    words = [BWRAP, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    # With namespaces of its own, it would be root in them, and reach parts of the kernel that users do not.
    words += ["--unshare-user", "--disable-userns"]
    words += ["--share-net"] if network else []
    words += ["--hostname", "job"]
    for each in filter(os.path.exists, (*_SYSTEM, *_CONFIGURATION)):
        # A link stays a link, as /bin is one to /usr/bin.
        words += ["--symlink", os.readlink(each)] if os.path.islink(each) else ["--ro-bind", each]
        words.append(each)
    if network:
        words += [word for each in _NETWORK for word in ("--ro-bind-try", each, each)]
    # What is in memory only is bounded, too. Large files belong into the scratch folder, which is on the disk.
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(shared_bytes), "--tmpfs", "/dev/shm"]
    words += ["--size", str(SMALL_BYTES), "--tmpfs", "/tmp"]
    for place in places.python:
        words += ["--ro-bind", str(place), str(place)]
    words += ["--ro-bind", str(places.job), JOB]
    for name, file in places.files.items():
        words += ["--ro-bind", str(file), f"{JOB}/{name}"]
    words += ["--bind", str(places.scratch), SCRATCH]
    words += ["--ro-bind", str(places.handed), HANDED]
    if gpu:
        for device in sorted(Path("/dev").glob("nvidia*")):
            words += ["--dev-bind", str(device), str(device)]
        words += ["--ro-bind-try", "/sys", "/sys"]
    # The folders of bubblewrap's own, which are in memory, cannot be written to.
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    words += ["--chdir", JOB, "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    # Inside, where the limit counts the job's own tasks, and none of the user's. (Linux has none
    # for root; the watch counts tasks as well.)
    bounded = [PRLIMIT, f"--nproc={MAX_TASKS}:{MAX_TASKS}"] if os.path.exists(PRLIMIT) else []
    return [*words, "--", *bounded, *command]


def python_places(executable: Path) -> tuple[Path, ...]:
    """Return the folders and files that a Python interpreter needs, besides those of the system.

    Args:
        executable: of an environment, or of the interpreter itself.
    """
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(executable).parent.parent}
    # Of a prefix, only what an interpreter reads: it may be the user's home folder, if that is an environment.
    found = {prefix / name for prefix in prefixes for name in ("bin", "lib", "lib64", "pyvenv.cfg")}
    found |= {Path(each) for each in site_folders()}
    # Those of this project may be elsewhere, in an editable install. Nothing beside them is shown.
    found |= set(map(Path, own_folders()))
    existing = sorted({each for place in found if place.exists() for each in (place, place.resolve())})
    system = [Path(each) for each in _SYSTEM]
    needed = [
        each for each in existing if not any(each == outer or outer in each.parents for outer in system)
    ]
    return tuple(each for each in needed if not any(outer in each.parents for outer in needed))


def site_folders() -> list[str]:
    """Return the folders of installed packages."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [each for each in (*site.getsitepackages(), *user) if os.path.isdir(each)]


def own_folders() -> list[str]:
    """Return the folders of this project's packages."""
    specs = filter(None, map(find_spec, OWN_PACKAGES))
    return [folder for spec in specs for folder in spec.submodule_search_locations or ()]


def own_roots() -> list[str]:
    """Return the folders in which Python finds the packages of this project, if not among those of all packages.

    Before others on the path, these would hide a job's own versions of what is there.
    """
    installed = {os.path.realpath(each) for each in site_folders()}
    found = dict.fromkeys(map(os.path.dirname, own_folders()))
    return [each for each in found if os.path.realpath(each) not in installed]
