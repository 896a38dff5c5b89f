"""How other peers can reach this one: what it learns of its own addresses, its router, and the ports that it maps."""
