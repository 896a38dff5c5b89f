"""Programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with arguments until it ends. ``check``: raise an exception if it ends with an error."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=check,
    )
