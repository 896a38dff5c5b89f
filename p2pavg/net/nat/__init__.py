"""Peers behind routers: how they can be reached, relays, punches."""
