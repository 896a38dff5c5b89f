"""The main program of each process of a :class:`p2pavg.testing.LocalSwarm`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from p2pavg.testing.swarm import Member


def _listen(member: Member) -> None:
    """Receive the test's messages, and exit when the test closes the pipe or dies."""
    member.listen(sys.stdin)
    os._exit(1)


def _module(name: str) -> ModuleType:
    """Import a module by its name, or a script by its file."""
    if not os.path.isabs(name):
        return importlib.import_module(name)
    sys.path.insert(0, os.path.dirname(name))  # like Python does for a script
    loader = SourceFileLoader("p2pavg_swarm_script", name)
    module = ModuleType(loader.name)
    module.__file__ = name
    sys.modules[loader.name] = module  # dataclasses look there
    loader.exec_module(module)
    return module


def run_member(work: str, path: Sequence[str]) -> None:
    """Run one process of a swarm, from its setup on standard input to the end of its function.

    Args:
        work: the function, as ``"module:function"``.
        path: the folders in which this process looks for modules, after its own.
    """
    # Standard output carries the reports to the test. Redirect everything that the process prints to standard error.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = work.rpartition(":")
    sys.path += [entry for entry in path if entry not in sys.path]
    function: Callable[[Member], None] = getattr(_module(module), name)
    # Import what opening a peer needs, while the first process determines its address.
    importlib.import_module("p2pavg.net.libp2p.transport")
    line = sys.stdin.readline()
    if not line:  # the parent has left before it sent the setup
        return
    setup = json.loads(line)
    member = Member(setup["index"], setup["bootstrap"], setup["arguments"], reports)
    threading.Thread(target=_listen, args=(member,), daemon=True).start()
    function(member)


if __name__ == "__main__":
    run_member(sys.argv[1], json.loads(sys.argv[2]))
