"""A virtual environment for hivemind, whose dependencies conflict with this project's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from scripts.benchmarks.crew import ROOT

VARIABLE = "P2PAVG_BENCH_HIVEMIND_PYTHON"
FOLDER = ROOT / ".venv-hivemind"  # ignored by git, like .venv
# With numpy 2.4 its 8-bit codecs fail internally while `step()` reports success. It also imports pkg_resources, which
# setuptools 81 no longer has.
PACKAGES = ("torch==2.13.0", "numpy<2.4", "setuptools<81", "hivemind==1.1.12", "bitsandbytes")


class NoHivemindError(Exception):
    """No environment with hivemind is available; the message says why."""


def hivemind_python(given: str | None) -> str:
    """Return the python of an environment with hivemind, which the first call creates.

    Args:
        given: an existing python, or ``"none"``; by default, the value of the environment variable.

    Raises:
        NoHivemindError: hivemind is not available.
    """
    given = given or os.environ.get(VARIABLE)
    if given == "none":
        raise NoHivemindError("left out")
    if given is None:
        _make()
        given = str(FOLDER / "bin" / "python")
    try:
        subprocess.run([given, "-c", "import hivemind"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHivemindError(f"{given} cannot import hivemind: {_last_line(error)}") from None
    return given


def _make() -> None:
    """Create the environment, unless a complete one exists."""
    made = FOLDER / "made"
    if made.exists() and made.read_text() == "\n".join(PACKAGES):
        return
    print(
        f"making {FOLDER.name} for hivemind, once (--hivemind-python none leaves it out) ...",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(FOLDER, ignore_errors=True)
    install = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES]
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", str(FOLDER)], check=True, capture_output=True, text=True
        )
        subprocess.run(install, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHivemindError(f"hivemind could not be installed: {_last_line(error)}") from None
    made.write_text("\n".join(PACKAGES))


def _last_line(error: Exception) -> str:
    lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
