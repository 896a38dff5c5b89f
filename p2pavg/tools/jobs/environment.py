"""The Python environment of a job: its packages, at exactly their versions, above those of p2pavg itself.

It is made once for a list of packages, and kept. Only wheels are installed, so no package runs code while it is
installed, outside of the fence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import naming_errors
from p2pavg.tools.jobs.fence import own_roots, site_folders

INSTALL_SECONDS = 3600.0
"""For all packages of a job: 5 GB at 12 Mbit/s."""


def cache_folder() -> Path:
    """Return where what can be had again is kept: ``$XDG_CACHE_HOME/p2pavg``, or ``~/.cache/p2pavg``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "p2pavg"


def make_environment(packages: Sequence[str] | None, folder: Path | None = None) -> Path:
    """Return the interpreter of an environment with these packages; make it if it is not there.

    Args:
        packages: lines of :func:`~p2pavg.tools.jobs.manifest.read_packages`; ``None``: the interpreter that runs
            p2pavg.
        folder: where environments are kept; ``None``: one of :func:`cache_folder`.

    Raises:
        ConfigError: it cannot be made; the message has the last words of the installer.
    """
    if packages is None:
        return Path(sys.executable)
    folder = cache_folder() / "environments" if folder is None else folder
    listed = "".join(f"{each}\n" for each in packages).encode()
    # Another interpreter, or another install of p2pavg, has another one.
    named = hashlib.sha256(f"{sys.version}\0{sys.prefix}\0".encode() + listed).hexdigest()[:24]
    place = folder / named
    python = place / "bin" / "python"
    if python.exists():
        return python
    with naming_errors(f"{folder} cannot be made", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A draft beside it: one that was cut off half way never counts as made.
        draft = Path(tempfile.mkdtemp(prefix=f"{named}.", dir=folder))
    try:
        with naming_errors(f"{place} cannot be made", place):
            _install(draft, listed)
            draft.rename(place)
    except ConfigError:
        if not python.exists():  # another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return python


def _install(place: Path, packages: bytes) -> None:
    # uv keeps what it has downloaded for other environments, too, and needs no pip in this one.
    uv = shutil.which("uv")
    listed = place / "packages.txt"
    listed.write_bytes(packages)
    python = place / "bin" / "python"
    if uv is not None:
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)])
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
        install = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install"]
    # `--require-hashes`: each line has some, and older versions of uv check them only if they are told to.
    # `--no-deps`: the list is complete, and nothing that it does not name comes along.
    _run([*install, "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(listed)])
    # p2pavg and torch are those of this install; a package of the job has priority over one of the same name.
    inner = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place), "platbase": str(place)}))
    (inner / "p2pavg-base.pth").write_text("".join(f"{each}\n" for each in [*site_folders(), *own_roots()]))


def _run(command: list[str]) -> None:
    try:
        # Ctrl-C in the terminal is for this process.
        done = subprocess.run(
            command, capture_output=True, timeout=INSTALL_SECONDS, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the job's packages were not installed within {INSTALL_SECONDS / 60:.0f} min",
            remedy="run the command again: what was downloaded is kept",
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-5:]
        raise ConfigError(
            "the job's packages cannot be installed: " + " / ".join(said),
            remedy="the machine needs a way to a package index, or a cache that has them; run the command again",
        )
