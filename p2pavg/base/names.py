"""Checks of names that peers choose and that end up in other peers' logs, results and records. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.limits import MAX_NAME_CHARS, MAX_RULE_CHARS


def is_name(name: str) -> bool:
    """Return whether a tag or a metric may have this name."""
    return bool(name) and name.isprintable() and len(name.encode()) <= MAX_NAME_CHARS


def is_rule(text: str) -> bool:
    """Return whether a participation rule may have this text. An empty text is no rule."""
    return len(text) <= MAX_RULE_CHARS and (not text or text.isprintable())
