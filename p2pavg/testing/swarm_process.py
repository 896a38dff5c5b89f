"""What every process of a :class:`p2pavg.testing.LocalSwarm` runs: ``python -m p2pavg.testing.swarm_process``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable

from p2pavg.testing.swarm import Member


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function: Callable[[Member], None] = getattr(importlib.import_module(module), name)
    # What a peer imports when it is opened; meanwhile the first process finds out its address.
    importlib.import_module("p2pavg.net.libp2p")
    setup = json.loads(sys.stdin.readline())
    # The parent holds the other end: it is closed when the parent leaves the swarm, or dies.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    function(Member(setup["index"], setup["bootstrap"], setup["arguments"]))


if __name__ == "__main__":
    _main()
