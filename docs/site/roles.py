"""Links for the roles of reStructuredText in docstrings, such as :class:`~p2pavg.Success`, in the API reference."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`(~?)([\w.]+)`")
LITERAL = re.compile(r"``([^`\n]+)``")


class Roles(griffe.Extension):
    """Turns each role into a link to the object, where the reference has it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda found: _link(obj, found[1], found[2]), obj.docstring.value)
            obj.docstring.value = LITERAL.sub(r"`\1`", text)


def _link(obj: griffe.Object, short: str, name: str) -> str:
    shown = name.rpartition(".")[2] if short else name
    scope = obj if obj.is_class or obj.is_module else obj.parent
    path = name if name.startswith("p2pavg") or scope is None else f"{scope.path}.{name}"
    return f'<autoref identifier="{html.escape(path)}" optional><code>{html.escape(shown)}</code></autoref>'
