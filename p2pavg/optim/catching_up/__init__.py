"""Catching up: states that are offered and fetched, and checkpoints."""
