"""What every process of a :class:`p2pavg.testing.LocalSwarm` runs: ``python -m p2pavg.testing.swarm_process``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType

from p2pavg.testing.swarm import Member


def _listen(member: Member) -> None:
    """The parent holds the other end: it is closed when the parent leaves the swarm, or dies."""
    member.listen(sys.stdin)
    os._exit(1)


def _module(name: str) -> ModuleType:
    """By its name, or of a script by its file."""
    if not os.path.isabs(name):
        return importlib.import_module(name)
    sys.path.insert(0, os.path.dirname(name))  # as where it is run itself
    loader = SourceFileLoader("p2pavg_swarm_script", name)
    module = ModuleType(loader.name)
    module.__file__ = name
    sys.modules[loader.name] = module  # dataclasses look there
    loader.exec_module(module)
    return module


def _main() -> None:
    # Its standard output is the line to the test; what anything here prints is not for that.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = sys.argv[1].rpartition(":")
    function: Callable[[Member], None] = getattr(_module(module), name)
    # What a peer imports when it is opened; meanwhile the first process finds out its address.
    importlib.import_module("p2pavg.net.libp2p.transport")
    line = sys.stdin.readline()
    if not line:  # the parent has left before it said who this is
        return
    setup = json.loads(line)
    member = Member(setup["index"], setup["bootstrap"], setup["arguments"], reports)
    threading.Thread(target=_listen, args=(member,), daemon=True).start()
    function(member)


if __name__ == "__main__":
    _main()
