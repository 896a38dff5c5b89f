"""The files with which one peer takes part in a run that has an authority. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """The folder of a peer in a run, and its files, which may be elsewhere."""

    folder: Path
    """It also has the peer's port, and the addresses of peers that it knew."""
    run_file: Path
    certificate: Path
    identity: Path
    gate: Path | None = None
    """Socket of the process that has this peer's network and key; ``None``: this process has them."""
