"""The packages that scripts/env installs: makes requirements.lock from pyproject.toml, or checks that it fits.

The lock is for Python 3.11 to 3.13 on all systems. It has no hashes: one version of torch has several builds (for CPUs,
for CUDA), and with hashes pip takes only one of them.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
MADE_FROM = "# Made by scripts/env --lock from pyproject.toml's requirements: "
CUDA = re.compile(r"(nvidia|cuda|triton)\b")
"""Needed by torch's CUDA build alone; scripts/env lets pip see to these."""

COMPILE = [
    *("pip", "compile", "pyproject.toml", "--quiet", "--all-extras", "--universal", "--python-version=3.11"),
    *(
        "--fork-strategy=fewest",
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
    ),
]
"""The same versions for all Pythons, and no word of where they came from."""


def requirements(pyproject: str) -> list[str]:
    """Return the requirements of pyproject.toml: dependencies, those of all extras and of the build, and overrides."""
    document = tomllib.loads(pyproject)
    project = document["project"]
    asked = {*project["dependencies"], *document["build-system"]["requires"]}
    asked.update(*project["optional-dependencies"].values())
    asked.update(document["tool"]["uv"]["override-dependencies"])
    # The extra `all` names other extras, whose requirements are here already.
    return sorted(each for each in asked if Requirement(each).name != project["name"])


def digest(asked: Iterable[str]) -> str:
    """Changes with every requirement."""
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]


def what_is_wrong(pyproject: str, lock: str) -> list[str]:
    """Return the reasons why the lock does not fit the project; empty if it does."""
    asked = requirements(pyproject)
    if f"{MADE_FROM}{digest(asked)}" not in lock.splitlines():
        return ["requirements.lock was made from other requirements than pyproject.toml has"]
    # The digest tells nothing of lines that were changed by hand.
    pins = [Requirement(line) for line in lock.splitlines() if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    wrong = []
    for want in map(Requirement, asked):
        version = versions.get(canonicalize_name(want.name))
        if version is None or not want.specifier.contains(version, prereleases=True):
            wrong.append(f"requirements.lock has {version or 'nothing'} for {want}")
    return wrong


def make(options: list[str]) -> str:
    """The lock's text. uv resolves for all systems and Pythons at once, which pip does not."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", folder, "uv"], check=True)
        built_with = Path(folder, "build.in")
        built_with.write_text("\n".join(tomllib.loads(pyproject)["build-system"]["requires"]))
        resolved = Path(folder, "requirements.lock")
        if LOCK.exists():
            resolved.write_text(LOCK.read_text(encoding="utf-8"))  # uv keeps the versions that it finds there
        uv = [f"{folder}/bin/uv", *COMPILE, str(built_with), "--output-file", str(resolved), *options]
        subprocess.run(uv, cwd=ROOT, check=True)
        pins = [line for line in resolved.read_text().splitlines() if not CUDA.match(line)]
    return "\n".join([f"{MADE_FROM}{digest(requirements(pyproject))}", *pins, ""])


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="scripts/env --lock", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it fits; needs no network")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    arguments = parser.parse_args()
    if not arguments.check:
        LOCK.write_text(make(["--upgrade"] if arguments.upgrade else []), encoding="utf-8")
        return 0
    wrong = what_is_wrong(
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"), LOCK.read_text(encoding="utf-8")
    )
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("scripts/env --lock makes it anew", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
