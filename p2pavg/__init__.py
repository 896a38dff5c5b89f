"""Peers average gradients and parameters over the open internet, with no server.

``p2pavg.blocking`` is for ordinary training loops, :func:`open_peer` for trio programs.

Importing the package is cheap. The first use of one of its names loads :mod:`p2pavg.api`, and torch with it; so does
``from p2pavg import`` with a name or a module. A command that needs no torch, such as ``p2pavg status``, answers at
once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from p2pavg.base import no_garbage_collection as _no_garbage_collection
from p2pavg.base.logs import install_default as _install_default
from p2pavg.base.version import __version__ as __version__

if TYPE_CHECKING:
    from p2pavg.api import *  # noqa: F403
    from p2pavg.api import __all__ as __all__
else:  # a type checker would let the functions below provide any name at all

    def __getattr__(name: str) -> object:
        """Load the public names; return one of them, or a module that was loaded with them (PEP 562)."""
        if name == "__all__" or not name.startswith("__"):
            with _no_garbage_collection():
                api = import_module("p2pavg.api")
            # While the names are being loaded, they ask for modules of the package here. The import system finds those.
            if name in getattr(api, "__all__", ()) or name == "__all__":
                globals()[name] = getattr(api, name)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("p2pavg.api").__all__})


_install_default()
