"""Makes a folder with p2pavg and all that it needs, for machines without a registry, or without a compiler.

    scripts/bundle DIR
    sh DIR/install [ENVIRONMENT]    # on the other machine: its own venv, ~/.local/share/p2pavg-venv if not named

The packages are those of requirements.lock, for the Python version and the system that make the bundle. libp2p's own
requirement, a fastecdsa that has to be compiled, is replaced by a later one, as in scripts/env.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
INSTALL = """#!/bin/sh
# Make an environment with p2pavg from the wheels beside this file. It needs {python} with its venv module, and nothing
# else. To remove it, remove the folder.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
folder=${{1:-$HOME/.local/share/p2pavg-venv}}
{python} -m venv "$folder"
# Nothing to decide, and nothing to ask: the list is complete.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "$here"/wheels/*.whl
"$folder/bin/p2pavg" --version
echo "the command is $folder/bin/p2pavg"
"""


def needed(name: str = "p2pavg") -> dict[str, str]:
    """Return all packages that a package needs here, without extras, and their versions in this environment."""
    found: dict[str, str] = {}
    left = [name]
    while left:
        for text in requires(left.pop()) or ():
            asked = Requirement(text)
            key = canonicalize_name(asked.name)
            if key in found or (asked.marker is not None and not asked.marker.evaluate({"extra": ""})):
                continue
            try:
                found[key] = version(key)
            except PackageNotFoundError:
                continue  # NVIDIA's packages beside a build of torch for CPUs
            left.append(key)
    return found


def main() -> int:
    """Make the bundle."""
    parser = argparse.ArgumentParser(
        prog="scripts/bundle", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    folder = parser.parse_args().folder.resolve()
    if folder.exists():
        sys.exit(f"p2pavg: {folder} exists; name another folder")
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    packages = [f"{name}=={number.partition('+')[0]}" for name, number in sorted(needed().items())]
    # One call with nothing to decide. Most are wheels already; the others are built here, from Python alone.
    subprocess.run([*pip, "--wheel-dir", str(wheels), str(ROOT), *packages], check=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    install = folder / "install"
    install.write_text(INSTALL.format(python=python), encoding="utf-8")
    install.chmod(0o755)
    size = sum(file.stat().st_size for file in wheels.iterdir()) / 1e6
    print(
        f"made {folder}: {len(list(wheels.iterdir()))} wheels, {size:.0f} MB; install it with: sh {install}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
