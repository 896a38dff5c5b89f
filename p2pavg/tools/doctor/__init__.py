"""Finds out why a peer does not meet others. ``p2pavg doctor`` is the command.

``probes`` gathers facts, within bounded time. ``rules`` turns facts into findings. ``examination``
joins the two, and ``findings`` writes them down.
"""
