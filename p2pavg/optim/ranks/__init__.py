"""Peers that consist of several ranks."""
