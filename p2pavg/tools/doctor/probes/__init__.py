"""Probes: each gathers the facts of one rule, and ends within bounded time."""
