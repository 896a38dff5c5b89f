"""What peers may call things that end up in others' logs, results and records."""

from __future__ import annotations

MAX_NAME_CHARS = 32  # of a tag, and of a metric; in UTF-8 as many bytes
MAX_TAGS = 16
MAX_METRICS = 16
MAX_METRIC = 1e100  # magnitude; means of larger ones may leave what a float holds
MAX_RULE_CHARS = 512


def is_name(name: str) -> bool:
    """Whether a tag or a metric may be called that."""
    return bool(name) and name.isprintable() and len(name.encode()) <= MAX_NAME_CHARS


def is_rule(text: str) -> bool:
    """Whether a rule of who contributes may read like that; empty is none."""
    return len(text) <= MAX_RULE_CHARS and (not text or text.isprintable())
